"""Device graphs: a step's launch list is run direct, captured, replayed, updated in place, or refused.

    runtime = SimulatedRuntime()                   # or the CUDA runtime; None where there is no CUDA device
    registry, table = Registry(), ResourceTable()
    registry.accept(manifest)                      # groups, banks, slots
    table.bind(name, Resource(…))                  # for every buffer of the launch list
    graphs = Graphs(runtime, registry, mode="on", max_entries=32, max_bytes=1 << 30)
    graphs.warm(launches, certificate, table)      # direct, then capture
    runtime.write(table.get("tokens").address, tokens, graphs.stream)
    outcome = graphs.step(launches, certificate, table)      # replay
    runtime.read(table.get("next").address, "int32", (rows,), graphs.stream)   # a copy; waits

`Graphs.step` returns when the step is queued; `Graphs.wait` waits for one. Everything that varies between replays (rows
that live, tokens, positions, block tables, routing) is written to device memory on ``graphs.stream`` before the step.
`decision` says what a step becomes, `events` what that does to a capture, `store` who holds what how long.

**Modes.** ``"on"``: as above; without a runtime the store is inert and says so. ``"off"``: every step direct.
``"strict"``: a step that ``"on"`` would run direct raises `NotReplayed` instead, before anything is launched; certified
prompt work, which is direct by rule, and calls of `Graphs.warm` are exempt. ``"simulate"``: ``"on"`` with a runtime on
the host, and nothing else.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any, cast

from moe_jax.pallas_kernels.errors import InvalidArgument

from .decision import Decision, Mode, Rules, decide
from .identity import Certificate, Programs, check_resources
from .launches import LaunchList
from .outcome import Counters, Outcome, StoreUnusable
from .registry import Registry
from .resources import Resource, ResourceTable
from .running import Runner, Staged
from .runtime import Runtime, StickyError, Stream
from .store import Entry, GraphStore, moved

MODES: tuple[Mode, ...] = ("on", "off", "strict", "simulate")


class Graphs:
    """The store of one engine; thread-safe. Two of them may share a runtime, each with a stream of its own.

    Args:
        runtime: None where there is no CUDA device.
        registry: manifests and owners.
        mode: see the module.
        max_entries: graphs at most.
        max_bytes: of device memory that they are assumed to take (`moe_jax.cache.store.estimated_bytes`).
        decode_boundary_overlap: a changed extent of a copy updates the executable in place, in the same call.

    Attributes:
        stream: everything of the engine runs on it; None in an inert store.
        last: the outcome of the last step.

    Raises:
        InvalidArgument: a mode that there is not or that the runtime does not serve, or a bound below 1.
        CudaError: the device gives no stream.
    """

    def __init__(
        self,
        runtime: Runtime | None,
        registry: Registry,
        *,
        mode: Mode = "on",
        max_entries: int = 32,
        max_bytes: int = 1 << 30,
        decode_boundary_overlap: bool = False,
    ):
        if mode not in MODES:
            raise InvalidArgument("mode", where="Graphs", got=repr(mode), wanted=" or ".join(MODES))
        if (mode == "simulate" and not (runtime and runtime.simulated)) or (mode == "strict" and runtime is None):
            got = f"{mode!r} with {'no' if runtime is None else 'a CUDA'} runtime"
            either = "" if mode == "simulate" else "the runtime of a CUDA device or "
            wanted = f"{either}a SimulatedRuntime, or mode 'on'"
            raise InvalidArgument("runtime", where="Graphs", got=got, wanted=wanted)
        self.mode: Mode = mode
        self.last: Outcome | None = None
        # Without a runtime nothing below is ever called: every method refuses.
        self._runtime, self._registry = cast(Runtime, runtime), registry
        # Why, and what would help.
        inert = ("inert: no CUDA device", "a CUDA device") if runtime is None else None
        self._unusable: tuple[str, str] | None = inert
        self._warming = False
        self._seen_registry = registry.version
        self._seen_table = (0, 0)
        self._lock = threading.RLock()
        self._counters = Counters()
        self.stream: Stream = None if runtime is None else runtime.new_stream()
        compiler = "none" if runtime is None else runtime.compiler
        self._rules = Rules(mode != "off", decode_boundary_overlap, max_bytes, compiler)
        self._store = GraphStore(self._runtime, self.stream, self._counters, max_entries, max_bytes)
        self._runner = Runner(self._runtime, self.stream, self._store, self._counters, strict=mode == "strict")

    def step(
        self,
        launches: LaunchList,
        certificate: Certificate,
        table: ResourceTable,
        *,
        staged: Staged | None = None,
    ) -> Outcome:
        """Queue one step.

        Args:
            table: has memory for every buffer of ``launches``.
            staged: queues the step host-staged on a stream, where its experts may not fit the slots.

        Raises:
            RequiredStepFailed: a required step failed closed.
            NotReplayed: in ``"strict"``.
            InvalidArgument: memory that is missing or of another layout, or a host-staged step without ``staged``.
            CudaError: a kernel did not load, or a direct launch failed; earlier launches of the step may have run.
            StoreUnusable: the store is inert, closed or dead.
        """
        # Not through `_guard`, which alone would cost more than all checks.
        with self._lock:
            self._refuse_unusable()
            try:
                self._store.collect()
                with self._runtime.range("moe_jax: plan"):
                    decision = self._decide(launches, certificate, table, self._store.programs)
                if decision.kind == "capture":
                    # Now already: if room is made, what is out of date is to go before what is not.
                    self._observe(table, decision.entry)
                try:
                    outcome = self._runner.run(decision, launches, certificate, table, staged, warming=self._warming)
                finally:
                    # The step's own graph was compared, and others can wait until the device is busy.
                    self._observe(table)
            except StickyError as error:
                self._die(error)
                raise
            self.last = outcome
            return outcome

    def probe(self, launches: LaunchList, certificate: Certificate, table: ResourceTable) -> Decision:
        """What `step` would do, and why; changes nothing."""
        with self._lock:
            return self._decide(launches, certificate, table, self._store.programs.copy())

    def warm(
        self,
        launches: LaunchList,
        certificate: Certificate,
        table: ResourceTable,
        *,
        staged: Staged | None = None,
    ) -> Outcome:
        """Make the calls after which this step is a replay: direct, then capture. They really run.

        Returns:
            the last one's outcome; a direct one says why the step is not captured.

        Raises:
            RequiredStepFailed, InvalidArgument, CudaError, StoreUnusable: as `step`.
        """
        with self._lock:
            self._warming = True
            try:
                outcome = self.step(launches, certificate, table, staged=staged)
                return outcome if outcome.kind != "direct" else self.step(launches, certificate, table, staged=staged)
            finally:
                self._warming = False

    def wait(self, outcome: Outcome) -> None:
        """Return when a step is done.

        Raises:
            CudaError: its work has failed.
            StoreUnusable: the store is inert, closed or dead, and the step is not known to be done.
        """
        if outcome.event is not None:
            with self._guard():
                self._runtime.wait(outcome.event)

    def drain(self) -> None:
        """Return when all steps are done, and destroy what waited for that.

        Raises:
            CudaError: their work has failed. A graph that CUDA does not take back is counted, and tried again.
            StoreUnusable: the store is inert, closed or dead.
        """
        with self._guard():
            self._store.drain()

    def grow(self, table: ResourceTable, name: str, make: Callable[[], Resource]) -> Resource:
        """Give an arena larger memory: wait for the work in flight, make the new one, invalidate what names the old.

        Steps of other threads wait until it is there. What others write into the arena on ``stream`` themselves is
        theirs to hold back meanwhile.

        Args:
            make: allocates, and brings over what must stay; copies on ``stream`` need not be waited for. If it raises
                nothing has changed.

        Returns:
            what the arena had before; nothing on ``stream`` uses it any more.

        Raises:
            InvalidArgument: the name is not bound or no arena's, or what ``make`` returned is smaller or no arena.
            CudaError: the work in flight has failed, or a copy of ``make``.
            StoreUnusable: the store is inert, closed or dead.
            Exception: whatever ``make`` raises, when what it has queued is done.
        """
        with self._guard():
            self._store.drain()
            try:
                resource = make()
                # The caller lets go of the old memory, which copies that `make` has queued may still read.
                self._runner.finish(resource)
                self._store.drain()
            except StickyError:
                raise
            except BaseException:
                # They may be under way to the new memory too, which goes with the error.
                self._runtime.synchronize(self.stream)
                raise
            old = table.grow(name, resource)
            self._observe(table)
            self._store.destroy_loose()
            return old

    def sweep(self, table: ResourceTable | None = None) -> None:
        """Do now what steps would have to: destroy what is out of date (old generations, graphs whose memory moved) and
        what waits for it, and resolve addresses anew.

        Raises:
            StickyError: the device context is lost. A graph that CUDA does not take back is counted, and tried again.
            StoreUnusable: the store is inert, closed or dead.
        """
        with self._guard():
            self._observe(table)
            self._store.destroy_loose()
            if table is not None:
                self._store.bindings.refresh(table)

    def stats(self) -> dict[str, Any]:
        """`Counters`, and what the store holds; bytes are an estimate."""
        with self._lock:
            captured = self._store.captured
            return self._counters.as_dict() | {
                "mode": self.mode,
                "state": self._unusable[0] if self._unusable else self.mode,
                "graphs": len(captured),
                "plans": len(self._store.entries),
                "retired": self._store.retired,
                "undestroyed": self._store.undestroyed,
                "max_entries": self._store.max_entries,
                "estimated_bytes": self._store.bytes,
                "max_bytes": self._store.max_bytes,
            }

    def close(self) -> None:
        """Wait for everything, destroy every graph, let go of all memory. A second call does nothing.

        Raises:
            CudaError: the work in flight has failed, and nothing was let go that it may use. Another call tries again,
                or lets go if the device context is lost.
        """
        with self._lock:
            if self._unusable is None:
                with self._guard():
                    self._store.clear()
                    # What was written after the last step may be under way to memory that is let go now.
                    self._runtime.synchronize(self.stream)
                self._unusable = "closed", "a store that is open"
            self._store.abandon()

    # Inside; the lock is held.

    @contextlib.contextmanager
    def _guard(self) -> Generator[None]:
        with self._lock:
            self._refuse_unusable()
            try:
                yield
            except StickyError as error:
                self._die(error)
                raise

    def _decide(
        self, launches: LaunchList, certificate: Certificate, table: ResourceTable, programs: Programs
    ) -> Decision:
        return decide(launches, certificate, table, self._registry, self._store.entries, self._rules, programs)

    def _refuse_unusable(self) -> None:
        if self._unusable is not None:
            got, wanted = self._unusable
            raise StoreUnusable("store of graphs", where="Graphs", got=got, wanted=wanted)

    def _die(self, error: StickyError) -> None:
        self._unusable = f"dead, the device context is lost: {error}", "a new process"

    def _observe(self, table: ResourceTable | None, capturing: Entry | None = None) -> None:
        """Catch up with a registry or table that has moved: a few integers when neither has.

        Graphs that are out of date are retired. No step depends on that: what it replays it has compared itself.
        Versions are read first, so that what moves meanwhile is looked at next time.

        Args:
            capturing: an entry that is about to be captured. It stays, so its generation is still to be looked at; its
                memory is bound after this.
        """
        version = self._registry.version
        if self._seen_registry != version:
            self._store.sweep(self._registry.current(), None if capturing is None else capturing.plan.key)
            if capturing is None:
                self._seen_registry = version
        if table is None:
            return
        seen = table.serial, table.version
        if self._seen_table == seen:
            return
        # A graph that is out of date would keep the old memory until the next call of its own key.
        for entry in self._store.captured:
            binding = entry.binding
            if binding is None or binding.held.table != table.serial:
                continue
            mismatch = check_resources(binding.held, table)
            if mismatch is None:
                entry.binding = binding.at(seen[1])
            else:
                entry.lost = moved(binding.held, mismatch), mismatch
                self._store.retire(entry)
        self._seen_table = seen
