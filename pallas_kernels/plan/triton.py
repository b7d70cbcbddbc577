"""Rows grouped by expert on the device, a program for each block."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def count_blocks(
    ids_ptr,
    PAIRS: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Blocks of ``BLOCK_N`` pairs that each expert fills, and the number of blocks up to and with it."""
    pairs = tl.arange(0, PAIRS_POW2)
    ids = tl.load(ids_ptr + pairs, mask=pairs < PAIRS, other=-1)
    valid = (ids >= 0) & (ids < EXPERTS)
    counts = tl.histogram(tl.where(valid, ids, 0), EXPERTS_POW2, mask=valid)
    blocks = (counts + (BLOCK_N - 1)) // BLOCK_N
    return blocks, tl.cumsum(blocks, 0)


@triton.jit
def find_block(
    ids_ptr, blocks, last, block, PAIRS: tl.constexpr, PAIRS_POW2: tl.constexpr, EXPERTS_POW2: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Expert and pairs of one block. Blocks go by ascending expert; their pairs keep their order.

    Returns:
        ``expert``, EXPERTS_POW2 when there is no such block; ``pair`` ``[BLOCK_N]``, -1 for padding.
    """
    expert = tl.sum((last <= block).to(tl.int32), 0)
    before = tl.sum(tl.where(tl.arange(0, EXPERTS_POW2) < expert, blocks, 0), 0)
    # A [CHUNK, BLOCK_N] table of hits fits in registers for every size.
    CHUNK: tl.constexpr = 4096 // BLOCK_N if PAIRS_POW2 * BLOCK_N > 4096 else PAIRS_POW2
    slots = tl.arange(0, BLOCK_N)
    skip = (block - before) * BLOCK_N
    pair = tl.full([BLOCK_N], -1, tl.int32)
    for start in range(0, PAIRS, CHUNK):
        part = start + tl.arange(0, CHUNK)
        mine = tl.load(ids_ptr + part, mask=part < PAIRS, other=-1) == expert
        place = tl.cumsum(mine.to(tl.int32), 0) - 1 - skip
        hit = mine[:, None] & (place[:, None] == slots[None, :])
        pair += tl.sum(tl.where(hit, part[:, None] + 1, 0), 0)
        skip -= tl.sum(mine.to(tl.int32), 0)
    return expert, pair


@triton.jit
def plan_blocks(
    ids_ptr,
    weight_row_ptr,
    used_ptr,
    block_row_ptr,
    block_pair_ptr,
    PAIRS: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    INDIRECT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write a block out: its row in the weight stacks (-1 when unused) and its pairs; and the number of blocks used."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0)
    blocks, last = count_blocks(ids_ptr, PAIRS, PAIRS_POW2, EXPERTS, EXPERTS_POW2, BLOCK_N)
    expert, pair = find_block(ids_ptr, blocks, last, block, PAIRS, PAIRS_POW2, EXPERTS_POW2, BLOCK_N)
    used = expert < EXPERTS
    if INDIRECT:
        row = tl.load(weight_row_ptr + expert, mask=used, other=-1)
    else:
        row = tl.where(used, expert, -1)
    tl.store(block_row_ptr + block, row)
    tl.store(block_pair_ptr + block * BLOCK_N + tl.arange(0, BLOCK_N), tl.where(used, pair, -1))
    if block == 0:
        tl.store(used_ptr, tl.sum(blocks, 0))
