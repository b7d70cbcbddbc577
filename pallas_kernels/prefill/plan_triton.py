"""Many pairs grouped by expert on the device: counts, scan and scatter, or all three in one launch.

A pair's place is the first place of its expert, plus the expert's pairs in earlier chunks, in earlier parts of its
chunk, and before it in its part. All are counts, so the order is stable whatever the order in which programs run.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _known(ids_ptr, at, PAIRS: tl.constexpr, EXPERTS: tl.constexpr):
    """Ids at some pairs and which of them name an expert; 0 where none does."""
    ids = tl.load(ids_ptr + at, mask=at < PAIRS, other=-1)
    valid = (ids >= 0) & (ids < EXPERTS)
    return tl.where(valid, ids, 0), valid


@triton.jit
def count_pairs(
    ids_ptr,
    counts_ptr,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Pairs of each expert in one chunk, into ``counts`` ``[E, chunks]``."""
    chunk = tl.program_id(0)
    ids, valid = _known(ids_ptr, chunk * CHUNK + tl.arange(0, CHUNK), PAIRS, EXPERTS)
    expert = tl.arange(0, EXPERTS_POW2)
    counts = tl.histogram(ids, EXPERTS_POW2, mask=valid)
    tl.store(counts_ptr + expert * CHUNKS + chunk, counts, mask=expert < EXPERTS)


