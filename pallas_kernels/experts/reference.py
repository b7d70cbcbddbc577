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
    weight_row: Int32[Array, " E"] | None,
    gate_up: Float[Array, "S rows H"],
    gate_up_bias: Float[Array, "S rows"] | None,
    down: Float[Array, "S H I"],
    down_bias: Float[Array, "S H"] | None,
    residual: Float[Array, "T H"] | None,
    *,
    activation: Activation,
) -> Float[Array, "T H"]:
    """Every pair by itself: gathers k experts per row, so for small shapes and tests only."""
    experts = gate_up.shape[0] if weight_row is None else weight_row.shape[0]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    exists = (ids >= 0) & (ids < experts)
    rows = jnp.where(exists, ids, 0)
    if weight_row is not None:
        rows = jnp.asarray(weight_row)[rows]

    def matmul(w, v):
        return jnp.einsum("tkoi,tki->tko", w, v, precision=lax.Precision.HIGHEST, preferred_element_type=wide)

    tokens, k = ids.shape
    inner = matmul(jnp.asarray(gate_up)[rows], jnp.broadcast_to(jnp.asarray(x)[:, None], (tokens, k, x.shape[1])))
    if gate_up_bias is not None:
        inner = inner + jnp.asarray(gate_up_bias)[rows].astype(wide)
    pair = matmul(jnp.asarray(down)[rows], activate(inner, activation).astype(x.dtype))
    if down_bias is not None:
        pair = pair + jnp.asarray(down_bias)[rows].astype(wide)
    total = jnp.zeros(x.shape, wide)
    for rank in range(k):
        value = jnp.asarray(scale)[:, rank, None].astype(wide) * pair[:, rank]
        total = total + jnp.where(exists[:, rank, None], value, 0)
    if residual is not None:
        total = total + jnp.asarray(residual).astype(wide)
    return total.astype(x.dtype)
