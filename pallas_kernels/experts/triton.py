"""Gate-up, activation, down and the sum over a row's experts for 1 to 64 rows, in one launch.

Weights are the M operand, rows of the batch the N operand, and every output element is reduced over K in
ascending order, in parts of one size: a row's bits depend on (H, I, dtype) and on nothing else.

Tiles are numbered so that a block's down tiles come after its gate-up tiles, ``LAG`` blocks later; a down
tile waits for its block's gate-up tiles by an arrival count. Tiles are taken in the order of their number
(programs claim them; for one row, whose tiles are few, program p is tile p), so whatever a tile waits for
has been taken by a program that runs. docs/kernels.md has the reasoning and the figures.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..waiting import pause


@triton.jit
def _activate(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, LIMIT_AFTER: tl.constexpr, ALPHA: tl.constexpr):
    """`grouped_moe.activate` on f32 values; LIMIT 0 means none."""
    if ACTIVATION == "gpt_oss_swiglu":
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return gate * tl.sigmoid(ALPHA * gate) * (up + 1.0)
    if ACTIVATION == "geglu_tanh":
        # gelu_tanh(g) = g * (1 + tanh(z)) / 2 = g * sigmoid(2 z)
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(2.0 * inner) * up
    if ACTIVATION == "geglu_erf":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    if LIMIT > 0:
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        if not LIMIT_AFTER:
            gate = tl.minimum(gate, LIMIT)
    value = gate * tl.sigmoid(gate)
    if LIMIT > 0 and LIMIT_AFTER:
        value = tl.minimum(value, LIMIT)
    return value * up


@triton.jit
def multiply_add(w, v, total):
    """``total + w @ v.T``. In f32 the products of a step are summed by themselves, as libraries do: one long chain of
    additions loses several bits more. Triton makes one chain of a sum, not of a difference.
    """
    if w.dtype == tl.float32:
        return total - tl.dot(-w, tl.trans(v), input_precision="ieee")
    else:
        return tl.dot(w, tl.trans(v), total)


@triton.jit
def _tile(
    w_ptr,
    w_row,
    w_live,
    v_ptr,
    v_row,
    v_live,
    first,
    K: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_M: tl.constexpr,
):
    """``w[w_row] @ v[v_row].T`` over PART of K, from ``first`` on, ascending; ``[BLOCK_M, BLOCK_N]`` in f32."""
    k = first + tl.arange(0, BLOCK_K)
    w_at = w_ptr + w_row[:, None] * K + k[None, :]
    v_at = v_ptr + v_row[:, None] * K + k[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, PART, BLOCK_K):
        if K % PART == 0 and PART % BLOCK_K == 0:
            if EVEN_M:
                w = tl.load(w_at, eviction_policy="evict_first")
            else:
                w = tl.load(w_at, mask=w_live[:, None], other=0.0, eviction_policy="evict_first")
            v = tl.load(v_at, mask=v_live[:, None], other=0.0)
        else:
            inside = (start + k) < K
            w = tl.load(w_at, mask=w_live[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
            v = tl.load(v_at, mask=v_live[:, None] & inside[None, :], other=0.0)
        total = multiply_add(w, v, total)
        w_at += BLOCK_K
        v_at += BLOCK_K
    return total


@triton.jit
def gate_lines(line, tile, INNER: tl.constexpr, GATED: tl.constexpr, HALVES: tl.constexpr, LINES: tl.constexpr):
    """Rows of a gate-up matrix for the lines of a tile, and whether they are in it: LINES of them are."""
    if GATED:
        # Gate rows and up rows by eights: a matrix unit's thread then holds both of a pair.
        local = (line // 16) * 8 + line % 8
        unit = tile * (LINES // 2) + local
        is_up = (line // 8) % 2
        at = is_up * INNER + unit if HALVES else 2 * unit + is_up
        return at, (unit < INNER) & (local < LINES // 2)
    else:
        at = tile * LINES + line
        return at, (at < INNER) & (line < LINES)


@triton.jit
def gate_up_tile(
    x_ptr,
    gate_up_ptr,
    gate_up_bias_ptr,
    inner_ptr,
    stack_row,
    tile,
    token,
    pair,
    live,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HALVES: tl.constexpr,
    LIMIT: tl.constexpr,
    LIMIT_AFTER: tl.constexpr,
    ALPHA: tl.constexpr,
    GATE_UP_BIAS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """LINES gate and up rows of the expert at ``stack_row`` (int64) on some pairs: activated, into ``inner``.

    The matrix unit takes BLOCK_M of them; what is over is not read.
    """
    ROWS: tl.constexpr = 2 * INNER if GATED else INNER
    at, inside = gate_lines(tl.arange(0, BLOCK_M), tile, INNER, GATED, HALVES, LINES)
    total = _tile(
        gate_up_ptr + stack_row * (ROWS * HIDDEN), at, inside, x_ptr, token, live, 0, HIDDEN, HIDDEN,
        BLOCK_M, BLOCK_N, BLOCK_K, LINES == BLOCK_M and ROWS % BLOCK_M == 0,
    )  # fmt: skip
    if GATE_UP_BIAS:
        bias = tl.load(gate_up_bias_ptr + stack_row * ROWS + at, mask=inside, other=0.0)
        total += bias.to(tl.float32)[:, None]
    if GATED:
        gate, up = total.reshape(BLOCK_M // 16, 2, 8, BLOCK_N).permute(0, 2, 3, 1).split()
        value = _activate(gate, up, ACTIVATION, LIMIT, LIMIT_AFTER, ALPHA).reshape(BLOCK_M // 2, BLOCK_N)
        local = tl.arange(0, BLOCK_M // 2)
        unit = tile * (LINES // 2) + local
        written = (unit < INNER) & (local < LINES // 2)
    else:
        value = tl.maximum(total, 0.0)
        value = value * value
        unit = at
        written = inside
    tl.store(
        inner_ptr + pair[None, :] * INNER + unit[:, None],
        value.to(inner_ptr.dtype.element_ty),
        mask=live[None, :] & written[:, None],
    )


@triton.jit
def expert_ffn(
    x_ptr,
    ids_ptr,
    scale_ptr,
    weight_row_ptr,
    used_ptr,
    block_row_ptr,
    block_pair_ptr,
    gate_up_ptr,
    gate_up_bias_ptr,
    down_ptr,
    down_bias_ptr,
    residual_ptr,
    state_ptr,
    inner_ptr,
    pair_ptr,
    out_ptr,
    TOKENS: tl.constexpr,
    TOKENS_POW2: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_POW2: tl.constexpr,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    BLOCKS: tl.constexpr,
    INDIRECT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HALVES: tl.constexpr,
    LIMIT: tl.constexpr,
    LIMIT_AFTER: tl.constexpr,
    ALPHA: tl.constexpr,
    GATE_UP_BIAS: tl.constexpr,
    DOWN_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    LAG: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BACKOFF: tl.constexpr,
    SPREAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """See `experts.specs.expert_ffn_spec` for the arguments."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    ROWS: tl.constexpr = 2 * INNER if GATED else INNER
    GATE_TILES: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    COLUMNS: tl.constexpr = (HIDDEN + BLOCK_M - 1) // BLOCK_M
    DOWN_TILES: tl.constexpr = COLUMNS * SPLIT
    # A down tile reduces one of SPLIT parts of I; the parts of a pair are added in order.
    PART: tl.constexpr = (INNER + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    BOTH: tl.constexpr = GATE_TILES + DOWN_TILES
    # State: the next tile; per block, gate-up tiles done and (in the high half) down tiles done; per row
    # and BLOCK_M columns, parts of pairs done.
    block_state_ptr = state_ptr + 1
    row_state_ptr = block_state_ptr + BLOCKS * SPREAD
    lane = tl.arange(0, BLOCK_M)
    rank = tl.arange(0, TOP_K_POW2)
    slot = tl.arange(0, BLOCK_N)
    if TOKENS == 1:
        item = tl.program_id(0)
        used_blocks = BLOCKS
    else:
        item = tl.atomic_add(state_ptr, 1, sem="relaxed")
        used_blocks = tl.load(used_ptr)
    items = used_blocks * BOTH
    lag = tl.minimum(used_blocks, LAG)
    while item < items:
        # Tile number -> gate-up or down, block, tile: LAG blocks of gate-up, then down of block i beside
        # gate-up of block i + LAG, then the last LAG blocks of down.
        step = item - lag * GATE_TILES
        tail = step - (used_blocks - lag) * BOTH
        in_head = step < 0
        in_tail = tail >= 0
        is_gate = in_head | ((tail < 0) & (step % BOTH >= DOWN_TILES))
        block = tl.where(in_head, item // GATE_TILES, step // BOTH + tl.where(is_gate, lag, 0))
        block = tl.where(in_tail, used_blocks - lag + tail // DOWN_TILES, block)
        tile = tl.where(in_head, item % GATE_TILES, step % BOTH - tl.where(is_gate, DOWN_TILES, 0))
        tile = tl.where(in_tail, tail % DOWN_TILES, tile)

        if TOKENS == 1:
            # A single row has no expert in common with itself: each pair is a block, and needs no plan.
            row = tl.load(ids_ptr + block)
            row = tl.where(row < EXPERTS, row, -1)
            if INDIRECT:
                row = tl.load(weight_row_ptr + row, mask=row >= 0, other=-1)
            pair = tl.where(slot == 0, block, -1)
            item = items
        else:
            row = tl.load(block_row_ptr + block)
            pair = tl.load(block_pair_ptr + block * BLOCK_N + slot)
            item = tl.atomic_add(state_ptr, 1, sem="relaxed")
        live = pair >= 0
        pair = tl.where(live, pair, 0)
        token = pair // TOP_K
        if row >= 0:
            stack_row = row.to(tl.int64)
            if is_gate:
                gate_up_tile(
                    x_ptr, gate_up_ptr, gate_up_bias_ptr, inner_ptr, stack_row, tile, token, pair, live,
                    HIDDEN, INNER, ACTIVATION, GATED, HALVES, LIMIT, LIMIT_AFTER, ALPHA, GATE_UP_BIAS,
                    BLOCK_M, BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
                tl.debug_barrier()
                tl.atomic_add(block_state_ptr + block * SPREAD, 1, sem="release")
            else:
                weights = down_ptr + stack_row * (HIDDEN * INNER)
                column = tile // SPLIT
                part = tile % SPLIT
                at = column * BLOCK_M + lane
                inside = at < HIDDEN
                # Everything the sum below needs beside the vectors is read before the wait.
                of_row = token[:, None] * TOP_K + rank[None, :]
                exists = (rank < TOP_K)[None, :] & live[:, None]
                ids = tl.load(ids_ptr + of_row, mask=exists, other=-1)
                exists = (ids >= 0) & (ids < EXPERTS)
                scales = tl.load(scale_ptr + of_row, mask=exists, other=0.0)
                present = tl.sum(exists.to(tl.int32), 1)
                arrived = tl.atomic_add(block_state_ptr + block * SPREAD, 0, sem="relaxed")
                while (arrived & 0xFFFF) < GATE_TILES:
                    if BACKOFF > 0:
                        pause(BACKOFF)
                    arrived = tl.atomic_add(block_state_ptr + block * SPREAD, 0, sem="relaxed")
                # Triton makes a load of an addition of 0 and 3.6 drops one whose value is not used, and the order of
                # memory with it: so the reads below depend on the value.
                arrived = tl.atomic_add(block_state_ptr + block * SPREAD, 0, sem="acquire")
                tl.debug_barrier()
                ready = tl.where(live, arrived & 0xFFFF, 0) >= GATE_TILES
                total = _tile(
                    weights, at, inside, inner_ptr, pair, ready, part * PART, INNER, PART,
                    BLOCK_M, BLOCK_N, BLOCK_K, HIDDEN % BLOCK_M == 0,
                )  # fmt: skip
                if DOWN_BIAS:
                    bias = tl.load(down_bias_ptr + stack_row * HIDDEN + at, mask=inside, other=0.0)
                    total += tl.where(part == 0, bias.to(tl.float32), 0.0)[:, None]
                tl.store(
                    pair_ptr + (pair * SPLIT + part)[None, :] * HIDDEN + at[:, None],
                    total,
                    mask=live[None, :] & inside[:, None],
                )
                tl.debug_barrier()
                # One trip for both counts: the row's, and (first lane) the block's.
                row_count = row_state_ptr + token * COLUMNS + column
                first = slot == 0
                counted = tl.atomic_add(
                    tl.join(row_count, tl.where(first, block_state_ptr + block * SPREAD, block_state_ptr)),
                    tl.join(tl.full([BLOCK_N], 1, tl.int32), tl.full([BLOCK_N], 0x10000, tl.int32)),
                    mask=tl.join(live, first),
                    sem="acq_rel",
                )
                in_row, in_block = counted.split()
                last = live & (in_row == present * SPLIT - 1)
                if tl.max(last.to(tl.int32), 0) > 0:
                    tl.debug_barrier()
                    mask = last[None, :] & inside[:, None]
                    summed = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                    for r in tl.range(0, TOP_K, loop_unroll_factor=4):
                        is_rank = (rank == r)[None, :]
                        scale = tl.sum(tl.where(is_rank, scales, 0.0), 1)
                        there = tl.max((is_rank & exists).to(tl.int32), 1) > 0
                        vector = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                        for p in tl.static_range(SPLIT):
                            vector += tl.load(
                                pair_ptr + ((token * TOP_K + r) * SPLIT + p)[None, :] * HIDDEN + at[:, None],
                                mask=mask & there[None, :],
                                other=0.0,
                                cache_modifier=".cg",
                            )
                        summed += scale[None, :] * vector
                    where = token[None, :] * HIDDEN + at[:, None]
                    if RESIDUAL:
                        summed += tl.load(residual_ptr + where, mask=mask, other=0.0).to(tl.float32)
                    tl.store(out_ptr + where, summed.to(out_ptr.dtype.element_ty), mask=mask)
                    tl.store(row_count, 0, mask=last)
                # The last down tile of a block has seen all others pass their wait.
                whole = first & (in_block == (DOWN_TILES - 1) * 0x10000 + GATE_TILES)
                tl.store(tl.where(first, block_state_ptr + block * SPREAD, block_state_ptr), 0, mask=whole)

    if TOKENS > 1:
        # Every program claims one tile too many; the last to do so leaves the count as it was.
        if item == items + PROGRAMS - 1:
            tl.store(state_ptr, 0)
    if tl.program_id(0) < COLUMNS:
        # Rows without any expert are nobody's last arrival: they are written here.
        at = tl.program_id(0) * BLOCK_M + lane
        t = tl.arange(0, TOKENS_POW2)
        ids = tl.load(
            ids_ptr + t[:, None] * TOP_K + rank[None, :],
            mask=(t < TOKENS)[:, None] & (rank < TOP_K)[None, :],
            other=-1,
        )
        present = tl.sum(((ids >= 0) & (ids < EXPERTS)).to(tl.int32), 1)
        alone = (present == 0) & (t < TOKENS)
        if tl.max(alone.to(tl.int32), 0) > 0:
            for i in range(0, TOKENS):
                if tl.max((alone & (t == i)).to(tl.int32), 0) > 0:
                    value = tl.zeros([BLOCK_M], tl.float32)
                    if RESIDUAL:
                        value += tl.load(residual_ptr + i * HIDDEN + at, mask=at < HIDDEN, other=0.0).to(tl.float32)
                    tl.store(out_ptr + i * HIDDEN + at, value.to(out_ptr.dtype.element_ty), mask=at < HIDDEN)
