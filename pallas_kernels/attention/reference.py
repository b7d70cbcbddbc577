"""Paged attention in plain `jax.numpy`: the operation, and each of its two launches."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from ..kv_append.reference import QkNorm, kv_append

# Rows whose keys are gathered at a time.
_ROWS = 64


def attention(
    q: Float[Array, "T q"],
    k_pages: Float[Array, "N kv_heads page D"],
    v_pages: Float[Array, "N kv_heads page D"],
    table: Int32[Array, "S pages"],
    position: Int32[Array, " T"],
    sequence: Int32[Array, " T"],
    sink: Float[Array, " heads"] | None = None,
    *,
    scale: float,
    window: int | None,
) -> Float[Array, "T q"]:
    """Each row over its sequence's keys up to its own position; 0 for rows that are not there. Softmax in f32."""
    rows = q.shape[0]
    if rows > _ROWS:

        def some(rows_of):
            q, position, sequence = rows_of
            return attention(
                q[None], k_pages, v_pages, table, position[None], sequence[None], sink, scale=scale, window=window
            )[0]

        return lax.map(some, (q, jnp.asarray(position), jnp.asarray(sequence)), batch_size=_ROWS)
    position = _last_key(position, table, k_pages)
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    score, v, seen = _scores(q, k_pages, v_pages, table, position, sequence, scale, window)
    top = jnp.max(score, axis=-1, keepdims=True)
    logit = None
    if sink is not None:
        logit = jnp.asarray(sink).astype(wide).reshape(1, score.shape[1], -1, 1)
        top = jnp.maximum(top, logit)
    top = lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    p = jnp.exp(score - top)
    weight = jnp.sum(p, axis=-1, keepdims=True)
    if logit is not None:
        weight = weight + jnp.exp(logit - top)
    # Rows that see nothing: no division by 0, which has no gradient.
    weight = jnp.where(jnp.any(seen, axis=-1, keepdims=True), weight, 1)
    out = jnp.einsum("tghk,tgkd->tghd", p, v, precision=lax.Precision.HIGHEST) / weight
    return jnp.where(position[:, None] >= 0, out.reshape(q.shape), 0).astype(q.dtype)


