"""Rotation of queries and keys, their norms, and keys and values written into pages."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..sums import sum_by_pairs


@triton.jit
def _inverse_norm(part_ptr, SIZE: tl.constexpr, CHUNK: tl.constexpr, EPS: tl.constexpr):
    """1 / rms of SIZE values, ``[1]``."""
    at = tl.arange(0, CHUNK)
    squares = tl.zeros([CHUNK], tl.float32)
    for start in tl.static_range(0, SIZE, CHUNK):
        value = tl.load(part_ptr + start + at, mask=start + at < SIZE, other=0.0).to(tl.float32)
        squares += value * value
    return tl.rsqrt(sum_by_pairs(squares[None, :]) / SIZE + EPS)


@triton.jit
def _normed(value, gain, shrink, dtype: tl.constexpr):
    """Rounded twice, as the models do: after the division and after the gain."""
    value = (value * shrink).to(dtype).to(tl.float32)
    return (value * gain.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _gain(
    q_gain_ptr, k_gain_ptr, begin, dim, mask, is_query, is_value, QUERIES: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Gains of some heads, 0 for values."""
    of_queries = tl.load(q_gain_ptr + begin + dim, mask=mask & is_query, other=0.0)
    if NORM == "projection":
        begin -= QUERIES
    of_keys = tl.load(k_gain_ptr + begin + dim, mask=mask & (is_query == 0) & (is_value == 0), other=0.0)
    return tl.where(is_query, of_queries, of_keys)


