"""What the tests of the engine share."""

from __future__ import annotations

from moe_jax.testing import engine_for

__all__ = ["engine_for"]
