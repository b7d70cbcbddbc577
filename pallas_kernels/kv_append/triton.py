"""Rotation of queries and keys, their norms, and keys and values written into pages."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _inverse_norm(part_ptr, SIZE: tl.constexpr, CHUNK: tl.constexpr, EPS: tl.constexpr):
    """1 / rms of SIZE values."""
    at = tl.arange(0, CHUNK)
    squares = tl.zeros([CHUNK], tl.float32)
    for start in tl.static_range(0, SIZE, CHUNK):
        value = tl.load(part_ptr + start + at, mask=start + at < SIZE, other=0.0).to(tl.float32)
        squares += value * value
    return tl.rsqrt(tl.sum(squares, 0) / SIZE + EPS)


@triton.jit
def _normed(value, gain_at, mask, shrink, dtype: tl.constexpr):
    """Rounded twice, as the models do: after the division and after the gain."""
    value = (value * shrink).to(dtype).to(tl.float32)
    return (value * tl.load(gain_at, mask=mask, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)


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
    HALF: tl.constexpr,
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
        gdc_wait()
    row = tl.program_id(0)
    block = tl.program_id(1)
    position = tl.load(position_ptr + row)
    there = (position >= 0) & (position < POSITIONS)
    dtype = qkv_ptr.dtype.element_ty
    qkv_row = qkv_ptr + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM)
    head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    half = tl.arange(0, HALF)
    inside = (half < DIM // 2)[None, :] & (head >= 0)[:, None]
    low_at = head[:, None] * DIM + half[None, :]
    low = tl.load(qkv_row + low_at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(qkv_row + low_at + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    is_query = block * BLOCK_HEADS < HEADS
    is_value = block * BLOCK_HEADS >= HEADS + KV_HEADS
    kv_head = head - tl.where(is_value, HEADS + KV_HEADS, HEADS)
    if NORM == "projection" and not is_value:
        if is_query:
            shrink = _inverse_norm(qkv_row, HEADS * DIM, NORM_CHUNK, EPS)
            gain_at = q_gain_ptr + low_at
        else:
            shrink = _inverse_norm(qkv_row + HEADS * DIM, KV_HEADS * DIM, NORM_CHUNK, EPS)
            gain_at = k_gain_ptr + low_at - HEADS * DIM
        low = _normed(low, gain_at, inside, shrink, dtype)
        high = _normed(high, gain_at + DIM // 2, inside, shrink, dtype)
    if CLIP > 0:
        low = tl.minimum(tl.maximum(low, -CLIP), CLIP).to(dtype).to(tl.float32)
        high = tl.minimum(tl.maximum(high, -CLIP), CLIP).to(dtype).to(tl.float32)
    if not is_value:
        if NORM == "head":
            shrink = tl.rsqrt(tl.sum(low * low + high * high, 1) / DIM + EPS)[:, None]
            gain_at = tl.where(is_query, q_gain_ptr, k_gain_ptr) + half[None, :]
            low = _normed(low, gain_at, inside, shrink, dtype)
            high = _normed(high, gain_at + DIM // 2, inside, shrink, dtype)
        angle = tl.where(there, position, 0) * (DIM // 2) + half
        cos = tl.load(cos_ptr + angle, mask=half < DIM // 2, other=0.0)[None, :]
        sin = tl.load(sin_ptr + angle, mask=half < DIM // 2, other=0.0)[None, :]
        turned = low * cos - high * sin
        high = high * cos + low * sin
        low = turned
    if is_query:
        out = q_ptr + row.to(tl.int64) * (HEADS * DIM) + low_at
        tl.store(out, tl.where(there, low, 0.0).to(dtype), mask=inside)
        tl.store(out + DIM // 2, tl.where(there, high, 0.0).to(dtype), mask=inside)
    else:
        sequence = tl.load(sequence_ptr + row, mask=there, other=0)
        slot = position // PAGE
        mapped = there & (slot < MAX_PAGES) & (sequence >= 0) & (sequence < SEQUENCES)
        page = tl.load(table_ptr + sequence * MAX_PAGES + slot, mask=mapped, other=-1)
        within = (page.to(tl.int64) * KV_HEADS + kv_head)[:, None] * (PAGE * DIM) + (position % PAGE) * DIM
        out = tl.where(is_value, v_pages_ptr, k_pages_ptr) + within + half[None, :]
        if (page >= 0) & (page < PAGES):
            tl.store(out, low.to(dtype), mask=inside)
            tl.store(out + DIM // 2, high.to(dtype), mask=inside)
