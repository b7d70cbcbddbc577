"""Attention of 1 to 64 query rows over paged keys and values: the first launch, over splits.

Keys are cut at absolute positions: tiles of TILE, runs of RUN tiles, splits of RUNS runs. A tile's softmax is its own,
tiles of a run and runs of a split are merged in ascending order, and so are splits (`combine_triton`). Every sum runs
through the matrix unit or element by element, so a row's bits depend on its own position and on
nothing else. Whether a program takes a split or a run (when there are too few splits to fill the device) changes where
the merging happens, not what is computed. docs/kernels-decode.md has the reasoning.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def positions_of(position_ptr, row, mask, LONGEST: tl.constexpr):
    """The last key that some rows see; past the table's keys is its last key, so that nothing outside it is read."""
    return tl.minimum(tl.load(position_ptr + row, mask=mask, other=-1), LONGEST - 1)


@triton.jit
def work_of(
    position_ptr, ROWS: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUPS: tl.constexpr, KV_HEADS: tl.constexpr,
    LONGEST: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr,
    FILL: tl.constexpr,
):  # fmt: skip
    """What each group of rows has to do.

    Returns:
        ``last`` ``[GROUPS]``, the last position of a group (-1: none there); ``low`` the first key that it sees;
        ``first`` the slot of that key; ``end`` the number of slots up to and with the group; tiles of a slot.
    """
    group = tl.arange(0, GROUPS)
    last = tl.full([GROUPS], -1, tl.int32)
    low = tl.full([GROUPS], 0x7FFFFFFF, tl.int32)
    for r in tl.static_range(GROUP_ROWS):
        row = group * GROUP_ROWS + r
        position = positions_of(position_ptr, row, row < ROWS, LONGEST)
        last = tl.maximum(last, position)
        low = tl.where(position >= 0, tl.minimum(low, position), low)
    low = tl.maximum(low - (WINDOW - 1), 0) if WINDOW > 0 else tl.zeros([GROUPS], tl.int32)
    # Splits, when they are enough, else runs.
    piece = TILE * RUN * RUNS
    pieces = tl.sum(tl.where(last >= 0, last // piece - low // piece + 1, 0), 0)
    tiles = tl.where(pieces * KV_HEADS >= FILL, RUN * RUNS, RUN)
    span = tiles * TILE
    first = tl.where(last >= 0, low // span, 0)
    slots = tl.where(last >= 0, last // span - first + 1, 0)
    return last, low, first, tl.cumsum(slots, 0), tiles


@triton.jit
def merge(top, total, out, tile_top, tile_total, tile_out, there):
    """Add a tile that is ``there`` to what came before it."""
    largest = tl.maximum(top, tile_top)
    # Two times -inf: a row all of whose scores are -inf so far.
    base = tl.where(largest == float("-inf"), 0.0, largest)
    old, new = tl.exp2(top - base), tl.exp2(tile_top - base)
    total = tl.where(there, total * old + tile_total * new, total)
    out = tl.where(there[:, None], out * old[:, None] + tile_out * new[:, None], out)
    return tl.where(there, largest, top), total, out


@triton.jit
def items_of(end, GROUPS: tl.constexpr, KV_HEADS: tl.constexpr, AT_ONCE: tl.constexpr, PROGRAMS: tl.constexpr):
    """How slots are shared out: a program goes from one slot to the next without an end of its loads, up to AT_ONCE of
    them where there are more slots than programs.

    Returns:
        ``slots`` ``[GROUPS]`` of each group; ``ends`` the number of items up to and with the group, for each key head.
    """
    group = tl.arange(0, GROUPS)
    before = tl.sum(tl.where(group[None, :] + 1 == group[:, None], end[None, :], 0), 1)
    slots = end - before
    many = tl.minimum(tl.maximum(tl.cdiv(tl.max(end, 0) * KV_HEADS, PROGRAMS), 1), AT_ONCE)
    return slots, tl.cumsum(tl.cdiv(slots, many), 0)


@triton.jit
def _of(values, here):
    """The value of the one group that is ``here``."""
    return tl.sum(tl.where(here, values, 0), 0)


@triton.jit
def item_of(
    item, last, lows, first, end, slots, ends, sequences, tiles,
    GROUPS: tl.constexpr, KV_HEADS: tl.constexpr, SEQUENCES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What an item of the list is: slots that follow each other, of one group and key head.

    Returns:
        its first slot, key head, group and sequence; its first tile and the one after its last; first and last key that
        the group sees.
    """
    number = item // KV_HEADS
    group = tl.arange(0, GROUPS)
    # The group that an item belongs to, and its number there; items of a group are equally long, but for one slot.
    mine = tl.sum((ends <= number).to(tl.int32), 0)
    here = group == mine
    count, before = _of(slots, here), tl.max(tl.where(group < mine, ends, 0), 0)
    many, number = _of(ends, here) - before, number - before
    slot, end_slot = number * count // many, (number + 1) * count // many
    low, high, offset = _of(lows, here), _of(last, here), _of(first, here)
    sequence = tl.minimum(_of(sequences, here), SEQUENCES - 1)
    end_tile = tl.minimum((offset + end_slot) * tiles, high // TILE + 1)
    first_slot = _of(end, here) - count + slot
    return first_slot, item % KV_HEADS, mine, sequence, (offset + slot) * tiles, end_tile, low, high


@triton.jit
def pages_of(pages_at, tile, high, TILE: tl.constexpr, PAGE: tl.constexpr, ITEM_PAGES: tl.constexpr):
    """Numbers of an item's pages in the table's row, and those pages: read at once, before the item's keys. Only for
    tiles that lie within a page.
    """
    index = tl.arange(0, ITEM_PAGES)
    pages = index
    if PAGE % TILE == 0:
        index = tile * TILE // PAGE + index
        pages = tl.load(pages_at + index, mask=index <= high // PAGE, other=0)
    return index, pages


@triton.jit
def over_keys(
    q, position, k_pages_ptr, v_pages_ptr, pages_at, index, pages, kv_head, tile, stop, low, high,
    vector_ptr, weight_ptr, slot, within, head, live, tiles,
    DIM: tl.constexpr, DIM_POW2: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP_ROWS: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr, PAGES: tl.constexpr, PAGE: tl.constexpr,
    SCALE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Query heads ``[BLOCK_M, DIM_POW2]`` over the keys of tiles ``tile`` to ``stop``, which are those of ``slot`` and
    the slots behind it. Leaves in each of them, for the second launch, the largest score, the sum of powers and the sum
    of values of each query head that is ``live``: head ``head`` of row ``within`` of the group.
    """
    # A tile within one page has one address.
    ONE_PAGE: tl.constexpr = PAGE % TILE == 0
    dim = tl.arange(0, DIM_POW2)
    lane = tl.arange(0, TILE)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, DIM_POW2], tl.float32)
    run_top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    run_total = tl.zeros([BLOCK_M], tl.float32)
    run_out = tl.zeros([BLOCK_M, DIM_POW2], tl.float32)
    for t in range(tile, stop):
        key = t * TILE + lane
        exists = key <= high
        if WINDOW > 0:
            exists = exists & (key >= low)
        if ONE_PAGE:
            page = tl.sum(tl.where(index == t * TILE // PAGE, pages, 0), 0)
            page = tl.minimum(tl.maximum(page, 0), PAGES - 1)
            at = (page.to(tl.int64) * KV_HEADS + kv_head) * (PAGE * DIM) + (t * TILE % PAGE + lane) * DIM
        else:
            page = tl.load(pages_at + key // PAGE, mask=exists, other=0)
            page = tl.minimum(tl.maximum(page, 0), PAGES - 1)
            at = (page.to(tl.int64) * KV_HEADS + kv_head) * (PAGE * DIM) + (key % PAGE) * DIM
        # Places that no row of the group sees hold anything: by select, so that a NaN there meets no 0.
        mask = exists[:, None] if DIM == DIM_POW2 else exists[:, None] & (dim < DIM)[None, :]
        k = tl.load(k_pages_ptr + at[:, None] + dim[None, :], mask=mask, other=0.0)
        v = tl.load(v_pages_ptr + at[:, None] + dim[None, :], mask=mask, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * (SCALE * LOG2_E)
        seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
        tile_top = tl.max(score, 1)
        base = tl.where(tile_top == float("-inf"), 0.0, tile_top)
        p = tl.exp2(score - base[:, None]).to(q.dtype)
        # The sum of p as a product: in the matrix unit's order, which no layout changes.
        tile_total = tl.max(tl.dot(p, tl.full([TILE, 16], 1.0, q.dtype), input_precision="ieee"), 1)
        tile_out = tl.dot(p, v, input_precision="ieee")
        there = t * TILE <= position
        if WINDOW > 0:
            there = there & ((t + 1) * TILE > position - (WINDOW - 1))
        run_top, run_total, run_out = merge(run_top, run_total, run_out, tile_top, tile_total, tile_out, there)
        if ((t + 1) % RUN == 0) | (t + 1 == stop):
            top, total, out = merge(top, total, out, run_top, run_total, run_out, tl.arange(0, BLOCK_M) >= 0)
            run_top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            run_total = tl.zeros([BLOCK_M], tl.float32)
            run_out = tl.zeros([BLOCK_M, DIM_POW2], tl.float32)
            if ((t + 1) % tiles == 0) | (t + 1 == stop):
                place = ((slot + (t - tile) // tiles) * GROUP_ROWS + within).to(tl.int64) * HEADS + head
                written = live[:, None] & (dim < DIM)[None, :]
                tl.store(vector_ptr + place[:, None] * DIM + dim[None, :], out, mask=written)
                tl.store(weight_ptr + place * 2, top, mask=live)
                tl.store(weight_ptr + place * 2 + 1, total, mask=live)
                top = tl.full([BLOCK_M], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                out = tl.zeros([BLOCK_M, DIM_POW2], tl.float32)


@triton.jit
def attend(
    q_ptr,
    k_pages_ptr,
    v_pages_ptr,
    table_ptr,
    position_ptr,
    sequence_ptr,
    vector_ptr,
    weight_ptr,
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
    SEQUENCES: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    ITEM_PAGES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """See `attention.specs.attention_specs` for the arguments."""
    if PDL:
        gdc_launch_dependents()
    last, lows, first, end, tiles = work_of(
        position_ptr, ROWS, GROUP_ROWS, GROUPS, KV_HEADS, LONGEST, WINDOW, TILE, RUN, RUNS, FILL
    )
    group = tl.arange(0, GROUPS)
    sequences = tl.full([GROUPS], 0, tl.int32)
    for r in tl.static_range(GROUP_ROWS):
        of_group = group * GROUP_ROWS + r
        sequences = tl.maximum(sequences, tl.load(sequence_ptr + of_group, mask=of_group < ROWS, other=0))
    slots, ends = items_of(end, GROUPS, KV_HEADS, AT_ONCE, PROGRAMS)
    items = tl.max(ends, 0) * KV_HEADS
    SHARE: tl.constexpr = HEADS // KV_HEADS
    m = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM_POW2)
    for item in range(tl.program_id(0), items, PROGRAMS):
        slot, kv_head, mine, sequence, tile, stop, low, high = item_of(
            item, last, lows, first, end, slots, ends, sequences, tiles, GROUPS, KV_HEADS, SEQUENCES, TILE
        )
        pages_at = table_ptr + sequence * (LONGEST // PAGE)
        index, pages = pages_of(pages_at, tile, high, TILE, PAGE, ITEM_PAGES)
        row = mine * GROUP_ROWS + m // SHARE
        head = kv_head * SHARE + m % SHARE
        if GROUP_ROWS == 1:
            position = tl.where(m < SHARE, high, -1)
        else:
            position = positions_of(position_ptr, row, (m < GROUP_ROWS * SHARE) & (row < ROWS), LONGEST)
        live = position >= 0
        if PDL:
            gdc_wait()
        q_at = (row * HEADS + head)[:, None] * DIM + dim[None, :]
        q = tl.load(q_ptr + q_at, mask=live[:, None] & (dim < DIM)[None, :], other=0.0)
        over_keys(
            q, position, k_pages_ptr, v_pages_ptr, pages_at, index, pages, kv_head, tile, stop, low, high,
            vector_ptr, weight_ptr, slot, m // SHARE, head, live, tiles,
            DIM, DIM_POW2, HEADS, KV_HEADS, GROUP_ROWS, WINDOW, TILE, RUN, PAGES, PAGE, SCALE, BLOCK_M,
        )  # fmt: skip
    if PDL:
        gdc_wait()  # also without work: when this launch has ended, so have all before it
