"""What the tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backends import counted_compiles
from moe_jax.testing import engine_for

__all__ = ["compiles", "engine_for"]


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """One item for each program that JAX has compiled since."""
    with counted_compiles() as found:
        yield found
