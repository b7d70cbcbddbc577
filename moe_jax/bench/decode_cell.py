"""What a mode gives of one cell of the decode bench, and what stops it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from moe_jax.bench.timing import Clock
from moe_jax.errors import CannotServe

STEPS = 60  # that are timed one by one
LEAST_STEPS = 10  # of which the median counts where the time is over before
WARM = 30  # steps before them: the first compiles, the second captures, the others bring the clocks up


class Measured(NamedTuple):
    """One configuration of a mode.

    Attributes:
        configuration: what tells it from the mode's other ones.
        backend: what computes: the compiler of an engine's kernels, or who multiplies by experts inside ``jit``.
        us: of each step, by the host's clock; an engine's as `Engine.generate` makes them.
        first_step_s: seconds of the first step; a jitted one is compiled in it, an engine's kernels before.
        build_s: seconds of making the engine, compiling all its kernels.
        alone_us: of a step by `Engine.step`, which is queued when the tokens of the one before have been read.
        device_us: of a step where steps are queued without waiting.
        host_us: of a step without its launches and without waiting for the device.
        checks_us: of these the plan's lookup and the checks.
        launch_us: of a step's launches.
        launches: of a step.
        capture_ms: capture and instantiation of the step's graph.
        experts: distinct experts of a layer in a step, counted.
    """

    configuration: str
    backend: str
    us: list[float]
    first_step_s: float
    build_s: float | None = None
    alone_us: float | None = None
    device_us: float | None = None
    host_us: float | None = None
    checks_us: float | None = None
    launch_us: float | None = None
    launches: int | None = None
    capture_ms: float | None = None
    experts: float | None = None


def check_time(where: str, clock: Clock) -> None:
    """Stop a cell that has nothing to show yet.

    Raises:
        CannotServe: the time is over.
    """
    if clock.left <= 0:
        raise CannotServe("time", where=where, got=f"{clock.limit:.0f} s, all spent", wanted="a longer --time-limit")


def goes_on(where: str, clock: Clock, done: Sequence[float], steps: int) -> bool:
    """Whether another step is to be timed.

    Raises:
        CannotServe: the time is over and there are too few.
    """
    if len(done) < LEAST_STEPS:
        check_time(where, clock)
    return len(done) < steps and clock.left > 0


def check_finite(where: str, values: Any) -> None:
    """Refuse a step whose logits are no numbers: its time would be that of something else.

    Raises:
        CannotServe: NaN or infinity.
    """
    wrong = int(np.size(values) - np.isfinite(values).sum())
    if wrong:
        raise CannotServe("results", where=where, got=f"{wrong} that are not finite", wanted="none")
