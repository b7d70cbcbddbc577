"""Many pairs grouped by expert on the device: counts, scan and scatter, or all three in one launch.

A pair's place is the first place of its expert, plus the expert's pairs in earlier chunks, plus those before it in
its own chunk. All three are counts, so the order is stable whatever the order in which programs run.
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
def scan_chunks(counts_ptr, before_ptr, totals_ptr, CHUNKS: tl.constexpr, CHUNKS_POW2: tl.constexpr):
    """Pairs of one expert in the chunks before each chunk, and in all of them."""
    expert = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS_POW2)
    counts = tl.load(counts_ptr + expert * CHUNKS + chunk, mask=chunk < CHUNKS, other=0)
    tl.store(before_ptr + expert * CHUNKS + chunk, tl.cumsum(counts, 0) - counts, mask=chunk < CHUNKS)
    tl.store(totals_ptr + expert, tl.sum(counts, 0))


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
    PAIRS: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
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
    if ALONE:
        ids, valid = _known(ids_ptr, tl.arange(0, PAIRS_POW2), PAIRS, EXPERTS)
        totals = tl.histogram(ids, EXPERTS_POW2, mask=valid)
    else:
        totals = tl.load(totals_ptr + expert, mask=expert < EXPERTS, other=0)
    blocks = (totals + (BLOCK - 1)) // BLOCK
    last = tl.cumsum(blocks, 0)
    first = last - blocks
    if program < CHUNKS:
        own = program * CHUNK + tl.arange(0, CHUNK)
        mine, exists = _known(ids_ptr, own, PAIRS, EXPERTS)
        if ALONE:
            at = tl.arange(0, PAIRS_POW2)
            ids, valid = _known(ids_ptr, at, PAIRS, EXPERTS)
            before = tl.histogram(ids, EXPERTS_POW2, mask=valid & (at < program * CHUNK))
            place = tl.gather(first * BLOCK + before, mine, 0)
        else:
            place = tl.gather(first * BLOCK, mine, 0) + tl.load(before_ptr + mine * CHUNKS + program)
        PART: tl.constexpr = tl.constexpr(16)
        hits = tl.zeros([CHUNK, PART], tl.int32)
        for start in range(0, CHUNK, PART):
            other = program * CHUNK + start + tl.arange(0, PART)
            theirs, real = _known(ids_ptr, other, PAIRS, EXPERTS)
            earlier = (other[None, :] < own[:, None]) & real[None, :]
            hits += ((theirs[None, :] == mine[:, None]) & earlier).to(tl.int32)
        place += tl.sum(hits, 1)
        tl.store(place_ptr + own, tl.where(exists, place, -1), mask=own < PAIRS)
        tl.store(block_pair_ptr + place, own, mask=exists)
    else:
        block = (program - CHUNKS) * AT_ONCE + tl.arange(0, AT_ONCE)
        owner = tl.sum((last[None, :] <= block[:, None]).to(tl.int32), 1)
        filled = owner < EXPERTS
        owner = tl.where(filled, owner, 0)
        live = tl.gather(totals, owner, 0) - (block - tl.gather(first, owner, 0)) * BLOCK
        slot = tl.arange(0, BLOCK_POW2)
        padding = (slot[None, :] >= tl.where(filled, live, 0)[:, None]) & (slot < BLOCK)[None, :]
        tl.store(
            block_pair_ptr + block[:, None] * BLOCK + slot[None, :],
            tl.full([AT_ONCE, BLOCK_POW2], -1, tl.int32),
            mask=padding & (block < BLOCKS)[:, None],
        )
        row = tl.load(weight_row_ptr + owner) if INDIRECT else owner
        tl.store(block_row_ptr + block, tl.where(filled, row, -1), mask=block < BLOCKS)
        if program == CHUNKS:
            tl.store(used_ptr, tl.sum(blocks, 0))
