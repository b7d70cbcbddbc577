"""Weights and inputs of a measured layer, as JAX arrays on one device."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from moe_jax.bench.cases import Shape, routing
from moe_jax.pallas_kernels.grouped_moe import Activation, ExpertWeights, MoEConfig
from moe_jax.pallas_kernels.grouped_moe import reference as grouped_moe_reference
from moe_jax.pallas_kernels.route import RouterConfig, Routing

SWIGLU = Activation(name="swiglu", layout="halves")
CHECKED_ROWS = 8
MOST_SETS = 16


class Step(NamedTuple):
    """One call of a layer: rows ``[T, H]``, ids and weights ``[T, k]``, and the ids once more on the host."""

    x: Float[Array, "T H"]
    ids: Int32[Array, "T k"]
    scale: Float32[Array, "T k"]
    host_ids: Int32[np.ndarray, "T k"]
    host_scale: Float32[np.ndarray, "T k"]


class Layer:
    """A layer's weights, several times over: calls that take turns with them find L2 cold.

    Attributes:
        sets: at least two, and so many that a set's experts leave an L2 of ``l2_bytes`` before it comes again.
        cold: whether `MOST_SETS` are enough for that; tiny shapes would need more.
    """

    def __init__(self, shape: Shape, rng: np.random.Generator, device: jax.Device, l2_bytes: int):
        self.shape, self.device = shape, device
        self.config = MoEConfig(router=RouterConfig(experts=shape.experts, top_k=shape.top_k), activation=SWIGLU)
        count = 1 + max(1, math.ceil(4 * l2_bytes / (shape.top_k * shape.expert_bytes)))
        self.cold = count <= MOST_SETS
        count = min(count, MOST_SETS)
        hidden, inner, experts, _ = shape
        self.sets = tuple(
            ExpertWeights(
                gate_up=_random(self._key(rng), (experts, 2 * inner, hidden), hidden**-0.5),
                down=_random(self._key(rng), (experts, hidden, inner), inner**-0.5),
            )
            for _ in range(count)
        )
        jax.block_until_ready(self.sets)

    def _key(self, rng: np.random.Generator) -> Array:
        return jax.device_put(jax.random.key(int(rng.integers(2**31))), self.device)

    @functools.cached_property
    def transposed(self) -> tuple[tuple[Float[Array, "E H rows"], Float[Array, "E I H"]], ...]:
        """The same weights as ``[E, in, out]``, which some peers want: a copy, made when first asked for."""
        turn = jax.jit(lambda w: jnp.swapaxes(w, 1, 2))
        return jax.block_until_ready(tuple((turn(s.gate_up), turn(s.down)) for s in self.sets))

    def steps(self, rng: np.random.Generator, tokens: int, count: int) -> list[Step]:
        """Calls with rows and routings of their own; step i takes weight set i modulo their number."""
        made = []
        for _ in range(count):
            ids, scale = routing(rng, tokens, self.shape)
            x = _random(self._key(rng), (tokens, self.shape.hidden), 1.0)
            on_device = jax.device_put((ids, scale), self.device)
            made.append(Step(x, on_device[0], on_device[1], ids, scale))
        jax.block_until_ready([step[:3] for step in made])
        return made

    def weights(self, step: int) -> ExpertWeights:
        return self.sets[step % len(self.sets)]

    def error(self, out: Float[Array, "T H"], steps: Sequence[Step]) -> float:
        """Relative error of the last step's result, by some of its rows, against the reference in the same dtype."""
        step, tokens = steps[-1], steps[-1].x.shape[0]
        rows = np.linspace(0, tokens - 1, CHECKED_ROWS).astype(np.int32)  # always as many: one program a shape
        wanted = _reference(
            step.x[rows], Routing(step.scale[rows], step.ids[rows]), self.weights(len(steps) - 1), self.config
        )
        got, exact = np.asarray(out[rows], np.float64), np.asarray(wanted, np.float64)
        return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


_reference = jax.jit(grouped_moe_reference.grouped_moe, static_argnums=3)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random(key: Array, shape: tuple[int, ...], scale: float) -> Array:
    return jax.random.normal(key, shape, jnp.bfloat16) * jnp.asarray(scale, jnp.bfloat16)
