"""The second launch of attention: what the first one left of a row's keys, together.

All of it is element by element, in one order that no layout and no launch changes: runs of a split are merged one after
the other, as the first launch merges them where it takes whole splits; four splits are added in ascending order,
relative to the largest of their scores; and these sums are merged one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .triton import LOG2_E, merge, positions_of, work_of

# Splits of a sum. Belongs to the arithmetic.
TOGETHER = tl.constexpr(4)


@triton.jit
def _add(tops, totals, outs, FIRST: tl.constexpr):
    """The sum of `TOGETHER` splits from a number on."""
    largest = tops[FIRST]
    for i in tl.static_range(FIRST + 1, FIRST + TOGETHER):
        largest = tl.maximum(largest, tops[i])
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.zeros_like(totals[FIRST])
    out = tl.zeros_like(outs[FIRST])
    for i in tl.static_range(FIRST, FIRST + TOGETHER):
        share = tl.exp2(tops[i] - base)
        total += totals[i] * share
        out += outs[i] * share[:, None]
    return largest, total, out


@triton.jit
def _over_splits(
    vector_ptr, weight_ptr, within, head, origin, position, low,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_POW2: tl.constexpr, GROUP_ROWS: tl.constexpr, KEYS: tl.constexpr,
    PIECES: tl.constexpr, FLYING: tl.constexpr,
):  # fmt: skip
    """All splits of a row together, each of PIECES pieces of KEYS keys.

    Args:
        within: number of the row in its group.
        head, position, low: ``[1]``; the first and last key that the row sees.
        origin: slot that the piece of key 0 has or would have.
        FLYING: times `TOGETHER` splits are asked for before the first is added.

    Returns:
        ``top`` and ``total`` ``[1]`` and ``out`` ``[1, DIM_POW2]``, as the first launch leaves them of a piece.
    """
    SPLIT: tl.constexpr = KEYS * PIECES
    SPAN: tl.constexpr = TOGETHER * FLYING
    dim = tl.arange(0, DIM_POW2)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    out = tl.zeros([1, DIM_POW2], tl.float32)
    for start in range(tl.max(low, 0) // SPLIT // SPAN * SPAN, tl.max(position, 0) // SPLIT + 1, SPAN):
        # A piece that is not there has -inf and zeros, and changes nothing that it is merged with.
        # (Tuples grow by addition: Triton knows no starred element.)
        tops = ()
        totals = ()
        outs = ()
        for i in tl.static_range(SPAN * PIECES):
            piece = start * PIECES + i
            there = (piece * KEYS <= position) & (piece >= low // KEYS)
            place = (tl.where(there, origin + piece, 0) * GROUP_ROWS + within).to(tl.int64) * HEADS + head
            tops = tops + (tl.load(weight_ptr + place * 2, mask=there, other=float("-inf")),)  # noqa: RUF005
            totals = totals + (tl.load(weight_ptr + place * 2 + 1, mask=there, other=0.0),)  # noqa: RUF005
            at = vector_ptr + place[:, None] * DIM + dim[None, :]
            outs = outs + (tl.load(at, mask=there[:, None] & (dim < DIM)[None, :], other=0.0),)  # noqa: RUF005
        # Always true, which the compiler does not know: the branch ends a block of instructions. Within one block it
        # would put the first sums between the loads, and fewer loads would be in flight.
        if tl.program_id(2) <= start:
            split_tops = ()
            split_totals = ()
            split_outs = ()
            for i in tl.static_range(0, SPAN * PIECES, PIECES):
                split_top, split_total, split_out = tops[i], totals[i], outs[i]
                for j in tl.static_range(i + 1, i + PIECES):
                    split_top, split_total, split_out = merge(
                        split_top, split_total, split_out, tops[j], totals[j], outs[j], position >= 0
                    )
                split_tops = split_tops + (split_top,)  # noqa: RUF005
                split_totals = split_totals + (split_total,)  # noqa: RUF005
                split_outs = split_outs + (split_out,)  # noqa: RUF005
            for i in tl.static_range(0, SPAN, TOGETHER):
                sum_top, sum_total, sum_out = _add(split_tops, split_totals, split_outs, i)
                top, total, out = merge(top, total, out, sum_top, sum_total, sum_out, position >= 0)
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
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    FILL: tl.constexpr,
    SINK: tl.constexpr,
    FLYING: tl.constexpr,
    PDL: tl.constexpr,
):
    """See `attention.specs.attention_specs` for the arguments."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    head = tl.program_id(1) + tl.arange(0, 1)
    _, _, first, end, tiles = work_of(
        position_ptr, ROWS, GROUP_ROWS, GROUPS, KV_HEADS, LONGEST, WINDOW, TILE, RUN, RUNS, FILL
    )
    group = tl.arange(0, GROUPS)
    mine = row // GROUP_ROWS
    origin = tl.max(tl.where(group < mine, end, 0), 0) - tl.sum(tl.where(group == mine, first, 0), 0)
    # In place of a scalar, of which the interpreter makes no mask.
    position = positions_of(position_ptr, row + tl.arange(0, 1), tl.arange(0, 1) < ROWS - row, LONGEST)
    low = tl.maximum(position - (WINDOW - 1), 0) if WINDOW > 0 else tl.zeros_like(position)
    if PDL:
        gdc_wait()
    if tiles == RUN * RUNS:
        top, total, out = _over_splits(
            vector_ptr, weight_ptr, row % GROUP_ROWS, head, origin, position, low,
            HEADS, DIM, DIM_POW2, GROUP_ROWS, TILE * RUN * RUNS, 1, FLYING,
        )  # fmt: skip
    else:
        top, total, out = _over_splits(
            vector_ptr, weight_ptr, row % GROUP_ROWS, head, origin, position, low,
            HEADS, DIM, DIM_POW2, GROUP_ROWS, TILE * RUN, RUNS, FLYING // 2,
        )  # fmt: skip
    if SINK:
        sink = tl.load(sink_ptr + head).to(tl.float32) * LOG2_E
        largest = tl.maximum(top, sink)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        share = tl.exp2(top - base)
        total = total * share + tl.exp2(sink - base)
        out = out * share[:, None]
    value = tl.where((position >= 0)[:, None], out / total[:, None], 0.0)
    dim = tl.arange(0, DIM_POW2)
    at = out_ptr + (row.to(tl.int64) * HEADS + head)[:, None] * DIM + dim[None, :]
    tl.store(at, value.to(out_ptr.dtype.element_ty), mask=(dim < DIM)[None, :])
