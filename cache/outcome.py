"""What a step was and why, counted; and the errors of steps that were not run."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from moe_jax.pallas_kernels.errors import MoeJaxError

from .events import Kind
from .identity import Mismatch


class Reason(enum.StrEnum):
    """Why a step ran direct."""

    FIRST_CALL = "first call"
    PROMPT = "prompt"
    OFF = "graphs off"
    HOST_STAGED = "host-staged"
    PROPERTIES_CHANGED = "launch property changed"
    WEIGHTS_MOVED = "weights moved"
    REALLOCATED = "arena reallocated"
    MALFORMED = "malformed certificate"
    NO_CONTEXT = "no grouped context"
    STALE_OWNER = "stale owner generation"
    ADMISSION_CLOSED = "admission closed"
    NOT_COVERED = "not covered"
    TOO_LARGE = "larger than the store"
    GRAPH_FAILED = "graph failed"


FALLBACKS = frozenset(
    {
        *(Reason.MALFORMED, Reason.NO_CONTEXT, Reason.STALE_OWNER, Reason.ADMISSION_CLOSED),
        *(Reason.NOT_COVERED, Reason.TOO_LARGE, Reason.GRAPH_FAILED),
    }
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step that was queued.

    Attributes:
        kind: how.
        reason: why direct; None for the other kinds.
        said: the particulars, where it is not the mismatch that says them.
        mismatch: the difference that a check met, if one did.
        handle: of the executable that was launched; None for a direct step.
        event: done when the step is, or a later one on the same stream; None when the step is done already.
    """

    kind: Kind
    reason: Reason | None = None
    said: str | None = None
    mismatch: Mismatch | None = None
    handle: Any = None
    event: Any = None

    @property
    def detail(self) -> str | None:
        """The particulars of the reason, for people. Made when they are asked for: a step has no time for them."""
        return particulars(self.reason, self.said, self.mismatch)


def particulars(reason: Reason | None, said: str | None, mismatch: Mismatch | None) -> str | None:
    """What is told of a reason: what was said, or else the difference that was met."""
    return str(mismatch) if said is None and reason is not None and mismatch is not None else said


class RequiredStepFailed(MoeJaxError, RuntimeError):
    """A required step that could not run as it must. Nothing was launched and no output changed; the next call of a
    valid step recovers.
    """


class NotReplayed(MoeJaxError, RuntimeError):
    """In ``"strict"``: a step that would have run direct outside warm-up. Nothing was launched."""


class StoreUnusable(MoeJaxError, RuntimeError):
    """The store is closed, inert, or dead because the device context is lost."""


@dataclass
class Counters:
    """Counts of a store since it was made. Three sums hold, unless a step was interrupted between two counts::

        plan_calls = plan_compiles + plan_reuses
        steps = direct + captures + updates + replays
        direct = sum(declines.values())

    Attributes:
        steps: that were queued; a step that raised is not one.
        plan_calls: steps that got as far as a plan.
        updates: executables changed in place or, where CUDA refused that, made again (``reinstantiations`` of them).
        declines: direct steps by reason.
        fallback: those of them that would have run otherwise had nothing failed.
        required_unsupported: required steps that failed closed.
        prepare_error: steps stopped before their first launch: a kernel did not load, or memory does not fit.
        launch_error: direct steps stopped by a launch.
        graph_error: captures and replays that failed, by call.
        finish_error: steps whose completion event could not be recorded; they were waited for instead.
        destroy_errors: graphs that CUDA did not take back; tried again as those that are retired.
        evictions: graphs dropped for room. What `Graphs.sweep` destroys counts as none of these.
        swept: keys, of graphs and of plans without one, that were dropped because their generation was over.
        transitions: changes between prompt and decode.
    """

    steps: int = 0
    plan_calls: int = 0
    plan_compiles: int = 0
    plan_reuses: int = 0
    direct: int = 0
    captures: int = 0
    updates: int = 0
    reinstantiations: int = 0
    replays: int = 0
    declines: Counter[str] = field(default_factory=Counter)
    fallback: int = 0
    required_unsupported: int = 0
    prepare_error: int = 0
    launch_error: int = 0
    graph_error: Counter[str] = field(default_factory=Counter)
    finish_error: int = 0
    destroy_errors: int = 0
    evictions: int = 0
    swept: int = 0
    transitions: int = 0

    def as_dict(self) -> dict[str, Any]:
        """A copy of all counts."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}
