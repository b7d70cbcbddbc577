"""Attention of 1 to 64 query rows over paged keys and values: the first launch, over pieces of keys.

Keys are cut at absolute positions: tiles of TILE, splits of SPLIT tiles, stretches of STRETCH splits. A tile's softmax
is its own; tiles of a split, splits of a stretch and stretches are merged in ascending order. Every sum runs through
the matrix unit or element by element, so a row's bits depend on its own position and on nothing else. What programs
leave for the second launch (`combine_triton`), pieces, are stretches where there is so much work, else splits. This
changes where the merging happens, not what is computed. docs/kernels-decode.md has the reasoning.
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
def _pieces(last, low, keys):
    """Pieces of that many keys which hold some from ``low`` to ``last``; none where ``last`` is negative."""
    return tl.where(last >= 0, last // keys - low // keys + 1, 0)


@triton.jit
def work_of(
    position_ptr, ROWS: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUPS: tl.constexpr, KV_HEADS: tl.constexpr,
    LONGEST: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, STRETCH: tl.constexpr,
    FILL: tl.constexpr,
):  # fmt: skip
    """What each group of rows has to do.

    Returns:
        ``last`` ``[GROUPS]``, the last position of a group (-1: none there); ``low`` the first key that it sees;
        ``first`` the piece of that key; ``end`` the number of pieces up to and with the group; tiles of a piece.
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
    # Stretches, if none is longer than a program's share, give or take an eighth. (Shares of more than a stretch are
    # all the same, which keeps the sum within 32 bits.)
    BOTH: tl.constexpr = SPLIT * STRETCH
    tiles = tl.full([], SPLIT, tl.int32)
    # A table so short that there is never so much work needs no code for it.
    MOST: tl.constexpr = ROWS // GROUP_ROWS * KV_HEADS * 9
    if FILL * 8 <= MOST or BOTH * FILL * 8 <= MOST * ((LONGEST + TILE - 1) // TILE):
        of_group = _pieces(last, low, TILE)
        share = tl.sum(tl.minimum(of_group, BOTH * FILL), 0) * KV_HEADS * 9
        tiles = tl.where(tl.minimum(tl.max(of_group, 0), BOTH) * (FILL * 8) <= share, BOTH, SPLIT)
    first = tl.where(last >= 0, low // (tiles * TILE), 0)
    return last, low, first, tl.cumsum(_pieces(last, low, tiles * TILE), 0), tiles


@triton.jit
def shares(top, new_top):
    """The largest score of what came before and what comes after, and what each of the two is multiplied by for it."""
    largest = tl.maximum(top, new_top)
    # Two times -inf: a row all of whose scores are -inf so far.
    base = tl.where(largest == float("-inf"), 0.0, largest)
    return largest, tl.exp2(top - base), tl.exp2(new_top - base)


@triton.jit
def merge(top, total, out, new_top, new_total, new_out):
    """What came before and what comes after it, ``out`` of several rows."""
    largest, old, new = shares(top, new_top)
    return largest, total * old + new_total * new, out * old[:, None] + new_out * new[:, None]


@triton.jit
def nothing(ROWS: tl.constexpr, DIM: tl.constexpr):
    """What `merge` begins with."""
    return (
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, DIM], tl.float32),
    )


