"""Rows of the batch copied into planned order, and the table of blocks that `mosaic_kernel` works through."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_rows(
    x_ptr,
    block_row_ptr,
    place_ptr,
    sorted_ptr,
    blocks_ptr,
    used_ptr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    UNITS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program 0 writes the table; each other one copies COLUMNS columns of ROWS rows. Padding is not written.

    One dimension of programs: a launch's second one ends at 65,535.

    A row is read once and written top-k times: reading it at each place would move twice the bytes through L2.

    A unit is a block of the plan; a block of the table is at most PER_BLOCK units of one expert, and an expert's
    units are dealt to as few blocks as that allows, counted in GROUPs of blocks.
    """
    if tl.program_id(0) == 0:
        units = tl.zeros([EXPERTS_POW2], tl.int32)
        for start in range(0, UNITS, 1024):
            unit = start + tl.arange(0, 1024)
            row = tl.load(block_row_ptr + unit, mask=unit < UNITS, other=-1)
            units += tl.histogram(tl.maximum(row, 0), EXPERTS_POW2, mask=row >= 0)
        count = (units + (PER_BLOCK * GROUP - 1)) // (PER_BLOCK * GROUP) * GROUP
        last = tl.cumsum(count, 0)
        before = tl.cumsum(units, 0) - units
        tl.store(used_ptr, tl.sum(count, 0))
        AT_ONCE: tl.constexpr = 16
        for start in range(0, BLOCKS, AT_ONCE):
            block = start + tl.arange(0, AT_ONCE)
            owner = tl.sum((last[None, :] <= block[:, None]).to(tl.int32), 1)
            inside = (block < BLOCKS) & (owner < EXPERTS_POW2)
            owner = tl.minimum(owner, EXPERTS_POW2 - 1)
            line = blocks_ptr + block * 5
            tl.store(line, owner, mask=inside)
            tl.store(line + 1, tl.gather(last - count, owner, 0), mask=inside)
            tl.store(line + 2, tl.gather(count, owner, 0), mask=inside)
            tl.store(line + 3, tl.gather(before, owner, 0), mask=inside)
            tl.store(line + 4, tl.gather(units, owner, 0), mask=inside)
    else:
        PARTS: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
        copy = tl.program_id(0) - 1
        token = copy // PARTS * ROWS + tl.arange(0, ROWS)
        column = copy % PARTS * COLUMNS + tl.arange(0, COLUMNS)
        inside = (column < HIDDEN)[None, :]
        exists = token < TOKENS
        value = tl.load(x_ptr + token.to(tl.int64)[:, None] * HIDDEN + column[None, :], mask=exists[:, None] & inside)
        for rank in tl.static_range(TOP_K):
            place = tl.load(place_ptr + token * TOP_K + rank, mask=exists, other=-1)
            target = sorted_ptr + place.to(tl.int64)[:, None] * HIDDEN + column[None, :]
            tl.store(target, value, mask=(place >= 0)[:, None] & inside)
