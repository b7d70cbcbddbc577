"""Every error this package raises on purpose, in one place."""

from __future__ import annotations

from collections.abc import Sequence

from moe_jax.pallas_kernels.errors import CannotServe, InvalidArgument, MoeJaxError, SlowPathWarning


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


__all__ = ["CannotServe", "CheckpointError", "InvalidArgument", "MoeJaxError", "PlanChanged", "SlowPathWarning"]
