"""The table of blocks that `mosaic_kernel` works through."""

from __future__ import annotations

import triton
import triton.language as tl

from .plan_triton import owners


@triton.jit
def table_of_blocks(
    units_ptr,
    blocks_ptr,
    used_ptr,
    EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """AT_ONCE lines of ``blocks`` ``[B, 5]``, and the number of all that there are.

    A unit is a block of the plan; a block of the table is at most PER_BLOCK units of one expert, and an expert's
    units are dealt to as few blocks as that allows, counted in GROUPs of blocks.
    """
    expert = tl.arange(0, EXPERTS_POW2)
    units = tl.load(units_ptr + expert, mask=expert < EXPERTS, other=0)
    count = (units + (PER_BLOCK * GROUP - 1)) // (PER_BLOCK * GROUP) * GROUP
    last = tl.cumsum(count, 0)
    before = tl.cumsum(units, 0) - units
    start = tl.program_id(0) * AT_ONCE
    if start == 0:
        tl.store(used_ptr, tl.sum(count, 0))
    block = start + tl.arange(0, AT_ONCE)
    owner = owners(last, start, AT_ONCE)
    inside = (block < BLOCKS) & (owner < EXPERTS_POW2)
    owner = tl.minimum(owner, EXPERTS_POW2 - 1)
    line = blocks_ptr + block * 5
    tl.store(line, owner, mask=inside)
    tl.store(line + 1, tl.gather(last - count, owner, 0), mask=inside)
    tl.store(line + 2, tl.gather(count, owner, 0), mask=inside)
    tl.store(line + 3, tl.gather(before, owner, 0), mask=inside)
    tl.store(line + 4, tl.gather(units, owner, 0), mask=inside)
