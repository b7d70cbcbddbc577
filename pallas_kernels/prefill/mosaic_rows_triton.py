"""Rows of the batch copied into planned order, and the table of blocks that `mosaic_kernel` works through."""

from __future__ import annotations

import triton
import triton.language as tl

from .plan_triton import owners


@triton.jit
def _table(
    block_row_ptr,
    blocks_ptr,
    used_ptr,
    UNITS: tl.constexpr,
    UNITS_AT_ONCE: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
):
    """Lines of ``blocks`` ``[B, 5]`` and their number.

    A unit is a block of the plan; a block of the table is at most PER_BLOCK units of one expert, and an expert's
    units are dealt to as few blocks as that allows, counted in GROUPs of blocks.
    """
    units = tl.zeros([EXPERTS_POW2], tl.int32)
    for start in range(0, UNITS, UNITS_AT_ONCE):
        unit = start + tl.arange(0, UNITS_AT_ONCE)
        row = tl.load(block_row_ptr + unit, mask=unit < UNITS, other=-1)
        units += tl.histogram(tl.maximum(row, 0), EXPERTS_POW2, mask=row >= 0)
    count = (units + (PER_BLOCK * GROUP - 1)) // (PER_BLOCK * GROUP) * GROUP
    last = tl.cumsum(count, 0)
    before = tl.cumsum(units, 0) - units
    tl.store(used_ptr, tl.sum(count, 0))
    for start in range(0, BLOCKS, BLOCKS_AT_ONCE):
        block = start + tl.arange(0, BLOCKS_AT_ONCE)
        owner = owners(last, start, BLOCKS_AT_ONCE)
        inside = (block < BLOCKS) & (owner < EXPERTS_POW2)
        owner = tl.minimum(owner, EXPERTS_POW2 - 1)
        line = blocks_ptr + block * 5
        tl.store(line, owner, mask=inside)
        tl.store(line + 1, tl.gather(last - count, owner, 0), mask=inside)
        tl.store(line + 2, tl.gather(count, owner, 0), mask=inside)
        tl.store(line + 3, tl.gather(before, owner, 0), mask=inside)
        tl.store(line + 4, tl.gather(units, owner, 0), mask=inside)


@triton.jit
def _put(sorted_ptr, value, place, column, HIDDEN: tl.constexpr):
    there = column < tl.where(place >= 0, HIDDEN, 0)
    tl.store(sorted_ptr + place.to(tl.int64) * HIDDEN + column, value, mask=there)


@triton.jit
def copy_rows(
    x_ptr,
    block_row_ptr,
    place_ptr,
    sorted_ptr,
    blocks_ptr,
    used_ptr,
    TOP_K: tl.constexpr,
    UNITS: tl.constexpr,
    UNITS_AT_ONCE: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program 0 writes the table; each other one copies COLUMNS columns of a row. Padding is not written.

    One dimension of programs: a launch's second one ends at 65,535.

    A row is read once and written top-k times: reading it at each place would move twice the bytes through L2.
    """
    if tl.program_id(0) == 0:
        _table(
            block_row_ptr,
            blocks_ptr,
            used_ptr,
            UNITS,
            UNITS_AT_ONCE,
            EXPERTS_POW2,
            PER_BLOCK,
            GROUP,
            BLOCKS,
            BLOCKS_AT_ONCE,
        )
    else:
        PIECES: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
        copy = tl.program_id(0) - 1
        token = copy // PIECES
        column = copy % PIECES * COLUMNS + tl.arange(0, COLUMNS)
        at = x_ptr + token.to(tl.int64) * HIDDEN + column
        if TOP_K <= 16:
            # Places and row are asked for before the first store: the compiler moves no load to before a store.
            places = ()
            for rank in tl.static_range(TOP_K):
                places = places + (tl.load(place_ptr + token * TOP_K + rank),)  # noqa: RUF005
            value = tl.load(at, mask=column < HIDDEN)
            for rank in tl.static_range(TOP_K):
                _put(sorted_ptr, value, places[rank], column, HIDDEN)
        else:
            value = tl.load(at, mask=column < HIDDEN)
            for rank in range(0, TOP_K):
                _put(sorted_ptr, value, tl.load(place_ptr + token * TOP_K + rank), column, HIDDEN)
