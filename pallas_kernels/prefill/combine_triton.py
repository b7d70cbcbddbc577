"""A token's pair vectors added in rank order, in f32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _add(total, pair_ptr, place_ptr, scale_ptr, at, column, HIDDEN: tl.constexpr):
    """``total`` and one pair's vector by its weight; ``at`` is the pair's number."""
    place = tl.load(place_ptr + at).to(tl.int64)
    # By select: the weight of an expert that lives elsewhere may be anything.
    scale = tl.where(place >= 0, tl.load(scale_ptr + at), 0.0)
    there = column < tl.where(place >= 0, HIDDEN, 0)
    vector = tl.load(pair_ptr + place * HIDDEN + column, mask=there, other=0.0)
    return total + scale * vector.to(tl.float32)


@triton.jit
def combine(
    pair_ptr,
    place_ptr,
    scale_ptr,
    residual_ptr,
    out_ptr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """One token and COLUMNS columns: ``sum_r scale[t, r] * pair[place[t, r]]`` with r ascending, plus the residual."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < HIDDEN
    total = tl.zeros([COLUMNS], tl.float32)
    if TOP_K <= 16:
        for rank in tl.static_range(TOP_K):
            total = _add(total, pair_ptr, place_ptr, scale_ptr, token * TOP_K + rank, column, HIDDEN)
    else:
        for rank in range(0, TOP_K):
            total = _add(total, pair_ptr, place_ptr, scale_ptr, token * TOP_K + rank, column, HIDDEN)
    if RESIDUAL:
        total += tl.load(residual_ptr + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + column, total.to(out_ptr.dtype.element_ty), mask=inside)
