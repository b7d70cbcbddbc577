"""What a step is going to be, decided without doing anything; the store then acts on it.

In order: certificate, admission, coverage, host-staging, mode, prompt, first call, the checks, and last whether the
graph would fit. The first that speaks decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .events import Event, Kind
from .identity import (
    Certificate,
    Mismatch,
    Plan,
    PlanKey,
    Programs,
    check_plan_key,
    check_program,
    check_properties,
    check_resources,
    compile_plan,
)
from .launches import LaunchList
from .outcome import Reason, particulars
from .registry import Refusal, Registry
from .resources import ResourceTable
from .store import Entry, estimated_bytes, moved

Mode = Literal["on", "off", "strict", "simulate"]

_REFUSALS: dict[Refusal, Reason] = {
    "no grouped context": Reason.NO_CONTEXT,
    "stale owner generation": Reason.STALE_OWNER,
    "admission closed": Reason.ADMISSION_CLOSED,
}
_MOVED = {
    Event.WEIGHTS_MOVED: Reason.WEIGHTS_MOVED,
    Event.REALLOCATED: Reason.REALLOCATED,
    Event.PROPERTIES_CHANGED: Reason.PROPERTIES_CHANGED,
}


class Decision(NamedTuple):
    """What a step is going to be.

    Attributes:
        kind: as in `Outcome`.
        reason, said: of a direct step, as in `Outcome`.
        event: the row of the table that applies, where something happened to a capture or to the step.
        mismatch: what a check found.
        plan: None where none was reached.
        entry: the plan's own, if it is kept.
        compiled: the plan was made now; the entry does not know it.
        fails: a required step fails whatever the event.
    """

    kind: Kind
    reason: Reason | None = None
    said: str | None = None
    event: Event | None = None
    mismatch: Mismatch | None = None
    plan: Plan | None = None
    entry: Entry | None = None
    compiled: bool = False
    fails: bool = False

    @property
    def detail(self) -> str | None:
        """As in `Outcome`."""
        return particulars(self.reason, self.said, self.mismatch)


@dataclass(frozen=True)
class Rules:
    """What decisions depend on besides the step.

    Attributes:
        captures: False when the mode is off.
        overlap: changed launch properties update an executable in place.
        max_bytes: of the store.
        compiler: of the runtime.
    """

    captures: bool
    overlap: bool
    max_bytes: int
    compiler: str


def decide(
    launches: LaunchList,
    certificate: Certificate,
    table: ResourceTable,
    registry: Registry,
    entries: Mapping[PlanKey, Entry],
    rules: Rules,
    programs: Programs,
) -> Decision:
    """See the module.

    Args:
        entries: by plan key.
        programs: that plans were made of. One that has to be compiled now is put there; nothing else is changed.
    """
    if certificate.problem is not None:
        return Decision("direct", Reason.MALFORMED, certificate.problem, fails=True)
    manifest, generation = registry.manifest(certificate.namespace)
    key = PlanKey(launches.key, *certificate.identity, generation)
    entry = entries.get(key)
    refusal = registry.admit(certificate)
    if refusal is not None or manifest is None:
        why, detail = refusal or ("no grouped context", None)
        return Decision("direct", _REFUSALS[why], detail, Event.ADMISSION_FAILED, entry=entry)
    # The same launch list, or one of equal content: the plan is reused.
    compiled = entry is None or (
        entry.plan.launches is not launches and entry.plan.properties.extents != launches.extents
    )
    plan = entry.plan if entry is not None and not compiled else None
    if plan is None:
        plan = compile_plan(key, launches, certificate, manifest, rules.compiler, programs)
    if entry is not None and entry.executable is not None:
        return _captured(entry, plan, key, table, rules, compiled)
    return _uncaptured(entry, plan, certificate, table, rules, compiled)


def _captured(entry: Entry, plan: Plan, key: PlanKey, table: ResourceTable, rules: Rules, compiled: bool) -> Decision:
    recorded = entry.plan
    assert entry.binding is not None
    owners = check_resources(entry.binding.held, table)
    if owners is not None:
        return _changed(moved(entry.binding.held, owners), owners, plan, entry, compiled)
    if plan is recorded:
        # Nothing for the other checks to compare: the entry was found by this plan's own key.
        # By position: half the time that names take, and this is every replay.
        return Decision("replay", None, None, None, None, plan, entry, compiled)
    # A plan that was compiled now, as the extents of copies are others.
    same = (
        check_program(recorded.program.key, plan.program.key)
        or check_plan_key(recorded.key, key)
        or check_properties(recorded.properties, plan.properties)
    )
    if same is None:
        return Decision("replay", plan=plan, entry=entry, compiled=compiled)
    if rules.overlap and same.check == "properties":
        return Decision("update", None, None, Event.PROPERTIES_UPDATED, same, plan, entry, compiled)
    return _changed(Event.PROPERTIES_CHANGED, same, plan, entry, compiled)


def _changed(event: Event, mismatch: Mismatch, plan: Plan, entry: Entry, compiled: bool) -> Decision:
    return Decision("direct", _MOVED[event], None, event, mismatch, plan, entry, compiled)


def _uncaptured(
    entry: Entry | None, plan: Plan, certificate: Certificate, table: ResourceTable, rules: Rules, compiled: bool
) -> Decision:
    def direct(reason: Reason, detail: str | None = None, event: Event | None = None) -> Decision:
        return Decision("direct", reason, detail, event, None, plan, entry, compiled)

    program = plan.program
    if program.refusal is not None:
        return direct(Reason.NOT_COVERED, program.refusal, Event.INCOMPATIBLE)
    if program.staged is not None:
        return direct(Reason.HOST_STAGED, program.staged, Event.EXCEEDS_SLOTS)
    if not rules.captures:
        return direct(Reason.OFF)
    if certificate.phase == "prompt":
        return direct(Reason.PROMPT)
    if entry is not None and entry.lost is not None:
        event, mismatch = entry.lost
        return _changed(event, mismatch, plan, entry, compiled)
    if entry is None or entry.binding is None:
        return direct(Reason.FIRST_CALL)
    mismatch = check_properties(entry.plan.properties, plan.properties) or check_resources(entry.binding.held, table)
    if mismatch is not None:
        return direct(Reason.FIRST_CALL)._replace(mismatch=mismatch)
    if estimated_bytes(plan.launches) > rules.max_bytes:
        detail = f"{estimated_bytes(plan.launches)} bytes estimated, {rules.max_bytes} allowed"
        return direct(Reason.TOO_LARGE, detail)
    return Decision("capture", plan=plan, entry=entry, compiled=compiled)
