"""The routed expert block in plain jax.numpy: runs anywhere, defines what every kernel must compute.

Pairs (row, expert) are sorted by expert and cut into blocks that each belong to one expert; a loop
runs the blocks. Memory is ``T * k`` rows plus one expert's weights, never ``T * E * I``, and no token is
dropped. Gradients recompute a block instead of keeping its intermediates.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float, Int32

from ..mesh_axes import zeros_varying
from ..route.config import Routing
from .activation import activate
from .weights import ExpertWeights, MoEConfig, SharedExpert

# Blocks of one row need no padding; this few rows are not worth more.
_SINGLE_ROW_PAIRS = 64
_LARGEST_BLOCK = 512


class Blocks(NamedTuple):
    """Pairs grouped by expert, in blocks of one size.

    Attributes:
        expert: int32 ``[N]``, whose weights a block uses; E for blocks of padding alone.
        pair: int32 ``[N, B]``, flat index ``row * k + rank`` of each block row; ``T * k`` marks padding.
        place: int32 ``[T * k]``, where a pair stands in the flattened blocks; ``N * B`` for sentinel pairs.
        used: int32 scalar: no block from here on holds a pair.
    """

    expert: Int32[Array, " N"]
    pair: Int32[Array, "N B"]
    place: Int32[Array, " P"]
    used: Int32[Array, ""]


def block_rows(pairs: int, experts: int) -> int:
    """Rows of a block: one for decode-like calls, else near the mean group size, a power of two."""
    if pairs <= _SINGLE_ROW_PAIRS:
        return 1
    mean = max(1, pairs // experts)
    return min(_LARGEST_BLOCK, 1 << (mean - 1).bit_length())


def plan_blocks(ids: Int32[Array, "T k"], experts: int) -> Blocks:
    """Group pairs by expert in stable order, with static shapes. Ids outside 0..E-1 get no place."""
    flat = ids.reshape(-1)
    pairs = flat.shape[0]
    size = block_rows(pairs, experts)
    expert = jnp.where((flat >= 0) & (flat < experts), flat, experts)
    index = lax.iota(jnp.int32, pairs)
    if size == 1:
        # Nothing to group, and much less to compile: block i is pair i, a sentinel's holds padding.
        own = jnp.where(expert < experts, index, pairs)
        return Blocks(expert, own[:, None], own, jnp.int32(pairs))
    count = min(pairs, pairs // size + min(experts, pairs))
    sizes = jnp.zeros(experts, jnp.int32).at[expert].add(1, mode="drop")
    blocks_of = -(-sizes // size)
    group_end, last_block = jnp.cumsum(jnp.stack([sizes, blocks_of]), axis=1, dtype=jnp.int32)
    sorted_expert, order = lax.sort((expert, index), num_keys=1, is_stable=True)
    # From a pair's rank among all sorted pairs to its row in the blocks: the same distance for a whole group.
    shift = (last_block - blocks_of) * size - (group_end - sizes)
    target = jnp.where(sorted_expert < experts, index + shift.at[sorted_expert].get(mode="clip"), count * size)
    place = jnp.zeros(pairs, jnp.int32).at[order].set(target)
    pair = jnp.full(count * size, pairs, jnp.int32).at[target].set(order, mode="drop").reshape(count, size)
    # A used block has a pair in its first row.
    owner = expert.at[pair[:, 0]].get(mode="fill", fill_value=experts)
    return Blocks(owner, pair, place, last_block[-1])


def _matmul(x: Float[Array, "n in"], w: Float[Array, "out in"], accumulate: jnp.dtype) -> Float[Array, "n out"]:
    return lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=accumulate
    )


def _expert(
    x: Float[Array, "B H"], weights: ExpertWeights, config: MoEConfig, accumulate: jnp.dtype
) -> Float[Array, "B H"]:
    """One expert on some rows: f32 accumulation, the intermediate rounded once to the input dtype."""
    h = _matmul(x, weights.gate_up, accumulate)
    if weights.gate_up_bias is not None:
        h = h + weights.gate_up_bias.astype(accumulate)
    y = _matmul(activate(h, config.activation).astype(x.dtype), weights.down, accumulate)
    return y if weights.down_bias is None else y + weights.down_bias.astype(accumulate)


def _accumulate(dtype: jnp.dtype) -> jnp.dtype:
    # Not promote_types, which strict dtype promotion makes refuse bf16 with f32.
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _take_rows(x: Float[Array, "T H"], rows: Int32[Array, " B"], k: int) -> Float[Array, "B H"]:
    return x.at[rows // k].get(mode="fill", fill_value=0)


def _one_expert(weights: ExpertWeights, expert: Int32[Array, ""]) -> ExpertWeights:
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, expert, keepdims=False), weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pairs(
    config: MoEConfig, x: Float[Array, "T H"], ids: Int32[Array, "T k"], weights: ExpertWeights
) -> Float[Array, "T k H"]:
    """Each pair's expert output, fully reduced; exactly 0 for sentinel ids."""
    return _pairs_batched(config)(x, ids, weights)


