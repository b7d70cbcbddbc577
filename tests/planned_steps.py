"""What the suites of `planned_jit` share: a plan, small modules, and a check of the counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_layers import H
from moe_jax import planned


@dataclasses.dataclass(frozen=True)
class Plan:
    dtype: Any = jnp.float32
    layout: str = "halves"
    variant: str = "one-launch"
    slots: int = 8
    k: int = 2
    capability: tuple[int, int] = (9, 0)


class Scale(nnx.Module):
    """One weight for each feature."""

    def __init__(self):
        self.weight = nnx.Param(jnp.arange(1.0, H + 1))

    def __call__(self, x):
        return x * self.weight[...]


class Counter(nnx.Module):
    """A weight that stays and a count that moves."""

    def __init__(self):
        self.weight = nnx.Param(jnp.arange(4.0))
        self.count = nnx.Variable(jnp.zeros(()))
        self.scale = 2

    def __call__(self, x):
        self.count[...] = self.count[...] + 1
        return x * self.weight[...] * self.scale


def counted(compiles: int, reuses: int, function: planned.PlannedFunction) -> None:
    stats = function.stats()
    assert (stats.plan_compiles, stats.plan_reuses) == (compiles, reuses)
    assert stats.plan_calls == stats.plan_compiles + stats.plan_reuses


def on(device: int, x: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.devices()[device])
