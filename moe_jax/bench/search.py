"""Search among candidates under a time limit. Knows nothing of kernels: it is given a list and a measure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from moe_jax.bench.run import one_line
from moe_jax.bench.timing import Clock
from moe_jax.pallas_kernels.errors import CudaError


class Trial[C](NamedTuple):
    """A candidate's median microseconds and spread."""

    candidate: C
    us: float
    spread: float


class Outcome[C](NamedTuple):
    """What a search found.

    Attributes:
        best: the first candidate, unless another is faster by more than both their spreads; None if the first could
            not be measured and no other could.
        trials: in the order tried.
        faults: ``(candidate, what went wrong)``.
        complete: whether the time was enough for all.
    """

    best: Trial[C] | None
    trials: list[Trial[C]]
    faults: list[tuple[C, str]]
    complete: bool


def search[C](candidates: Iterable[C], measure: Callable[[C], tuple[float, float]], clock: Clock) -> Outcome[C]:
    """Measure candidates in order while there is time. The first is what the heuristic says.

    Args:
        measure: median and spread in microseconds; may raise, and the candidate is then out.

    Raises:
        CudaError: the device stopped working.
    """
    trials: list[Trial[C]] = []
    faults: list[tuple[C, str]] = []
    complete = True
    for candidate in candidates:
        if clock.left <= 0:
            complete = False
            break
        try:
            trials.append(Trial(candidate, *measure(candidate)))
        except CudaError:
            raise
        except Exception as error:  # a tile that does not compile or fit is no reason to stop
            faults.append((candidate, one_line(error)))
    best = None
    for trial in trials:
        if best is None or trial.us + trial.spread < best.us - best.spread:
            best = trial
    return Outcome(best, trials, faults, complete)


def best_common[F](found: Mapping[F, Mapping[int, Trial]], floors: Mapping[int, float]) -> F | None:
    """Of several values of what must not vary with the rows, the one with the least sum of ratios to the floor.

    Args:
        found: for each value the best trial of each row count; values that miss one are out.
        floors: microseconds by row count.
    """
    whole = {value: trials for value, trials in found.items() if set(trials) == set(floors)}
    if not whole:
        return None
    return min(whole, key=lambda value: sum(whole[value][rows].us / floors[rows] for rows in floors))
