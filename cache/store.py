"""Captured graphs by plan key: what each holds, their bounds, and the order in which they go.

A graph is destroyed only after the completion event of its last launch, never while a capture is open, and the capsules
of its memory are dropped after it. Device memory of a graph is an estimate (CUDA does not tell): `estimated_bytes`.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from moe_jax.pallas_kernels.errors import CudaError, InvalidArgument

from .binding import Binding, Bindings
from .events import Event
from .identity import Fingerprint, Held, Mismatch, Plan, PlanKey
from .launches import LaunchList
from .outcome import Counters, Outcome
from .runtime import Runtime, StickyError

GRAPH_BYTES = 64 << 10
NODE_BYTES = 2 << 10
# Plans without a graph (prompts, first calls) are small; so many of them are kept for each graph.
PLANS_PER_GRAPH = 4


def estimated_bytes(launches: LaunchList) -> int:
    """What an executable is assumed to take on the device: an allowance, and so much for each node."""
    return GRAPH_BYTES + NODE_BYTES * len(launches.launches)


class Entry:
    """A plan and, once captured, its executable.

    Attributes:
        plan, binding: what a direct step launched, or the executable holds. Swapped together, after a launch succeeded.
        executable: None before capture.
        event: of the executable's last launch.
        lost: what destroyed the executable between two calls, and the difference, until the next call has heard of it.
        replayed: the outcome of every replay.
    """

    __slots__ = ("binding", "event", "executable", "lost", "plan", "replayed")

    def __init__(self, plan: Plan):
        self.plan = plan
        self.binding: Binding | None = None
        self.executable: Any = None
        self.event: Any = None
        self.lost: tuple[Event, Mismatch] | None = None
        self.replayed: Outcome | None = None

    @property
    def fingerprint(self) -> Fingerprint:
        """Of what was captured, or launched last."""
        held = None if self.binding is None else self.binding.held
        resource = () if held is None else tuple(zip(held.launches.order, held.witnesses, strict=True))
        return Fingerprint(self.plan.program, resource)

    @property
    def bytes(self) -> int:
        """Estimated, on the device."""
        return 0 if self.executable is None else estimated_bytes(self.plan.launches)


class GraphStore:
    """Entries, the least recently used first, within bounds. Not thread-safe: its owner locks.

    Args:
        max_entries: executables at most.
        max_bytes: estimated, of all executables.

    Attributes:
        bindings: of the launch lists that were run last. They hold no memory.
    """

    def __init__(self, runtime: Runtime, counters: Counters, max_entries: int, max_bytes: int):
        where = "Graphs"
        if max_entries < 1:
            raise InvalidArgument("max_entries", where=where, got=max_entries, wanted="at least 1")
        if max_bytes < 1:
            raise InvalidArgument("max_bytes", where=where, got=max_bytes, wanted="at least 1")
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self.entries: OrderedDict[PlanKey, Entry] = OrderedDict()
        self.bindings = Bindings(runtime, PLANS_PER_GRAPH * max_entries)
        self._newest: Entry | None = None
        self._runtime, self._counters = runtime, counters
        self._direct: deque[tuple[Any, object]] = deque()
        self._undestroyed: list[tuple[Any, Any, object]] = []

    @property
    def captured(self) -> list[Entry]:
        """Entries with an executable."""
        return [entry for entry in self.entries.values() if entry.executable is not None]

    @property
    def bytes(self) -> int:
        """Estimated, of all executables."""
        return sum(entry.bytes for entry in self.captured)

    @property
    def undestroyed(self) -> int:
        """Graphs that CUDA did not take back yet."""
        return len(self._undestroyed)

    def add(self, plan: Plan) -> Entry:
        """A new entry, the most recently used; the oldest go where there are too many."""
        entry = self._newest = self.entries[plan.key] = Entry(plan)
        while len(self.entries) > PLANS_PER_GRAPH * self.max_entries:
            self._evict(next(iter(self.entries)))
        return entry

    def use(self, entry: Entry) -> None:
        """Make a kept entry the most recently used; nothing is to be done where it is already."""
        if entry is not self._newest:
            self.entries.move_to_end(entry.plan.key)
            self._newest = entry

    def make_room(self, plan: Plan) -> None:
        """Evict until an executable of this plan fits too. Called before capture begins."""
        size = estimated_bytes(plan.launches)
        while (old := self.captured) and (len(old) >= self.max_entries or self.bytes + size > self.max_bytes):
            self._evict(old[0].plan.key)

    def forget(self, key: PlanKey) -> None:
        """Drop an entry and whatever it holds."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            if entry is self._newest:
                self._newest = None
            self.release(entry)

    def sweep(self, current: Callable[[PlanKey], bool]) -> None:
        """Drop entries whose generation is over."""
        for key in [key for key in self.entries if not current(key)]:
            self._counters.swept += 1
            self.forget(key)

    def release(self, entry: Entry) -> None:
        """Destroy an entry's executable, if it has one, when its last launch is done; then let go of its memory."""
        executable, event, binding = entry.executable, entry.event, entry.binding
        entry.executable = entry.event = entry.binding = entry.replayed = None
        if executable is not None:
            self.destroy(executable, event, binding)

    def destroy(self, graph: Any, event: Any = None, holds: object = None) -> None:
        """Wait for an event and give a graph back. One that is not taken is kept, with all it holds, for the next try;
        errors other than those of CUDA pass.
        """
        try:
            if event is not None and not self._runtime.event_done(event):
                self._runtime.wait(event)
            self._runtime.destroy(graph)
        except StickyError:
            raise
        except CudaError:
            self._counters.destroy_errors += 1
            self._undestroyed.append((graph, event, holds))
        except BaseException:
            self._undestroyed.append((graph, event, holds))
            raise

    def in_flight(self, event: Any, holds: object) -> None:
        """Keep what a direct step uses until its event is done."""
        self._direct.append((event, holds))

    def collect(self) -> None:
        """Let go of what finished direct steps used, and try again what was not destroyed."""
        try:
            while self._direct and self._runtime.event_done(self._direct[0][0]):
                self._direct.popleft()
        except StickyError:
            raise
        except CudaError:
            pass  # not known to be done: asked again at the next step
        for _ in range(len(self._undestroyed)):
            self.destroy(*self._undestroyed.pop(0))

    def drain(self) -> None:
        """Wait for everything in flight."""
        for event, _ in self._direct:
            self._runtime.wait(event)
        self._direct.clear()
        for entry in self.entries.values():
            if entry.event is not None:
                self._runtime.wait(entry.event)

    def clear(self) -> None:
        """Destroy everything, each when it is done. An error keeps no other graph from its turn; the first is raised.

        A lost context takes nothing back, so a sticky error is raised at once.
        """
        keys = list(self.entries)
        for number, key in enumerate(keys, 1):
            try:
                self.forget(key)
            except StickyError:
                raise
            except Exception:
                for other in keys[number:]:
                    with contextlib.suppress(Exception):
                        self.forget(other)
                raise
        self.drain()
        self.collect()

    def abandon(self) -> None:
        """Forget everything and ask the device nothing: a lost context takes nothing back."""
        self.entries.clear()
        self.bindings.clear()
        self._newest = None

    def _evict(self, key: PlanKey) -> None:
        if self.entries[key].executable is not None:
            self._counters.evictions += 1
        self.forget(key)


def moved(held: Held, mismatch: Mismatch) -> Event:
    """What it is called that a resource was found elsewhere."""
    name = mismatch.path.rpartition(".")[0]
    arena = held.witnesses[held.launches.order[name]].use == "arena"
    return Event.REALLOCATED if arena else Event.WEIGHTS_MOVED
