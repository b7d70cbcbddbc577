"""A token's pair vectors added in rank order, in f32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _head(place_ptr, scale_ptr, at):
    """Place and weight of a pair; 0 for the weight of an absent one."""
    place = tl.load(place_ptr + at)
    # By select: the weight of an expert that lives elsewhere may be anything.
    return place, tl.where(place >= 0, tl.load(scale_ptr + at), 0.0)


@triton.jit
def _vector(pair_ptr, place, column, HIDDEN: tl.constexpr):
    there = column < tl.where(place >= 0, HIDDEN, 0)
    return tl.load(pair_ptr + place.to(tl.int64) * HIDDEN + column, mask=there, other=0.0)


@triton.jit
def _finish(total, residual_ptr, out_ptr, at, inside, RESIDUAL: tl.constexpr):
    if RESIDUAL:
        total += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


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
    PIECES: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    token = tl.program_id(0) // PIECES
    first = token * TOP_K
    column = tl.program_id(0) % PIECES * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < HIDDEN
    at = token.to(tl.int64) * HIDDEN + column
    total = tl.zeros([COLUMNS], tl.float32)
    if TOP_K <= 16:
        heads = ()
        for rank in tl.static_range(TOP_K):
            heads = heads + (_head(place_ptr, scale_ptr, first + rank),)  # noqa: RUF005
        vectors = ()
        for rank in tl.static_range(TOP_K):
            vectors = vectors + (_vector(pair_ptr, heads[rank][0], column, HIDDEN),)  # noqa: RUF005
        # Always true, which the compiler does not know: the branch ends a block of instructions. Within one block it
        # would put the first sums between the loads, and fewer loads would be in flight.
        if tl.program_id(1) == 0:
            for rank in tl.static_range(TOP_K):
                total = total + heads[rank][1] * vectors[rank].to(tl.float32)
            _finish(total, residual_ptr, out_ptr, at, inside, RESIDUAL)
    else:
        for rank in range(0, TOP_K):
            place, scale = _head(place_ptr, scale_ptr, first + rank)
            total = total + scale * _vector(pair_ptr, place, column, HIDDEN).to(tl.float32)
        _finish(total, residual_ptr, out_ptr, at, inside, RESIDUAL)
