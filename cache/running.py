"""Carrying out what was decided: direct, capture, update or replay, and what remains when a call of CUDA fails.

Kernels are loaded and addresses resolved before capture begins; inside it the collector is off and nothing but launches
is called. An entry gets what is new only after the launch has succeeded: executable, plan, operands, kernels and
witnesses together. A failure before that leaves the key as if never seen.

An interrupt may come between any two lines. What is queued or was made is in the books of the store by then: claims
before the first launch, graphs as soon as they are made, and an entry has no event while it is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moe_jax.pallas_kernels.errors import CudaError, InvalidArgument

from .binding import Binding, memory
from .decision import Decision
from .events import EFFECTS, Event, Kind
from .identity import Certificate, Mismatch, Plan
from .launches import LaunchList
from .outcome import FALLBACKS, Counters, NotReplayed, Outcome, Reason, RequiredStepFailed
from .resources import Resource, ResourceTable, Snapshot
from .runtime import Captured, Executable, Runtime, StickyError, Stream, no_collection
from .store import UNRECORDED, Entry, GraphStore, Loose, estimated_bytes

WHERE = "Graphs.step"
Staged = Callable[[Stream], None]


class Runner:
    """Runs decisions on one stream. Not thread-safe: its owner locks.

    Args:
        strict: a direct step raises, but for prompts and warm-up.
    """

    def __init__(self, runtime: Runtime, stream: Stream, store: GraphStore, counters: Counters, *, strict: bool):
        self._runtime, self._stream, self._store, self._counters = runtime, stream, store, counters
        self._strict = strict
        self._phase: str | None = None
        self._call = ""

    def run(
        self,
        decision: Decision,
        launches: LaunchList,
        certificate: Certificate,
        table: ResourceTable,
        staged: Staged | None,
        *,
        warming: bool,
    ) -> Outcome:
        """Queue the step as decided; arguments and errors are those of `Graphs.step`."""
        self._count_plan(decision, certificate)
        entry, plan = decision.entry, decision.plan
        if entry is not None and plan is not None and decision.kind != "direct":
            binding = None
            if decision.kind != "replay":
                binding, resources = self._bound(launches, table)
                binding = binding.claiming(resources)
            try:
                if binding is None:
                    outcome = self._replay(entry)
                elif decision.kind == "capture":
                    outcome = self._capture(entry, plan, binding)
                else:
                    outcome = self._update(entry, plan, binding, decision)
            except StickyError:
                raise
            except CudaError as error:
                self._counters.graph_error[self._call] += 1
                self._store.forget(entry.plan.key)
                self._store.destroy_loose()
                detail = f"{self._call}: {error}"
                decision = Decision("direct", Reason.GRAPH_FAILED, detail, Event.CUDA_FAILED, plan=plan)
            else:
                # Outside what may fail: no error there is one of this step.
                self._store.destroy_one()
                return outcome
        self._admit_direct(decision, certificate, self._strict and not warming)
        return self._direct(decision, launches, table, staged)

    def _count_plan(self, decision: Decision, certificate: Certificate) -> None:
        if decision.plan is None:
            return
        counters = self._counters
        counters.plan_calls += 1
        if decision.compiled:
            counters.plan_compiles += 1
        else:
            counters.plan_reuses += 1
        if decision.entry is not None:
            self._store.use(decision.entry)
        if self._phase != certificate.phase:
            counters.transitions += self._phase is not None
            self._phase = certificate.phase

    # Direct.

    def _admit_direct(self, decision: Decision, certificate: Certificate, strict: bool) -> None:
        """Do what the event does to the capture, and stop a step that may not run direct."""
        effect = None if decision.event is None else EFFECTS[decision.event]
        fails = certificate.required and (decision.fails or (effect is not None and effect.required != "same"))
        if strict and not fails and decision.reason is not Reason.PROMPT:
            wanted = "a replay; Graphs.warm makes the first calls"
            raise NotReplayed("direct step", where=WHERE, got=_why(decision), wanted=wanted)
        if effect is not None and effect.fate == "destroyed" and decision.entry is not None:
            # As if never seen.
            self._store.retire(decision.entry)
            decision.entry.lost = None
        if fails:
            self._counters.required_unsupported += 1
            self._store.destroy_loose()
            wanted = "a step that can run grouped"
            raise RequiredStepFailed("required step", where=WHERE, got=_why(decision), wanted=wanted)

    def _direct(self, decision: Decision, launches: LaunchList, table: ResourceTable, staged: Staged | None) -> Outcome:
        plan, reason, binding = decision.plan, decision.reason, None
        with self._runtime.range("moe_jax: direct"):
            if reason is Reason.HOST_STAGED:
                if staged is None:
                    wanted = "a function that runs the step in waves"
                    raise InvalidArgument("staged", where=WHERE, got=f"None ({decision.detail})", wanted=wanted)
                event = self._launch_direct(lambda: staged(self._stream), self._memory(launches, table))
            else:
                binding, resources = self._bound(launches, table)
                event = self._launch_direct(lambda: binding.run(self._runtime, self._stream), (binding, resources))
        if plan is not None and reason is not Reason.GRAPH_FAILED:
            entry = self._store.entries.get(plan.key) or self._store.add(plan)
            entry.plan, entry.lost = plan, None
            entry.binding = binding
        counters = self._counters
        counters.steps += 1
        counters.direct += 1
        counters.declines[str(reason)] += 1
        counters.fallback += reason in FALLBACKS
        self._store.put_off()
        return Outcome("direct", reason, decision.said, decision.mismatch, None, event)

    def _launch_direct(self, launch: Callable[[], None], holds: object) -> Any:
        """Launch, and keep what is used until it is done, also where only the first launches were queued."""
        flight = self._store.in_flight(holds)
        try:
            launch()
        except CudaError:
            self._counters.launch_error += 1
            raise
        finally:
            flight.event = self._recorded(None)
        return flight.event

    def _memory(self, launches: LaunchList, table: ResourceTable) -> Snapshot:
        """A claim on it for one step."""
        snapshot = table.snapshot()
        try:
            memory(WHERE, launches, table, snapshot)
            return snapshot
        except InvalidArgument:
            self._counters.prepare_error += 1
            raise

    def _bound(self, launches: LaunchList, table: ResourceTable) -> tuple[Binding, Mapping[str, Resource]]:
        try:
            return self._store.bindings.bound(WHERE, launches, table)
        except (CudaError, InvalidArgument):
            self._counters.prepare_error += 1
            raise

    # Graphs. `_call` names the step that is under way, for the counters.

    def _replay(self, entry: Entry) -> Outcome:
        with self._runtime.range("moe_jax: replay"):
            self._call = "launch"
            # That of the launch before would be done too early for this one.
            event, entry.event = entry.event, UNRECORDED
            self._runtime.launch_graph(entry.executable, self._stream)
            self._counters.steps += 1
            self._counters.replays += 1
            outcome = entry.replayed
            event = self._recorded(None if event is UNRECORDED else event)
            if outcome is None or outcome.event is not event:
                outcome = entry.replayed = Outcome("replay", handle=entry.executable, event=event)
            self._set_event(entry, event)
        return outcome

    def _capture(self, entry: Entry, plan: Plan, binding: Binding) -> Outcome:
        with self._runtime.range("moe_jax: capture"):
            self._store.make_room(plan)
            captured = self._record(binding)
            try:
                executable = self._instantiated(captured, binding)
            finally:
                self._store.destroy(captured)
            self._upload_and_launch(executable)
        self._counters.steps += 1
        self._counters.captures += 1
        return self._commit(entry, plan, binding, executable, "capture")

    def _update(self, entry: Entry, plan: Plan, binding: Binding, decision: Decision) -> Outcome:
        with self._runtime.range("moe_jax: update"):
            before = Loose(entry.event, entry.binding, entry.bytes)
            captured = self._record(binding)
            try:
                old = executable = self._store.take(entry, binding)
                self._call = "update"
                if not self._runtime.update(executable, captured):
                    executable = self._instantiated(captured, binding)
            finally:
                self._store.destroy(captured)
            self._upload_and_launch(executable)
            if executable is not old:
                self._counters.reinstantiations += 1
                self._store.destroy(self._store.own(lambda: old, before))
        self._counters.steps += 1
        self._counters.updates += 1
        return self._commit(entry, plan, binding, executable, "update", decision.mismatch)

    def _record(self, binding: Binding) -> Captured:
        with no_collection():
            try:
                self._call = "begin"
                capture = self._runtime.begin_capture(self._stream)
                self._call = "record"
                binding.run(self._runtime, capture)
                self._call = "end"
                return self._store.own(lambda: self._runtime.end_capture(capture))
            except BaseException:
                # Also what has begun and was never told.
                self._runtime.abandon_capture(self._stream)
                raise

    def _instantiated(self, captured: Captured, binding: Binding) -> Executable:
        self._call = "instantiate"
        loose = Loose(UNRECORDED, binding, estimated_bytes(binding.held.launches))
        return self._store.own(lambda: self._runtime.instantiate(captured), loose)

    def _upload_and_launch(self, executable: Executable) -> None:
        self._call = "upload"
        self._runtime.upload(executable, self._stream)
        self._call = "launch"
        self._runtime.launch_graph(executable, self._stream)

    def _commit(
        self,
        entry: Entry,
        plan: Plan,
        binding: Binding,
        executable: Executable,
        kind: Kind,
        mismatch: Mismatch | None = None,
    ) -> Outcome:
        self._store.keep(entry, plan, binding, executable)
        event = self._recorded(None)
        self._set_event(entry, event)
        return Outcome(kind, mismatch=mismatch, handle=executable, event=event)

    # Finish.

    def _set_event(self, entry: Entry, event: Any) -> None:
        """A graph whose launches cannot be told to be done is not kept; this one was waited for."""
        entry.event = event
        if event is None:
            self._store.forget(entry.plan.key)

    def finish(self, holds: object) -> Any:
        """An event behind what was queued, until which ``holds`` is kept; None where it had to be waited for."""
        event = self._recorded(None)
        if event is not None:
            self._store.in_flight(holds, event)
        return event

    def _recorded(self, event: Any) -> Any:
        """An event behind what was queued; or wait, and None, where none can be recorded."""
        try:
            return self._runtime.record_event(self._stream, event)
        except StickyError:
            raise
        except CudaError as error:
            self._counters.finish_error += 1
            try:
                self._runtime.synchronize(self._stream)
            except CudaError as second:
                # What runs is not known and cannot be waited for: nothing may be given back.
                raise StickyError(
                    "stream", where=WHERE, got=f"{error}; {second}", wanted="an event, or an end of the work in flight"
                ) from second
            return None


def _why(decision: Decision) -> str:
    return f"{decision.reason} ({decision.detail})" if decision.detail else str(decision.reason)
