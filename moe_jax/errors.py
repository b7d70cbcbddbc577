"""Every error that a user of the imported package can meet, in one place.

All are `MoeJaxError` and say ``where``, what was ``got`` and what is ``wanted``:

* `InvalidArgument`: the call can never work. `CannotServe`: it cannot work here, or not at present.
* `CheckpointError`: the files of a model. `PlanChanged`: a `moe_jax.planned_jit` call needs a new program.
* `CudaError`: a call of CUDA failed; `StickyError`: the process cannot use the device any more.
* `StoreUnusable`: the engine was closed, or the device was lost. `NotReplayed`: ``graphs="strict"`` and no replay.
* `RequiredStepFailed`: of `moe_jax.cache.Graphs` with required steps, which no engine makes.

`SlowPathWarning` is a warning.
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_jax.cache.outcome import NotReplayed, RequiredStepFailed, StoreUnusable
from moe_jax.cache.runtime import StickyError
from moe_jax.pallas_kernels.errors import CannotServe, CudaError, InvalidArgument, MoeJaxError, SlowPathWarning


class CheckpointError(MoeJaxError, ValueError):
    """A checkpoint that cannot be loaded: names the file and tensor, what was got and what was wanted."""


class PlanChanged(MoeJaxError, RuntimeError):
    """A call of a `moe_jax.planned_jit` function needs a program that was not prepared; nothing ran.

    Attributes:
        differences: every field of the fingerprint that differs from the nearest prepared one, as ``(path, prepared,
            this call)``; ``wanted`` and ``got`` are those of the first.
    """

    def __init__(
        self,
        problem: str,
        *,
        where: str,
        got: object,
        wanted: object,
        differences: Sequence[tuple[str, str, str]] = (),
    ):
        super().__init__(problem, where=where, got=got, wanted=wanted)
        self.differences = tuple(differences)


__all__ = [
    "CannotServe",
    "CheckpointError",
    "CudaError",
    "InvalidArgument",
    "MoeJaxError",
    "NotReplayed",
    "PlanChanged",
    "RequiredStepFailed",
    "SlowPathWarning",
    "StickyError",
    "StoreUnusable",
]
