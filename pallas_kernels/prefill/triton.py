"""The routed expert block for many rows by Triton kernels, inside ``jax.jit``: sm_80 and newer."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from ..checks import check_dtype, check_shape
from ..device import capability_of, device_of
from ..grouped_moe.weights import ExpertWeights, MoEConfig
from ..in_jit import call
from ..route.config import Routing
from ..tuned import Chosen, choose
from . import steps
from .heuristics import PrefillTile, candidates, prefill_tile_for
from .specs import down_spec, gate_up_spec

__all__ = ["candidates", "chosen_tile", "ffn", "tuned_tile_for"]

_gate_up_spec = functools.cache(gate_up_spec)
_down_spec = functools.cache(down_spec)


def chosen_tile(x: Float[Array, "T H"], routing: Routing, sizes: tuple[int, ...]) -> Chosen[PrefillTile]:
    """The tile of a call, tuned or `prefill_tile_for`'s, and which of the two.

    Args:
        sizes: experts E, hidden H, intermediate I.
    """
    (tokens, top_k), (experts, hidden, inner) = routing.ids.shape, sizes
    kind = device_of(x).device_kind
    return tuned_tile_for(tokens, top_k, experts, hidden, inner, x.dtype.name, capability_of(x), kind)


@functools.cache
def tuned_tile_for(
    tokens: int, top_k: int, experts: int, hidden: int, inner: int, dtype: str, capability: int, device_kind: str
) -> Chosen[PrefillTile]:
    """`prefill_tile_for` where there is no tuned data for the kind of device, as JAX names it."""
    base = prefill_tile_for(tokens, top_k, experts, hidden, inner, dtype, capability=capability)
    return choose("prefill_triton", base, (hidden, inner, experts, top_k), tokens, dtype, device_kind)


def ffn(
    x: Float[Array, "T H"],
    routing: Routing,
    weights: ExpertWeights,
    config: MoEConfig,
    residual: Float[Array, "T H"] | None = None,
    *,
    weight_row: Int32[Array, " E"] | None = None,
    tile: PrefillTile | None = None,
) -> Float[Array, "T H"]:
    """``residual[t] + sum_r weight[t, r] * expert[ids[t, r]](x[t])`` with r ascending, in four launches or six.

    Each pair's vector is rounded to the dtype of ``x`` before the sum, which is f32. A pair's bits depend on its row,
    its expert and the tile, so rows and experts may be split over several calls with one tile. Weights go to the
    kernels as they are given; the shared expert is not touched.

    Args:
        x: bf16, f16 or f32; T at least 1.
        routing: f32 weights and int32 ids ``[T, k]``; an id of -1 or E (their number) adds exactly 0.
        weight_row: int32, where each of E experts stands in weight stacks of S rows; None: expert e is row e.
        tile: by default `chosen_tile`.

    Raises:
        InvalidArgument: shapes or dtypes that do not fit each other, more than `MAX_PAIRS` pairs, or a tile that the
            kernels do not take.
    """
    where = "prefill.ffn"
    slots, hidden, inner = weights.down.shape
    experts = slots if weight_row is None else weight_row.shape[0]
    check_dtype(where, "x", x, (jnp.bfloat16, jnp.float16, jnp.float32))
    check_shape(where, "x", x, (routing.ids.shape[0], hidden))
    tokens, top_k = routing.ids.shape
    dtype, act = x.dtype.name, config.activation
    tile = tile or chosen_tile(x, routing, (experts, hidden, inner)).tile
    shape = (tokens, top_k, experts, hidden, inner)
    plan = steps.plan(routing.ids, experts, tile.block, weight_row=weight_row, slots=slots)

    def or_absent(array: Array | None) -> Array:
        return jnp.zeros(1, x.dtype) if array is None else array

    first = _gate_up_spec(
        *shape, dtype=dtype, activation=act, tile=tile, slots=slots, bias=weights.gate_up_bias is not None
    )
    second = _down_spec(*shape, dtype=dtype, tile=tile, slots=slots, bias=weights.down_bias is not None)
    blocks = plan[:3]
    (h,) = call(first, (x, *blocks, weights.gate_up, or_absent(weights.gate_up_bias)))
    (pair,) = call(second, (h, *blocks, weights.down, or_absent(weights.down_bias)))
    return steps.combine(pair, plan.place, routing.weights, residual)
