"""What the tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from moe_jax.testing import engine_for

__all__ = ["compiles", "engine_for"]


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """One item for each program that JAX has compiled since."""
    found: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)