def attend(
    q: Float[Array, "T q"],
    k_pages: Float[Array, "N kv_heads page D"],
    v_pages: Float[Array, "N kv_heads page D"],
    table: Int32[Array, "S pages"],
    position: Int32[Array, " T"],
    sequence: Int32[Array, " T"],
    *,
    scale: float,
    window: int | None,
    slots: int,
    group_rows: int,
    tile: int,
    split: int,
    stretch: int,
    fill: int,
) -> tuple[Float32[Array, "slots heads D"], Float32[Array, "slots heads 2"]]:
    """The first launch: what each piece of keys adds to a row. Gathers all keys per slot, so for small shapes only.

    Returns:
        the sum of ``2**(score - top) * value`` and ``(top, sum of 2**(score - top))``, scores in units of ln 2;
        0 and ``(-inf, 0)`` in slots that no row has.
    """
    position = _last_key(position, table, k_pages)
    score, v, _ = _scores(q, k_pages, v_pages, table, position, sequence, scale / math.log(2), window)
    row, piece, span = _pieces(position, window, k_pages.shape[1], slots, group_rows, (tile, split, stretch), fill)
    there = (row >= 0)[:, None, None, None]
    key = jnp.arange(score.shape[-1], dtype=jnp.int32)
    inside = (key // span == piece[:, None])[:, None, None, :] & there
    score = jnp.where(inside, score[row], -jnp.inf)
    top = jnp.max(score, axis=-1)
    p = jnp.exp2(score - jnp.where(jnp.isfinite(top), top, 0)[..., None])
    vector = jnp.einsum("sghk,sgkd->sghd", p, v[row], precision=lax.Precision.HIGHEST)
    weight = jnp.stack([top, jnp.sum(p, axis=-1)], axis=-1)
    return vector.reshape(slots, -1, v.shape[-1]), weight.reshape(slots, -1, 2)


def append_attend(
    *inputs: Array, norm: QkNorm | None, eps: float, clip: float | None, **cut: Any
) -> tuple[Array, Array, Array, Array]:
    """`kv_append`, whose arrays ``inputs`` are, and the first launch: new pages, and what `attend` returns."""
    position, sequence, table = inputs[5:8]
    k_pages, v_pages, q = kv_append(*inputs, norm=norm, eps=eps, clip=clip)
    return k_pages, v_pages, *attend(q, k_pages, v_pages, table, position, sequence, **cut)


def combine(
    vector: Float32[Array, "slots heads D"],
    weight: Float32[Array, "slots heads 2"],
    position: Int32[Array, " T"],
    sink: Float[Array, " heads"],
    *,
    window: int | None,
    kv_heads: int,
    group_rows: int,
    longest: int,
    tile: int,
    split: int,
    stretch: int,
    fill: int,
    has_sink: bool,
    out_dtype: str,
) -> Float[Array, "T q"]:
    """The second launch: the pieces of each row together."""
    position = jnp.minimum(jnp.asarray(position), longest - 1)
    row, _, _ = _pieces(position, window, kv_heads, vector.shape[0], group_rows, (tile, split, stretch), fill)
    mine = (row == jnp.arange(position.shape[0], dtype=jnp.int32)[:, None])[..., None]
    top, total = jnp.moveaxis(jnp.asarray(weight), -1, 0)
    top = jnp.where(mine, top, -jnp.inf)
    largest = jnp.max(top, axis=1)
    logit = jnp.asarray(sink).astype(jnp.float32) / math.log(2) if has_sink else -jnp.inf
    largest = jnp.maximum(largest, logit)
    base = jnp.where(jnp.isfinite(largest), largest, 0)
    share = jnp.exp2(top - base[:, None])
    whole = jnp.sum(jnp.where(mine, total * share, 0), axis=1) + jnp.exp2(logit - base)
    # By select: slots that nobody has written may hold NaN.
    value = jnp.sum(jnp.where(mine[..., None], jnp.asarray(vector) * share[..., None], 0), axis=1)
    value = jnp.where((position >= 0)[:, None, None], value / whole[..., None], 0)
    return value.reshape(position.shape[0], -1).astype(out_dtype)


def _last_key(position: Int32[Array, " T"], table: Array, k_pages: Array) -> Int32[Array, " T"]:
    """Positions past the table's keys count as its last key."""
    return jnp.minimum(jnp.asarray(position), table.shape[1] * k_pages.shape[2] - 1)


def _scores(
    q, k_pages, v_pages, table, position, sequence, scale: float, window: int | None
) -> tuple[Float[Array, "T kv_heads share keys"], Float[Array, "T kv_heads keys D"], Bool[Array, "T 1 1 keys"]]:
    """Scaled scores of every key of a row's table (-inf: not seen), values (0: not seen), and which are seen."""
    rows, (number, kv_heads, page, dim) = q.shape[0], k_pages.shape
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    table = jnp.asarray(table)
    pages = jnp.clip(table[jnp.clip(jnp.asarray(sequence), 0, table.shape[0] - 1)], 0, number - 1)
    keys = pages.shape[1] * page

    def gather(stack: Array) -> Array:
        per_row = jnp.asarray(stack)[pages].transpose(0, 2, 1, 3, 4)
        return per_row.reshape(rows, kv_heads, keys, dim).astype(wide)

    key = jnp.arange(keys, dtype=jnp.int32)[None, :]
    seen = key <= position[:, None]
    if window is not None:
        seen = seen & (key > position[:, None] - window)
    # By select before any product, so that a NaN of a place that no row sees meets no 0.
    k, v = (jnp.where(seen[:, None, :, None], gather(stack), 0) for stack in (k_pages, v_pages))
    query = jnp.asarray(q).reshape(rows, kv_heads, q.shape[1] // (kv_heads * dim), dim).astype(wide)
    score = jnp.einsum("tghd,tgkd->tghk", query, k, precision=lax.Precision.HIGHEST) * scale
    seen = seen[:, None, None, :]
    return jnp.where(seen, score, -jnp.inf), v, seen


def _pieces(
    position, window: int | None, kv_heads: int, slots: int, group_rows: int, cut: tuple[int, int, int], fill: int
) -> tuple[Int32[Array, " slots"], Int32[Array, " slots"], Int32[Array, ""]]:
    """Row (-1: none), number of the piece in absolute positions, and keys of a piece, for each slot."""
    groups = position.shape[0] // group_rows
    of_group = position.reshape(groups, group_rows)
    last = jnp.max(of_group, axis=1)
    low = jnp.min(jnp.where(of_group >= 0, of_group, jnp.iinfo(jnp.int32).max), axis=1)
    low = jnp.zeros_like(low) if window is None else jnp.maximum(low - (window - 1), 0)

    def count(span):
        return jnp.where(last >= 0, last // span - low // span + 1, 0)

    tile, split, stretch = cut
    tiles = count(tile)
    share = jnp.sum(jnp.minimum(tiles, stretch // tile * fill)) * kv_heads * 9
    fair = jnp.minimum(jnp.max(tiles), stretch // tile) * fill * 8 <= share
    span = jnp.where(fair, stretch, split)
    end = jnp.cumsum(count(span))
    slot = jnp.arange(slots, dtype=jnp.int32)
    piece, within = slot // group_rows, slot % group_rows
    group = jnp.minimum(jnp.searchsorted(end, piece, side="right"), groups - 1)
    row = group * group_rows + within
    piece = piece - (end - count(span))[group] + (low // span)[group]
    first = 0 if window is None else jnp.maximum(position[row] - (window - 1), 0)
    there = (slot // group_rows < end[-1]) & (piece * span <= position[row]) & ((piece + 1) * span > first)
    return jnp.where(there, row, -1), piece, span
