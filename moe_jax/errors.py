"""Every error this package raises on purpose, in one place."""

from __future__ import annotations

from moe_jax.pallas_kernels.errors import CannotServe, InvalidArgument, MoeJaxError, SlowPathWarning


class CheckpointError(MoeJaxError, ValueError):
    """A checkpoint that cannot be loaded: names the file and tensor, what was got and what was wanted."""


__all__ = ["CannotServe", "CheckpointError", "InvalidArgument", "MoeJaxError", "SlowPathWarning"]
