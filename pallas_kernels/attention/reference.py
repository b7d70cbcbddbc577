"""Paged attention in plain `jax.numpy`, with the kernels' argument lists."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32


def attention(
    q: Float[Array, "T q"],
    k_pages: Float[Array, "N kv_heads page D"],
    v_pages: Float[Array, "N kv_heads page D"],
    table: Int32[Array, "S pages"],
    position: Int32[Array, " T"],
    sequence: Int32[Array, " T"],
    sink: Float[Array, " heads"],
    *,
    heads: int,
    scale: float,
    window: int | None,
    has_sink: bool,
) -> Float[Array, "T q"]:
    """Each row over its sequence's keys up to its own position; 0 for rows that are not there. Softmax in f32."""
    table, position, sequence = (jnp.asarray(a) for a in (table, position, sequence))
    rows, (_, kv_heads, page, dim) = position.shape[0], k_pages.shape
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    pages = table[sequence]
    keys = pages.shape[1] * page

    def gather(stack: Array) -> Array:
        per_row = jnp.asarray(stack)[pages].transpose(0, 2, 1, 3, 4)
        return per_row.reshape(rows, kv_heads, keys, dim).astype(wide)

    key = jnp.arange(keys, dtype=jnp.int32)[None, :]
    seen = (key <= position[:, None]) & (key < keys)
    if window is not None:
        seen = seen & (key > position[:, None] - window)
    seen = seen[:, None, None, :]
    k, v = gather(k_pages), gather(v_pages)
    # By select, so that a NaN of a place that no row sees meets no 0.
    v = jnp.where(seen[:, 0, :, :, None], v, 0)
    query = jnp.asarray(q).reshape(rows, kv_heads, heads // kv_heads, dim).astype(wide)
    score = jnp.einsum("tghd,tgkd->tghk", query, k, precision=lax.Precision.HIGHEST) * scale
    score = jnp.where(seen, score, -jnp.inf)
    top = jnp.max(score, axis=-1, keepdims=True)
    if has_sink:
        extra = jnp.asarray(sink).astype(wide).reshape(1, kv_heads, heads // kv_heads, 1)
        top = jnp.maximum(top, extra)
    top = jnp.where(jnp.isfinite(top), top, 0)
    p = jnp.exp(score - top)
    weight = jnp.sum(p, axis=-1, keepdims=True)
    if has_sink:
        weight = weight + jnp.exp(extra - top)
    out = jnp.einsum("tghk,tgkd->tghd", p, v, precision=lax.Precision.HIGHEST) / weight
    out = out.reshape(rows, heads * dim).astype(q.dtype)
    return jnp.where(position[:, None] >= 0, out, jnp.zeros((), q.dtype))