@triton.jit
def tables_of(
    q_gain_ptr, k_gain_ptr, cos_ptr, sin_ptr, head, live, position,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_POW2: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """What `heads_of_row` needs besides the heads: rows of the rotation tables, gains of elements and their partners.

    Rows of the tables for every head, and both gains by masks: in the layout of the heads, which short arrays and
    pointers that are selected would not be read in.

    Args:
        position: row of the rotation tables.
    """
    is_query = (head < HEADS)[:, None]
    is_value = (head >= HEADS + KV_HEADS)[:, None]
    dim = tl.arange(0, DIM_POW2)
    first = dim < DIM // 2
    partner = tl.where(first, dim + DIM // 2, dim - DIM // 2)
    mask = live[:, None] & (dim < DIM)[None, :]
    angle = position * (DIM // 2) + tl.where(first, dim, partner)[None, :] + tl.zeros_like(head)[:, None]
    cos = tl.load(cos_ptr + angle, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)
    gain, other_gain = cos, sin
    if NORM != "":
        begin = head[:, None] * DIM if NORM == "projection" else tl.zeros_like(head)[:, None]
        gain = _gain(q_gain_ptr, k_gain_ptr, begin, dim[None, :], mask, is_query, is_value, HEADS * DIM, NORM)
        other_gain = _gain(q_gain_ptr, k_gain_ptr, begin, partner[None, :], mask, is_query, is_value, HEADS * DIM, NORM)
    return cos, sin, gain, other_gain


@triton.jit
def heads_of_row(
    row_ptr, tables, head, live,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_POW2: tl.constexpr, NORM: tl.constexpr,
    NORM_CHUNK: tl.constexpr, EPS: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """Some heads ``[N, DIM_POW2]`` of a row, in f32: queries and keys normed, clamped and turned; values clamped.

    Every element is computed beside its partner in the rotation, so that a head lies in one piece, as attention takes
    it. All is read before anything is summed: a barrier in between would hold reads back.

    Args:
        row_ptr: the row's queries, keys and values.
        head: numbers of the heads in it.
        tables: of `tables_of` the same heads.
        live: which of them are asked for; the others are 0.
    """
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    is_query = (head < HEADS)[:, None]
    is_value = (head >= HEADS + KV_HEADS)[:, None]
    dim = tl.arange(0, DIM_POW2)
    first = dim < DIM // 2
    partner = tl.where(first, dim + DIM // 2, dim - DIM // 2)
    inside = dim < DIM
    mask = live[:, None] & inside[None, :]
    value = tl.load(row_ptr + head[:, None] * DIM + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(row_ptr + head[:, None] * DIM + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    cos, sin, gain, other_gain = tables
    if NORM == "projection":
        shrink = tl.where(
            is_query,
            _inverse_norm(row_ptr, HEADS * DIM, NORM_CHUNK, EPS)[:, None],
            _inverse_norm(row_ptr + HEADS * DIM, KV_HEADS * DIM, NORM_CHUNK, EPS)[:, None],
        )
        value = tl.where(is_value, value, _normed(value, gain, shrink, dtype))
        other = tl.where(is_value, other, _normed(other, other_gain, shrink, dtype))
    if CLIP > 0:
        value = tl.minimum(tl.maximum(value, -CLIP), CLIP).to(dtype).to(tl.float32)
        other = tl.minimum(tl.maximum(other, -CLIP), CLIP).to(dtype).to(tl.float32)
    if NORM == "head":
        shrink = tl.rsqrt(sum_by_pairs(value * value) / DIM + EPS)[:, None]
        value = tl.where(is_value, value, _normed(value, gain, shrink, dtype))
        other = tl.where(is_value, other, _normed(other, other_gain, shrink, dtype))
    across, along = value * cos, other * sin
    return tl.where(is_value, value, tl.where(first[None, :], across - along, across + along))


@triton.jit
def page_of(
    table_ptr, position, sequence, there,
    PAGE: tl.constexpr, PAGES: tl.constexpr, MAX_PAGES: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """The page that a row writes into, and whether there is one."""
    slot = position // PAGE
    mapped = there & (slot < MAX_PAGES) & (sequence >= 0) & (sequence < SEQUENCES)
    page = tl.load(table_ptr + sequence * MAX_PAGES + slot, mask=mapped, other=-1)
    return page, (page >= 0) & (page < PAGES)


@triton.jit
def kv_append(
    qkv_ptr,
    q_gain_ptr,
    k_gain_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    sequence_ptr,
    table_ptr,
    k_pages_ptr,
    v_pages_ptr,
    q_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    SEQUENCES: tl.constexpr,
    POSITIONS: tl.constexpr,
    NORM: tl.constexpr,
    NORM_CHUNK: tl.constexpr,
    EPS: tl.constexpr,
    CLIP: tl.constexpr,
    PDL: tl.constexpr,
):
    """See `kv_append.specs.kv_append_spec` for the arguments."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    position = tl.load(position_ptr + row)
    there = (position >= 0) & (position < POSITIONS)
    dtype = qkv_ptr.dtype.element_ty
    first = tl.program_id(1) * BLOCK_HEADS
    head = first + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, DIM_POW2)
    tables = tables_of(
        q_gain_ptr, k_gain_ptr, cos_ptr, sin_ptr, head, head >= 0, tl.where(there, position, 0),
        HEADS, KV_HEADS, DIM, DIM_POW2, NORM,
    )  # fmt: skip
    if PDL:
        gdc_wait()
    value = heads_of_row(
        qkv_ptr + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM), tables, head, head >= 0,
        HEADS, KV_HEADS, DIM, DIM_POW2, NORM, NORM_CHUNK, EPS, CLIP,
    )  # fmt: skip
    inside = (head >= 0)[:, None] & (dim < DIM)[None, :]
    if first < HEADS:
        out = q_ptr + row.to(tl.int64) * (HEADS * DIM) + head[:, None] * DIM + dim[None, :]
        tl.store(out, tl.where(there, value, 0.0).to(dtype), mask=inside)
    else:
        sequence = tl.load(sequence_ptr + row, mask=there, other=0)
        page, mapped = page_of(table_ptr, position, sequence, there, PAGE, PAGES, MAX_PAGES, SEQUENCES)
        is_value = first >= HEADS + KV_HEADS
        kv_head = head - tl.where(is_value, HEADS + KV_HEADS, HEADS)
        within = (page.to(tl.int64) * KV_HEADS + kv_head)[:, None] * (PAGE * DIM) + (position % PAGE) * DIM
        out = tl.where(is_value, v_pages_ptr, k_pages_ptr) + within + dim[None, :]
        if mapped:
            tl.store(out, value.to(dtype), mask=inside)