def _pairs_batched(config: MoEConfig):
    """`_pairs_forward` whose ``vmap`` flattens the batch into rows while the weights are shared.

    Batched by the ordinary rules, the scan would gather one expert's weights per batch element.
    """

    @custom_vmap
    def forward(x, ids, weights):
        return _pairs_forward(config, x, ids, weights)

    @forward.def_vmap
    def rule(size, batched, x, ids, weights):
        if any(jax.tree.leaves(batched[2])):
            leaves, tree = jax.tree.flatten((x, ids, weights))
            flags = jax.tree.leaves(batched)

            def one(i):
                return forward(*tree.unflatten([a[i] if b else a for a, b in zip(leaves, flags, strict=True)]))

            return lax.map(one, jnp.arange(size)), True
        x = x if batched[0] else jnp.broadcast_to(x, (size, *x.shape))
        ids = ids if batched[1] else jnp.broadcast_to(ids, (size, *ids.shape))
        flat = forward(x.reshape(-1, x.shape[-1]), ids.reshape(-1, ids.shape[-1]), weights)
        return flat.reshape(size, x.shape[1], *flat.shape[1:]), True

    return forward


def _pairs_forward(
    config: MoEConfig, x: Float[Array, "T H"], ids: Int32[Array, "T k"], weights: ExpertWeights
) -> Float[Array, "T k H"]:
    tokens, k = ids.shape
    accumulate = _accumulate(x.dtype)
    if tokens == 0:
        return jnp.zeros((0, k, x.shape[1]), accumulate)
    blocks = plan_blocks(ids, weights.down.shape[0])

    def block(i: Array, out: Array) -> Array:
        expert = _one_expert(weights, blocks.expert[i])
        y = _expert(_take_rows(x, blocks.pair[i], k), expert, config, accumulate)
        return lax.dynamic_update_index_in_dim(out, y, i, 0)

    # Only the used blocks: with sentinels, or small groups, most of the worst case is padding.
    out = zeros_varying((*blocks.pair.shape, x.shape[1]), accumulate, x)
    out = lax.fori_loop(0, blocks.used, block, out)
    rows = out.reshape(-1, x.shape[1]).at[blocks.place].get(mode="fill", fill_value=0)
    return rows.reshape(tokens, k, x.shape[1])


def _pairs_fwd(config, x, ids, weights):
    return _pairs(config, x, ids, weights), (x, ids, weights)


def _pairs_bwd(config, saved, grad):
    """Recompute each block and add its weight gradients into one f32 accumulator per array."""
    x, ids, weights = saved
    k = ids.shape[1]
    accumulate = _accumulate(x.dtype)
    totals = jax.tree.map(lambda w: zeros_varying(w.shape, accumulate, w), weights)
    grad_x = zeros_varying(x.shape, accumulate, x)
    if x.shape[0] > 0:
        blocks = plan_blocks(ids, weights.down.shape[0])
        grad_rows = grad.reshape(-1, grad.shape[-1])

        def block(carry, item):
            grad_x, totals = carry
            expert, pair = item
            run = functools.partial(_expert, config=config, accumulate=accumulate)
            _, pull = jax.vjp(run, _take_rows(x, pair, k), _one_expert(weights, expert))
            dx, dw = pull(grad_rows.at[pair].get(mode="fill", fill_value=0))
            grad_x = grad_x.at[pair // k].add(dx.astype(accumulate), mode="drop")
            # Dropped for unused blocks: 0 times a weight that is not finite is NaN.
            totals = jax.tree.map(lambda total, d: total.at[expert].add(d.astype(accumulate), mode="drop"), totals, dw)
            return (grad_x, totals), None

        (grad_x, totals), _ = lax.scan(block, (grad_x, totals), (blocks.expert, blocks.pair))
    grads = jax.tree.map(lambda total, w: total.astype(w.dtype), totals, weights)
    return grad_x.astype(x.dtype), np.zeros(ids.shape, jax.dtypes.float0), grads


_pairs.defvjp(_pairs_fwd, _pairs_bwd)


@functools.partial(jax.jit, static_argnums=3)
def grouped_moe(
    x: Float[Array, "T H"], routing: Routing, weights: ExpertWeights, config: MoEConfig
) -> Float[Array, "T H"]:
    """Weighted sum over a row's experts in rank order, plus the shared expert; f32 until the end."""
    routed = ExpertWeights(
        gate_up=weights.gate_up,
        down=weights.down,
        gate_up_bias=weights.gate_up_bias,
        down_bias=weights.down_bias,
    )
    pairs = _pairs(config, x, routing.ids, routed)
    experts = weights.down.shape[0]
    # By select, not by weight 0: the weight of an expert that lives elsewhere may be anything.
    present = (routing.ids >= 0) & (routing.ids < experts)
    scale = jnp.where(present, routing.weights, 0).astype(pairs.dtype)

    def add_rank(total: Array, rank: tuple[Array, Array]) -> tuple[Array, None]:
        weight, pair = rank
        return total + weight[:, None] * pair, None

    start = zeros_varying(x.shape, pairs.dtype, x)
    ranks = (scale.T, pairs.swapaxes(0, 1))
    total, _ = lax.scan(add_rank, start, ranks, unroll=min(routing.ids.shape[1], 16))
    if weights.shared is not None:
        total = total + shared_expert(x, weights.shared, config, pairs.dtype)
    return total.astype(x.dtype)


def shared_expert(
    x: Float[Array, "T H"], shared: SharedExpert, config: MoEConfig, accumulate: jnp.dtype
) -> Float[Array, "T H"]:
    """The always-on expert, in the dtype of accumulation."""
    h = activate(_matmul(x, shared.gate_up, accumulate), config.activation)
    y = _matmul(h.astype(x.dtype), shared.down, accumulate)
    if shared.gate is not None:
        y = y * jax.nn.sigmoid(_matmul(x, shared.gate, accumulate))
    return y
