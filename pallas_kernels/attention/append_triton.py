"""Append and the first launch of attention in one, for rows that are each a sequence of their own.

Every program computes its rows' queries itself. The program that has a row's last keys writes the new key and value
into the pages and reads them there, after a barrier: no other program reads that place, and keys stay plain loads that
a pipeline holds in flight, which a select between them and the product would end. docs/kernels-decode.md has more.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..kv_append.triton import heads_of_row, page_of, tables_of
from ..waiting import pause
from .triton import item_of, items_of, over_keys, pages_of, work_of


@triton.jit
def append_attend(
    qkv_ptr,
    q_gain_ptr,
    k_gain_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    sequence_ptr,
    table_ptr,
    k_pages_ptr,
    v_pages_ptr,
    vector_ptr,
    weight_ptr,
    ROWS: tl.constexpr,
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
    POSITIONS: tl.constexpr,
    NORM: tl.constexpr,
    NORM_CHUNK: tl.constexpr,
    EPS: tl.constexpr,
    CLIP: tl.constexpr,
    LINGER: tl.constexpr,
):
    """See `attention.specs.decode_attention_specs` for the arguments."""
    if PDL:
        gdc_launch_dependents()
    last, lows, first, end, tiles = work_of(
        position_ptr, ROWS, 1, GROUPS, KV_HEADS, LONGEST, WINDOW, TILE, SPLIT, STRETCH, FILL
    )
    group = tl.arange(0, GROUPS)
    sequences = tl.load(sequence_ptr + group, mask=group < ROWS, other=0)
    positions = tl.load(position_ptr + group, mask=group < ROWS, other=0)
    ends = items_of(end, tiles, GROUPS, KV_HEADS, AT_ONCE, FILL)
    items = tl.max(ends, 0) * KV_HEADS
    SHARE: tl.constexpr = HEADS // KV_HEADS
    dtype = qkv_ptr.dtype.element_ty
    m = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM_POW2)
    for item in range(tl.program_id(0), items, PROGRAMS):
        slot, kv_head, row, sequence, tile, stop, low, high = item_of(
            item, last, lows, first, end, ends, tl.maximum(sequences, 0), tiles,
            GROUPS, KV_HEADS, SEQUENCES, TILE,
        )  # fmt: skip
        pages_at = table_ptr + sequence * (LONGEST // PAGE)
        first_page, pages = pages_of(pages_at, tile, high, TILE, PAGE, ITEM_PAGES)
        # As they are given, unlike `sequence` and `high`.
        position = tl.sum(tl.where(group == row, positions, 0), 0)
        given = tl.sum(tl.where(group == row, sequences, 0), 0)
        turned = position < POSITIONS
        is_last = stop * TILE > high
        page, mapped = page_of(table_ptr, position, given, is_last & turned, PAGE, PAGES, LONGEST // PAGE, SEQUENCES)
        # The queries of a key head, its key, its value.
        is_query = m < SHARE
        head = kv_head * SHARE + m
        of_row = tl.where(is_query, head, HEADS + (m - SHARE) * KV_HEADS + kv_head)
        tables = tables_of(
            q_gain_ptr, k_gain_ptr, cos_ptr, sin_ptr, of_row, m < SHARE + 2, tl.where(turned, position, 0),
            HEADS, KV_HEADS, DIM, DIM_POW2, NORM,
        )  # fmt: skip
        if PDL:
            gdc_wait()
        value = heads_of_row(
            qkv_ptr + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM), tables, of_row, m < SHARE + 2,
            HEADS, KV_HEADS, DIM, DIM_POW2, NORM, NORM_CHUNK, EPS, CLIP,
        ).to(dtype)  # fmt: skip
        within = (page.to(tl.int64) * KV_HEADS + kv_head) * (PAGE * DIM) + (position % PAGE) * DIM
        within += tl.zeros_like(m)[:, None] + dim[None, :]
        inside = (dim < DIM)[None, :]
        new = tl.where(mapped, SHARE, BLOCK_M)
        tl.store(k_pages_ptr + within, value, mask=inside & (m == new)[:, None])
        tl.store(v_pages_ptr + within, value, mask=inside & (m == new + 1)[:, None])
        q = tl.where(turned, tl.where(is_query[:, None], value, 0.0), 0.0).to(dtype)
        # The new key and value are there for every thread that copies keys.
        tl.debug_barrier()
        over_keys(
            q, tl.where(is_query, high, -1), k_pages_ptr, v_pages_ptr, pages_at, first_page, pages, kv_head, tile, stop,
            low, high, vector_ptr, weight_ptr, slot, tl.zeros_like(m), head, is_query, tiles,
            DIM, DIM_POW2, HEADS, KV_HEADS, 1, WINDOW, TILE, SPLIT, STRETCH, PAGES, PAGE, ITEM_PAGES, SCALE, BLOCK_M,
        )  # fmt: skip
    if PDL:
        gdc_wait()  # also without work: when this launch has ended, so have all before it
    if LINGER > 0 and tl.program_id(0) >= items:
        pause(LINGER)
