"""The expert kernel in plain `jax.numpy`, with its argument list."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from ..grouped_moe.activation import Activation, activate


def expert_ffn(
    x: Float[Array, "T H"],
    ids: Int32[Array, "T k"],
    scale: Float32[Array, "T k"],
    weight_row: Int32[Array, " E"],
    used: Int32[Array, " 1"],
    block_row: Int32[Array, " N"],
    block_pair: Int32[Array, "N block_n"],
    gate_up: Float[Array, "S rows H"],
    gate_up_bias: Float[Array, "S rows"],
    down: Float[Array, "S H I"],
    down_bias: Float[Array, "S H"],
    residual: Float[Array, "T H"],
    *,
    activation: Activation,
    experts: int,
) -> Float[Array, "T H"]:
    """Every pair by itself: gathers k experts per row, so for small shapes and tests only.

    Where a pair's expert stands is taken from the blocks for two rows or more, as the kernel does.
    """
    absent = (1,)
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    ids = jnp.asarray(ids)
    exists = (ids >= 0) & (ids < experts)
    if ids.shape[0] > 1:
        pairs = jnp.asarray(block_pair).reshape(-1)
        owner = jnp.repeat(jnp.asarray(block_row), block_pair.shape[1])
        rows = jnp.zeros(ids.size, jnp.int32).at[jnp.where(pairs < 0, ids.size, pairs)].set(owner, mode="drop")
        rows = rows.reshape(ids.shape)
    else:
        rows = jnp.where(exists, ids, 0)
        rows = rows if weight_row.shape == absent else jnp.asarray(weight_row)[rows]

    def matmul(w, v):
        return jnp.einsum("tkoi,tki->tko", w, v, precision=lax.Precision.HIGHEST, preferred_element_type=wide)

    tokens, k = ids.shape
    inner = matmul(jnp.asarray(gate_up)[rows], jnp.broadcast_to(jnp.asarray(x)[:, None], (tokens, k, x.shape[1])))
    if gate_up_bias.shape != absent:
        inner = inner + jnp.asarray(gate_up_bias)[rows].astype(wide)
    pair = matmul(jnp.asarray(down)[rows], activate(inner, activation).astype(x.dtype))
    if down_bias.shape != absent:
        pair = pair + jnp.asarray(down_bias)[rows].astype(wide)
    total = jnp.zeros(x.shape, wide)
    for rank in range(k):
        value = jnp.asarray(scale)[:, rank, None].astype(wide) * pair[:, rank]
        total = total + jnp.where(exists[:, rank, None], value, 0)
    if residual.shape != absent:
        total = total + jnp.asarray(residual).astype(wide)
    return total.astype(x.dtype)
