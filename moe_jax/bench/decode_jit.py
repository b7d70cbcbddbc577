"""Decode steps as one XLA program each, as `Model.generate` makes them: with this project's kernels, or without."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Literal, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from moe_jax import generation, layer
from moe_jax.bench.decode_cell import WARM, Measured, check_finite, check_time, goes_on
from moe_jax.bench.peers_jax import Sorted, by_rows_of_weights, layer_by
from moe_jax.bench.timing import Clock
from moe_jax.cache import Executables
from moe_jax.model import Model
from moe_jax.models.decoder import Decoder
from moe_jax.models.kv import KV, Cache
from moe_jax.nnx import MoE
from moe_jax.pallas_kernels.grouped_moe import explain
from moe_jax.pallas_kernels.route import RouterConfig, Routing, route
from moe_jax.sampling import sampling

Stock = Literal["jax.lax.ragged_dot", "gather"]


def stock_ways(rows: int, router: RouterConfig) -> tuple[Stock, ...]:
    """How experts are multiplied without this project's kernels; a gather only where it copies no more than all."""
    return ("jax.lax.ragged_dot", "gather") if rows * router.top_k <= router.experts else ("jax.lax.ragged_dot",)


class StockMoE(nnx.Module):
    """A SwiGLU mixture without shared expert, computed with nothing but JAX on the arrays that it has.

    Attributes:
        mixture: whose arrays they are.
        by: how its experts multiply: pairs sorted by expert and a ragged product, or each pair's weights gathered.
    """

    def __init__(self, mixture: MoE, by: Stock):
        self.mixture, self.by = mixture, by

    def __call__(self, x: Float[Array, "*n H"]) -> Float[Array, "*n H"]:
        """As `MoE`."""
        arrays, router = self.mixture.arrays(), self.mixture.config.router
        rows = x.reshape(-1, x.shape[-1])
        routing = route(layer.layer_logits(rows, arrays), router, backend="reference")
        out = _gathered if self.by == "gather" else _ragged
        return out(rows, routing, arrays["gate_up"], arrays["down"]).reshape(x.shape)


def _ragged(
    x: Float[Array, "T H"], routing: Routing, gate_up: Float[Array, "E I2 H"], down: Float[Array, "E H I"]
) -> Float[Array, "T H"]:
    order = jnp.argsort(routing.ids.reshape(-1), stable=True).astype(jnp.int32)
    sizes = jnp.bincount(routing.ids.reshape(-1), length=down.shape[0]).astype(jnp.int32)
    plan = Sorted(order, jnp.argsort(order).astype(jnp.int32), sizes, routing.weights)
    return layer_by(by_rows_of_weights, x, (plan, (gate_up, down)))


def _gathered(
    x: Float[Array, "T H"], routing: Routing, gate_up: Float[Array, "E I2 H"], down: Float[Array, "E H I"]
) -> Float[Array, "T H"]:
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    gate, up = jnp.split(product("tkih,th->tki", gate_up[routing.ids], x), 2, axis=-1)
    y = product("tkhi,tki->tkh", down[routing.ids], (jax.nn.silu(gate) * up).astype(x.dtype))
    return (y * routing.weights[:, :, None]).sum(1).astype(x.dtype)


class Begun(nnx.Module):
    """A decoder that has read its prompts, whatever they are: keys and values are drawn instead.

    What a step costs does not depend on them, and a prompt of every row would have to be read by programs of its own.
    """

    def __init__(self, decoder: Decoder):
        self.decoder = decoder

    def prefill(
        self, tokens: Int32[Array, "B T"], lengths: Int32[Array, " B"], capacity: int
    ) -> tuple[Float32[Array, "B V"], Cache]:
        """As `Decoder.prefill`. All rows have the same keys and values, and layers have them shifted."""
        config, rows = self.decoder.config, tokens.shape[0]
        dtype = self.decoder.embed[...].dtype
        shape = (capacity, config.kv_heads, config.head_dim)
        first, keys, values = jax.random.split(jax.random.key(0), 3)
        pair = [jax.random.normal(key, shape, jnp.float32).astype(dtype) for key in (keys, values)]

        def of_layer(i: int) -> KV:
            # All different, so that nothing can make two of them one array: the next step is given each of them.
            return KV(*(jnp.broadcast_to(jnp.roll(x, i, axis=0), (rows, *shape)) for x in pair))

        logits = jax.random.normal(first, (rows, config.vocab_size), jnp.float32)
        return logits, tuple(map(of_layer, range(config.layers)))

    def decode(
        self, tokens: Int32[Array, " B"], lengths: Int32[Array, " B"], past: Cache
    ) -> tuple[Float32[Array, "B V"], Cache]:
        """The decoder's own."""
        return self.decoder.decode(tokens, lengths, past)


def measure(
    model: Model, prompts: Sequence[Sequence[int]], clock: Clock, steps: int, stock: Stock | None = None
) -> Measured:
    """Steps of `generation.steps`, whose host reads one step behind the device.

    Args:
        stock: how experts multiply without this project's kernels; None: as the model does it.

    Raises:
        CannotServe: logits that are not finite, or out of time.
    """
    where = "jit" if stock is None else f"jit-stock by {stock}"
    check_time(where, clock)
    decoder = cast(Decoder, model.module)
    if stock is not None:
        decoder = nnx.merge(*nnx.split(decoder))
        for block in decoder.blocks:
            if isinstance(block.mlp, MoE):
                # The structure of a bench alone: the class of Decoder knows its own mixtures only.
                setattr(block, "mlp", StockMoE(block.mlp, stock))  # noqa: B010
    weights = generation.split(Begun(decoder))
    made = generation.steps(
        prompts, WARM + steps, sampling(), model.config.max_positions, weights, Executables(), "bench decode"
    )
    start = time.perf_counter()
    next(made)
    next(made)
    first = time.perf_counter() - start
    for _ in range(WARM - 2):
        next(made)
    us: list[float] = []
    scores = None
    while goes_on(where, clock, us, steps):
        begin = time.perf_counter()
        _, scores = next(made)
        us.append((time.perf_counter() - begin) * 1e6)
    check_finite(where, scores)
    return Measured(
        configuration=stock or "default",
        backend=stock or f"grouped_moe: {_backend(decoder, len(prompts))}",
        us=us,
        first_step_s=first,
    )


def _backend(decoder: Decoder, rows: int) -> str:
    """Who multiplies by experts in the model's own step."""
    mixture = next(block.mlp for block in decoder.blocks if isinstance(block.mlp, MoE))
    x = jnp.zeros((rows, mixture.features), mixture.down[...].dtype)
    logits = jnp.zeros((rows, mixture.config.router.experts), jnp.float32)
    return explain(x, logits, mixture.weights(), mixture.config).backend
