"""The second launch of attention: what the first one left of a row's keys, together.

All of it is element by element, in one order that no layout and no launch changes: splits of a stretch are merged one
after the other, as the first launch merges those that it takes whole, and so are stretches.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .triton import LOG2_E, positions_of, shares, work_of


@triton.jit
def _merge(top, total, out, new_top, new_total, new_out):
    """`triton.merge` of one row."""
    largest, old, new = shares(top, new_top)
    return largest, total * old + new_total * new, out * old + new_out * new


@triton.jit
def _merged(tops, totals, outs, FIRST: tl.constexpr, MANY: tl.constexpr):
    """MANY pieces from a number on, one after the other."""
    top, total, out = tops[FIRST], totals[FIRST], outs[FIRST]
    for i in tl.static_range(FIRST + 1, FIRST + MANY):
        top, total, out = _merge(top, total, out, tops[i], totals[i], outs[i])
    return top, total, out


@triton.jit
def _nothing(DIM: tl.constexpr):
    """What `_merge` begins with."""
    zero = tl.zeros([DIM], tl.float32)
    return tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32), zero


@triton.jit
def _over_pieces(
    vector_ptr, weight_ptr, within, head, origin, position, low, tiles,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_POW2: tl.constexpr, GROUP_ROWS: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, STRETCH: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """All pieces of a row together.

    Args:
        within: number of the row in its group.
        position, low: the last and first key that the row sees.
        origin: slot that the piece of key 0 has or would have.
        tiles: of a piece.
        PIECES: that are asked for before the first is merged; whole stretches of splits.

    Returns:
        ``top``, ``total`` and ``out`` ``[DIM_POW2]``.
    """
    dim = tl.arange(0, DIM_POW2)
    keys = tiles * TILE
    top, total, out = _nothing(DIM_POW2)
    for start in range(low // keys // PIECES * PIECES, position // keys + 1, PIECES):
        # A piece that is not there has -inf and zeros, and changes nothing that it is merged with.
        # (Tuples grow by addition: Triton knows no starred element.)
        tops = ()
        totals = ()
        outs = ()
        for i in tl.static_range(PIECES):
            piece = start + i
            there = (piece * keys <= position) & (piece >= low // keys)
            place = (tl.where(there, origin + piece, 0) * GROUP_ROWS + within).to(tl.int64) * HEADS + head
            # Numbers, not arrays: a pass of the compiler takes a time that grows with the square of loads of arrays.
            tops = tops + (tl.where(there, tl.load(weight_ptr + place * 2), float("-inf")),)  # noqa: RUF005
            totals = totals + (tl.where(there, tl.load(weight_ptr + place * 2 + 1), 0.0),)  # noqa: RUF005
            at = vector_ptr + place * DIM + dim
            outs = outs + (tl.load(at, mask=dim < tl.where(there, DIM, 0), other=0.0),)  # noqa: RUF005
        # Always true, which the compiler does not know: the branch ends a block of instructions. Within one block it
        # would put the first sums between the loads, and fewer loads would be in flight.
        if tl.program_id(2) <= start:
            if tiles == SPLIT:
                for i in tl.static_range(0, PIECES, STRETCH):
                    more = _merged(tops, totals, outs, i, STRETCH)
                    top, total, out = _merge(top, total, out, more[0], more[1], more[2])
            else:
                for i in tl.static_range(PIECES):
                    top, total, out = _merge(top, total, out, tops[i], totals[i], outs[i])
    return top, total, out


@triton.jit
def combine(
    vector_ptr,
    weight_ptr,
    position_ptr,
    sink_ptr,
    out_ptr,
    ROWS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    LONGEST: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    STRETCH: tl.constexpr,
    FILL: tl.constexpr,
    SINK: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    PDL: tl.constexpr,
):
    """See `attention.specs.attention_specs` for the arguments."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    head = tl.program_id(1)
    _, _, first, end, tiles = work_of(
        position_ptr, ROWS, GROUP_ROWS, GROUPS, KV_HEADS, LONGEST, WINDOW, TILE, SPLIT, STRETCH, FILL
    )
    group = tl.arange(0, GROUPS)
    mine = row // GROUP_ROWS
    origin = tl.max(tl.where(group < mine, end, 0), 0) - tl.sum(tl.where(group == mine, first, 0), 0)
    # By way of an array: the interpreter makes no mask of a scalar.
    given = positions_of(position_ptr, row + tl.arange(0, 1), tl.arange(0, 1) < ROWS - row, LONGEST)
    position = tl.max(given, 0)
    low = tl.maximum(position - (WINDOW - 1), 0) if WINDOW > 0 else 0
    if PDL:
        gdc_wait()
    # Where there are few, most of MANY would be asked for in vain.
    if (position - low) // (tiles * TILE) < FEW:
        top, total, out = _over_pieces(
            vector_ptr, weight_ptr, row % GROUP_ROWS, head, origin, position, low, tiles,
            HEADS, DIM, DIM_POW2, GROUP_ROWS, TILE, SPLIT, STRETCH, FEW,
        )  # fmt: skip
    else:
        top, total, out = _over_pieces(
            vector_ptr, weight_ptr, row % GROUP_ROWS, head, origin, position, low, tiles,
            HEADS, DIM, DIM_POW2, GROUP_ROWS, TILE, SPLIT, STRETCH, MANY,
        )  # fmt: skip
    if SINK:
        sink = tl.load(sink_ptr + head).to(tl.float32) * LOG2_E
        largest = tl.maximum(top, sink)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        share = tl.exp2(top - base)
        total = total * share + tl.exp2(sink - base)
        out = out * share
    value = tl.where(position >= 0, out / total, 0.0)
    dim = tl.arange(0, DIM_POW2)
    at = out_ptr + (row.to(tl.int64) * HEADS + head) * DIM + dim
    tl.store(at, value.to(out_ptr.dtype.element_ty), mask=dim < DIM)