@triton.jit
def scan_chunks(counts_ptr, before_ptr, totals_ptr, CHUNKS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Pairs of one expert in the chunks before each chunk, and in all of them; AT_ONCE chunks a step."""
    line = tl.program_id(0) * CHUNKS
    total = 0
    for start in range(0, CHUNKS, AT_ONCE):
        chunk = start + tl.arange(0, AT_ONCE)
        counts = tl.load(counts_ptr + line + chunk, mask=chunk < CHUNKS, other=0)
        tl.store(before_ptr + line + chunk, total + tl.cumsum(counts, 0) - counts, mask=chunk < CHUNKS)
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + tl.program_id(0), total)


@triton.jit
def _within(mine, exists, base, EXPERTS_POW2: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr):
    """``base`` ``[E']`` of each pair's expert, and the expert's pairs before it in the chunk.

    Pairs of one part are compared with each other, earlier parts are counted: PART comparisons a pair, not CHUNK.
    """
    PARTS: tl.constexpr = CHUNK // PART
    key = tl.arange(0, CHUNK) // PART * EXPERTS_POW2 + mine
    counts = tl.reshape(tl.histogram(key, PARTS * EXPERTS_POW2, mask=exists), [PARTS, EXPERTS_POW2])
    start = tl.cumsum(counts, 0) - counts + base[None, :]
    place = tl.gather(tl.reshape(start, [PARTS * EXPERTS_POW2]), key, 0)
    part = tl.reshape(tl.where(exists, mine, -1), [PARTS, PART])
    at = tl.arange(0, PART)
    # The pair compared with comes first: it goes slowest, and most of a sum lies in one thread's registers.
    same = (tl.trans(part)[:, :, None] == part[None, :, :]) & (at[:, None] < at[None, :])[:, None, :]
    return place + tl.reshape(tl.sum(same.to(tl.int32), 0), [CHUNK])


@triton.jit
def owners(last, start, AT_ONCE: tl.constexpr):
    """Of AT_ONCE blocks from ``start`` on, the experts that own them; blocks after all of them get E'.

    That is the number of experts whose blocks end at or before a block. These are counted, so that no block is
    compared with every expert; in at least as many bins as a warp has threads.

    Args:
        last: ``[E']``, the block after each expert's last.
    """
    BINS: tl.constexpr = AT_ONCE if AT_ONCE >= 32 else 32
    ends = tl.maximum(last - start, 0)
    owner = tl.cumsum(tl.histogram(ends, BINS, mask=ends < BINS), 0)
    if BINS > AT_ONCE:
        owner = tl.gather(owner, tl.arange(0, AT_ONCE), 0)
    return owner


@triton.jit
def _pad(
    totals,
    first,
    last,
    start,
    weight_row_ptr,
    block_row_ptr,
    block_pair_ptr,
    EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_POW2: tl.constexpr,
    AT_ONCE: tl.constexpr,
    INDIRECT: tl.constexpr,
):
    """Rows of AT_ONCE blocks from ``start`` on, and -1 where they hold no pair.

    Args:
        totals, first, last: ``[E']``, an expert's pairs, its first block and the one after its last.
    """
    block = start + tl.arange(0, AT_ONCE)
    owner = owners(last, start, AT_ONCE)
    filled = owner < EXPERTS
    owner = tl.where(filled, owner, 0)
    live = tl.where(filled, tl.gather(first * BLOCK + totals, owner, 0) - block * BLOCK, 0)
    slot = tl.arange(0, BLOCK_POW2)
    padding = (slot[None, :] >= live[:, None]) & (slot < BLOCK)[None, :]
    tl.store(
        block_pair_ptr + block[:, None] * BLOCK + slot[None, :],
        tl.full([AT_ONCE, BLOCK_POW2], -1, tl.int32),
        mask=padding & (block < BLOCKS)[:, None],
    )
    row = tl.load(weight_row_ptr + owner) if INDIRECT else owner
    tl.store(block_row_ptr + block, tl.where(filled, row, -1), mask=block < BLOCKS)


@triton.jit
def place_pairs(
    ids_ptr,
    weight_row_ptr,
    before_ptr,
    totals_ptr,
    used_ptr,
    block_row_ptr,
    block_pair_ptr,
    place_ptr,
    expert_blocks_ptr,
    PAIRS: tl.constexpr,
    PAIRS_AT_ONCE: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_POW2: tl.constexpr,
    AT_ONCE: tl.constexpr,
    INDIRECT: tl.constexpr,
    ALONE: tl.constexpr,
):
    """Programs below CHUNKS place the pairs of a chunk; each other one pads AT_ONCE blocks and writes their rows.

    ALONE: counts are taken here, by every program over all pairs, rather than read.
    """
    program = tl.program_id(0)
    expert = tl.arange(0, EXPERTS_POW2)
    own = program * CHUNK + tl.arange(0, CHUNK)
    mine, exists = _known(ids_ptr, own, PAIRS, EXPERTS)
    before = 0
    if ALONE:
        # One histogram gives both: an expert's pairs before the chunk, and the others.
        counts = tl.zeros([2 * EXPERTS_POW2], tl.int32)
        for start in range(0, PAIRS, PAIRS_AT_ONCE):
            at = start + tl.arange(0, PAIRS_AT_ONCE)
            ids, valid = _known(ids_ptr, at, PAIRS, EXPERTS)
            half = tl.where(at < program * CHUNK, 0, EXPERTS_POW2)
            counts += tl.histogram(ids + half, 2 * EXPERTS_POW2, mask=valid)
        split = tl.reshape(counts, [2, EXPERTS_POW2])
        totals = tl.sum(split, 0)
        before = tl.sum(tl.where((tl.arange(0, 2) == 0)[:, None], split, 0), 0)
    else:
        totals = tl.load(totals_ptr + expert, mask=expert < EXPERTS, other=0)
    blocks = (totals + (BLOCK - 1)) // BLOCK
    last = tl.cumsum(blocks, 0)
    first = last - blocks
    if program < CHUNKS:
        earlier = 0 if ALONE else tl.load(before_ptr + mine * CHUNKS + program)
        place = _within(mine, exists, first * BLOCK + before, EXPERTS_POW2, CHUNK, PART) + earlier
        tl.store(place_ptr + own, tl.where(exists, place, -1), mask=own < PAIRS)
        tl.store(block_pair_ptr + place, own, mask=exists)
    else:
        _pad(
            totals,
            first,
            last,
            (program - CHUNKS) * AT_ONCE,
            weight_row_ptr,
            block_row_ptr,
            block_pair_ptr,
            EXPERTS,
            BLOCKS,
            BLOCK,
            BLOCK_POW2,
            AT_ONCE,
            INDIRECT,
        )
        if program == CHUNKS:
            tl.store(used_ptr, tl.sum(blocks, 0))
            tl.store(expert_blocks_ptr + expert, blocks, mask=expert < EXPERTS)
