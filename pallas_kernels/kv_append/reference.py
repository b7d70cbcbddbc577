"""Rotation and append in plain `jax.numpy`, with the kernel's argument list."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

QkNorm = Literal["head", "projection"]


def kv_append(
    qkv: Float[Array, "T rows"],
    q_gain: Float[Array, " q"],
    k_gain: Float[Array, " k"],
    cos: Float32[Array, "P half"],
    sin: Float32[Array, "P half"],
    position: Int32[Array, " T"],
    sequence: Int32[Array, " T"],
    table: Int32[Array, "S pages"],
    k_pages: Float[Array, "N kv_heads page D"],
    v_pages: Float[Array, "N kv_heads page D"],
    *,
    norm: QkNorm | None,
    eps: float,
    clip: float | None,
) -> tuple[Float[Array, "N kv_heads page D"], Float[Array, "N kv_heads page D"], Float[Array, "T q"]]:
    """Pages with the rows' keys and values in place, and the rotated queries (0 for rows that are not there)."""
    qkv, k_pages, v_pages, table = (jnp.asarray(a) for a in (qkv, k_pages, v_pages, table))
    position, sequence = jnp.asarray(position), jnp.asarray(sequence)
    number, kv_heads, page, dim = k_pages.shape
    rows, width = qkv.shape
    heads = width // dim - 2 * kv_heads
    q, k, v = jnp.split(qkv, [heads * dim, (heads + kv_heads) * dim], axis=1)
    if norm == "projection":
        q, k = _rms_norm(q, q_gain, eps), _rms_norm(k, k_gain, eps)
    if clip is not None:
        q, k, v = (jnp.clip(y, -clip, clip) for y in (q, k, v))
    q = q.reshape(rows, heads, dim)
    k, v = (y.reshape(rows, kv_heads, dim) for y in (k, v))
    if norm == "head":
        q, k = _rms_norm(q, q_gain, eps), _rms_norm(k, k_gain, eps)
    there = (position >= 0) & (position < cos.shape[0])
    at = jnp.where(there, position, 0)
    turn = (jnp.asarray(cos)[at][:, None], jnp.asarray(sin)[at][:, None])
    q, k = _rotate(q, *turn), _rotate(k, *turn)
    slot = at // page
    there_in_table = there & (slot < table.shape[1]) & (sequence >= 0) & (sequence < table.shape[0])
    target = table.at[sequence, slot].get(mode="clip")
    target = jnp.where(there_in_table & (target >= 0), target, number)
    k_pages = k_pages.at[target, :, at % page].set(k, mode="drop")
    v_pages = v_pages.at[target, :, at % page].set(v, mode="drop")
    return k_pages, v_pages, jnp.where(there[:, None], q.reshape(rows, heads * dim), jnp.zeros((), q.dtype))


def _wide(x: Array) -> Any:
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def _rms_norm(x: Array, gain: Array, eps: float) -> Array:
    """Rounded twice, as the models do: after the division and after the gain."""
    wide = x.astype(_wide(x))
    wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return jnp.asarray(gain) * wide.astype(x.dtype)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x.astype(_wide(x)), 2, axis=-1)
    cos, sin = cos.astype(first.dtype), sin.astype(first.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