@triton.jit
def items_of(
    end, tiles, GROUPS: tl.constexpr, KV_HEADS: tl.constexpr, AT_ONCE: tl.constexpr, FILL: tl.constexpr
):  # fmt: skip
    """How pieces are shared out: where there are more than keep FILL programs busy, a program goes from one to the next
    without an end of its loads, up to AT_ONCE tiles.

    Returns:
        ``[GROUPS]``, the number of items up to and with the group, for each key head.
    """
    group = tl.arange(0, GROUPS)
    before = tl.sum(tl.where(group[None, :] + 1 == group[:, None], end[None, :], 0), 1)
    pieces = end - before
    many = tl.minimum(tl.cdiv(tl.max(end, 0) * KV_HEADS, FILL), AT_ONCE // tiles)
    many = tl.maximum(many, 1)
    return tl.cumsum(tl.cdiv(pieces, many), 0)


@triton.jit
def _of(values, here):
    """The value of the one group that is ``here``."""
    return tl.sum(tl.where(here, values, 0), 0)


@triton.jit
def item_of(
    item, last, lows, first, end, ends, sequences, tiles,
    GROUPS: tl.constexpr, KV_HEADS: tl.constexpr, SEQUENCES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What an item of the list is: pieces that follow each other, of one group and key head.

    Returns:
        the slot of its first piece, its key head, group and sequence; its first tile and the one after its last; first
        and last key that the group sees.
    """
    number = item // KV_HEADS
    group = tl.arange(0, GROUPS)
    # The group that an item belongs to, and its number there; items of a group are equally long, but for one piece.
    mine = tl.sum((ends <= number).to(tl.int32), 0)
    here = group == mine
    before, slots_before = tl.max(tl.where(group < mine, ends, 0), 0), tl.max(tl.where(group < mine, end, 0), 0)
    many, number, count = _of(ends, here) - before, number - before, _of(end, here) - slots_before
    piece, end_piece = number * count // many, (number + 1) * count // many
    low, high, offset = _of(lows, here), _of(last, here), _of(first, here)
    sequence = tl.minimum(_of(sequences, here), SEQUENCES - 1)
    end_tile = tl.minimum((offset + end_piece) * tiles, high // TILE + 1)
    return slots_before + piece, item % KV_HEADS, mine, sequence, (offset + piece) * tiles, end_tile, low, high


@triton.jit
def pages_of(pages_at, tile, high, TILE: tl.constexpr, PAGE: tl.constexpr, ITEM_PAGES: tl.constexpr):
    """An item's pages: read at once, before the item's keys. Only for tiles that lie within a page.

    Returns:
        the place of the first in the table's row; numbers of the pages from there on.
    """
    first = tile * TILE // PAGE
    pages = tl.arange(0, ITEM_PAGES)
    if PAGE % TILE == 0:
        pages = tl.load(pages_at + first + pages, mask=first + pages <= high // PAGE, other=0)
    return first, pages


@triton.jit
def over_keys(
    q, position, k_pages_ptr, v_pages_ptr, pages_at, first_page, pages, kv_head, tile, stop, low, high,
    vector_ptr, weight_ptr, slot, within, head, live, tiles,
    DIM: tl.constexpr, DIM_POW2: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP_ROWS: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, STRETCH: tl.constexpr, PAGES: tl.constexpr,
    PAGE: tl.constexpr, ITEM_PAGES: tl.constexpr, SCALE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Query heads ``[BLOCK_M, DIM_POW2]`` over the keys of tiles ``tile`` to ``stop``, which are those of the piece
    with ``slot`` and of the pieces behind it. Leaves of each of them, for the second launch, the largest score, the sum
    of powers and the sum of values of each query head that is ``live``: head ``head`` of row ``within`` of the group.
    """
    # A tile within one page has one address.
    ONE_PAGE: tl.constexpr = PAGE % TILE == 0
    dim = tl.arange(0, DIM_POW2)
    lane = tl.arange(0, TILE)
    # Of the split and of the stretch that a tile is in.
    top, total, out = nothing(BLOCK_M, DIM_POW2)
    all_top, all_total, all_out = nothing(BLOCK_M, DIM_POW2)
    for t in range(tile, stop):
        key = t * TILE + lane
        exists = key <= high
        if WINDOW > 0:
            exists = exists & (key >= low)
        if ONE_PAGE:
            page = tl.sum(tl.where(tl.arange(0, ITEM_PAGES) == t * TILE // PAGE - first_page, pages, 0), 0)
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
        if GROUP_ROWS == 1:
            seen = exists[None, :]
        else:
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
        new_top, new_total, new_out = merge(top, total, out, tile_top, tile_total, tile_out)
        if GROUP_ROWS == 1:
            top, total, out = new_top, new_total, new_out
        else:
            # A tile that only other rows of the group see must leave no trace, not even of a sum with 0.
            there = t * TILE <= position
            if WINDOW > 0:
                there = there & ((t + 1) * TILE > position - (WINDOW - 1))
            top, total = tl.where(there, new_top, top), tl.where(there, new_total, total)
            out = tl.where(there[:, None], new_out, out)
        if ((t + 1) % SPLIT == 0) | (t + 1 == stop):
            all_top, all_total, all_out = merge(all_top, all_total, all_out, top, total, out)
            top, total, out = nothing(BLOCK_M, DIM_POW2)
            if (tiles == SPLIT) | ((t + 1) % (SPLIT * STRETCH) == 0) | (t + 1 == stop):
                place = (slot * GROUP_ROWS + within).to(tl.int64) * HEADS + head
                written = live[:, None] & (dim < DIM)[None, :]
                tl.store(vector_ptr + place[:, None] * DIM + dim[None, :], all_out, mask=written)
                tl.store(weight_ptr + place * 2, all_top, mask=live)
                tl.store(weight_ptr + place * 2 + 1, all_total, mask=live)
                all_top, all_total, all_out = nothing(BLOCK_M, DIM_POW2)
                slot += 1


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
    SPLIT: tl.constexpr,
    STRETCH: tl.constexpr,
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
        position_ptr, ROWS, GROUP_ROWS, GROUPS, KV_HEADS, LONGEST, WINDOW, TILE, SPLIT, STRETCH, FILL
    )
    group = tl.arange(0, GROUPS)
    sequences = tl.full([GROUPS], 0, tl.int32)
    for r in tl.static_range(GROUP_ROWS):
        of_group = group * GROUP_ROWS + r
        sequences = tl.maximum(sequences, tl.load(sequence_ptr + of_group, mask=of_group < ROWS, other=0))
    ends = items_of(end, tiles, GROUPS, KV_HEADS, AT_ONCE, FILL)
    items = tl.max(ends, 0) * KV_HEADS
    SHARE: tl.constexpr = HEADS // KV_HEADS
    m = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM_POW2)
    for item in range(tl.program_id(0), items, PROGRAMS):
        slot, kv_head, mine, sequence, tile, stop, low, high = item_of(
            item, last, lows, first, end, ends, sequences, tiles, GROUPS, KV_HEADS, SEQUENCES, TILE
        )
        pages_at = table_ptr + sequence * (LONGEST // PAGE)
        first_page, pages = pages_of(pages_at, tile, high, TILE, PAGE, ITEM_PAGES)
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
            q, position, k_pages_ptr, v_pages_ptr, pages_at, first_page, pages, kv_head, tile, stop, low, high,
            vector_ptr, weight_ptr, slot, m // SHARE, head, live, tiles,
            DIM, DIM_POW2, HEADS, KV_HEADS, GROUP_ROWS, WINDOW, TILE, SPLIT, STRETCH, PAGES, PAGE, ITEM_PAGES, SCALE,
            BLOCK_M,
        )  # fmt: skip
    if PDL:
        gdc_wait()  # also without work: when this launch has ended, so have all before it
