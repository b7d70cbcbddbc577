"""Rows grouped by expert, found by each program for itself: no launch of its own, no buffer, no host.

For at most 64 rows the routed ids are a few hundred integers. Finding one block of one expert among
them takes about a microsecond, and runs in every program while its neighbours stream weights.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_block(
    ids_ptr,
    block,
    PAIRS: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Expert and pairs of the ``block``-th block of at most ``BLOCK_N`` pairs with one expert.

    Blocks go by ascending expert; a block's pairs keep their order. Ids outside 0..EXPERTS-1 are in none.
    Without GROUP every pair is a block of its own (one row has no experts in common with itself).

    Returns:
        ``expert``, EXPERTS or more when there is no such block; ``pair`` ``[BLOCK_N]``, -1 for padding.
    """
    slots = tl.arange(0, BLOCK_N)
    if GROUP:
        pairs = tl.arange(0, PAIRS_POW2)
        ids = tl.load(ids_ptr + pairs, mask=pairs < PAIRS, other=-1)
        valid = (ids >= 0) & (ids < EXPERTS)
        counts = tl.histogram(tl.where(valid, ids, 0), EXPERTS_POW2, mask=valid)
        blocks = (counts + (BLOCK_N - 1)) // BLOCK_N
        expert = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)
        before = tl.sum(tl.where(tl.arange(0, EXPERTS_POW2) < expert, blocks, 0), 0)
        # A [CHUNK, BLOCK_N] table of hits fits in registers for every size.
        CHUNK: tl.constexpr = 4096 // BLOCK_N if PAIRS_POW2 * BLOCK_N > 4096 else PAIRS_POW2
        skip = (block - before) * BLOCK_N
        pair = tl.full([BLOCK_N], -1, tl.int32)
        for start in range(0, PAIRS, CHUNK):
            part = start + tl.arange(0, CHUNK)
            mine = tl.load(ids_ptr + part, mask=part < PAIRS, other=-1) == expert
            place = tl.cumsum(mine.to(tl.int32), 0) - 1 - skip
            hit = mine[:, None] & (place[:, None] == slots[None, :])
            pair += tl.sum(tl.where(hit, part[:, None] + 1, 0), 0)
            skip -= tl.sum(mine.to(tl.int32), 0)
    else:
        expert = tl.load(ids_ptr + block)
        expert = tl.where(expert < 0, EXPERTS, expert)
        pair = tl.where(slots == 0, block, -1)
    return expert, pair


@triton.jit
def plan_blocks(
    ids_ptr,
    weight_row_ptr,
    block_expert_ptr,
    block_row_ptr,
    block_pair_ptr,
    PAIRS: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write every block out: its expert (-1 when unused), its row in the weight stacks, its pairs."""
    block = tl.program_id(0)
    expert, pair = find_block(
        ids_ptr, block, PAIRS, PAIRS_POW2, EXPERTS, EXPERTS_POW2, BLOCK_N, GROUP
    )
    used = expert < EXPERTS
    tl.store(block_expert_ptr + block, tl.where(used, expert, -1))
    tl.store(block_row_ptr + block, tl.load(weight_row_ptr + expert, mask=used, other=-1))
    tl.store(block_pair_ptr + block * BLOCK_N + tl.arange(0, BLOCK_N), tl.where(used, pair, -1))
