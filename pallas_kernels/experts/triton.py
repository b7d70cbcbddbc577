"""Gate-up, activation, down and the sum over a row's experts for 1 to 64 rows, in one launch.

Weights are the M operand, rows of the batch the N operand, and every output element is reduced over its
whole K by one program in ascending order: a row's bits depend on (H, I, dtype) and on nothing else.

Programs are numbered so that a block's down tiles come after its gate-up tiles, ``LAG`` blocks later; a
down tile waits for its block's gate-up tiles by an arrival count. Programs start in the order of their
number, so whatever one waits for is already running. docs/kernels.md has the reasoning and the figures.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..plan.triton import find_block


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
def _tile(
    w_ptr,
    w_row,
    w_live,
    v_ptr,
    v_row,
    v_live,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_M: tl.constexpr,
):
    """``w[w_row] @ v[v_row].T``, ``[BLOCK_M, BLOCK_N]`` in f32, K in ascending order."""
    k = tl.arange(0, BLOCK_K)
    w_at = w_ptr + w_row[:, None] * K + k[None, :]
    v_at = v_ptr + v_row[:, None] * K + k[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            if EVEN_M:
                w = tl.load(w_at, eviction_policy="evict_first")
            else:
                w = tl.load(w_at, mask=w_live[:, None], other=0.0, eviction_policy="evict_first")
            v = tl.load(v_at, mask=v_live[:, None], other=0.0)
        else:
            inside = (start + k) < K
            w = tl.load(w_at, mask=w_live[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
            v = tl.load(v_at, mask=v_live[:, None] & inside[None, :], other=0.0)
        total = tl.dot(w, tl.trans(v), total, input_precision="ieee")
        w_at += BLOCK_K
        v_at += BLOCK_K
    return total


@triton.jit
def _prefetch(ptr, rows, ROW_BYTES: tl.constexpr, BYTES: tl.constexpr):
    """Ask for the first BYTES of some rows to be brought into L2. A hint: no value is read."""
    at = ptr.to(tl.int64) + rows.to(tl.int64) * ROW_BYTES
    size = tl.full(rows.shape, BYTES, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [at, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def expert_ffn(
    x_ptr,
    ids_ptr,
    scale_ptr,
    weight_row_ptr,
    gate_up_ptr,
    gate_up_bias_ptr,
    down_ptr,
    down_bias_ptr,
    residual_ptr,
    inner_ptr,
    pair_ptr,
    arrivals_ptr,
    out_ptr,
    TOKENS: tl.constexpr,
    TOKENS_POW2: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_POW2: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
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
    LAG: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """See `experts.specs.expert_ffn_spec` for the arguments."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ROWS: tl.constexpr = 2 * INNER if GATED else INNER
    GATE_TILES: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    DOWN_TILES: tl.constexpr = (HIDDEN + BLOCK_M - 1) // BLOCK_M
    BOTH: tl.constexpr = GATE_TILES + DOWN_TILES
    # Program number -> gate-up or down, block, tile: LAG blocks of gate-up, then down of block i beside
    # gate-up of block i + LAG, then the last LAG blocks of down.
    program = tl.program_id(0)
    HEAD: tl.constexpr = LAG * GATE_TILES
    MIDDLE: tl.constexpr = (BLOCKS - LAG) * BOTH
    step = program - HEAD
    tail = step - MIDDLE
    in_head = step < 0
    in_tail = tail >= 0
    is_gate = in_head | ((tail < 0) & (step % BOTH >= DOWN_TILES))
    block = tl.where(in_head, program // GATE_TILES, step // BOTH + tl.where(is_gate, LAG, 0))
    block = tl.where(in_tail, BLOCKS - LAG + tail // DOWN_TILES, block)
    tile = tl.where(in_head, program % GATE_TILES, step % BOTH - tl.where(is_gate, DOWN_TILES, 0))
    tile = tl.where(in_tail, tail % DOWN_TILES, tile)

    expert, pair = find_block(
        ids_ptr, block, TOKENS * TOP_K, PAIRS_POW2, EXPERTS, EXPERTS_POW2, BLOCK_N, TOKENS > 1
    )
    used = expert < EXPERTS
    live = pair >= 0
    token = tl.where(live, pair, 0) // TOP_K
    lane = tl.arange(0, BLOCK_M)
    if is_gate:
        if used:
            row = (tl.load(weight_row_ptr + expert) if INDIRECT else expert).to(tl.int64)
            weights = gate_up_ptr + row * (ROWS * HIDDEN)
            if GATED:
                # Gate rows and up rows by eights: a matrix unit's thread then holds both of a pair.
                unit = tile * (BLOCK_M // 2) + (lane // 16) * 8 + lane % 8
                is_up = (lane // 8) % 2
                at = is_up * INNER + unit if HALVES else 2 * unit + is_up
                inside = unit < INNER
            else:
                at = tile * BLOCK_M + lane
                inside = at < INNER
            total = _tile(
                weights, at, inside, x_ptr, token, live, HIDDEN, BLOCK_M, BLOCK_N, BLOCK_K, ROWS % BLOCK_M == 0
            )
            if GATE_UP_BIAS:
                bias = tl.load(gate_up_bias_ptr + row * ROWS + at, mask=inside, other=0.0)
                total += bias.to(tl.float32)[:, None]
            if GATED:
                pairs = total.reshape(BLOCK_M // 16, 2, 8, BLOCK_N).permute(0, 2, 3, 1)
                gate, up = pairs.split()
                value = _activate(gate, up, ACTIVATION, LIMIT, LIMIT_AFTER, ALPHA).reshape(BLOCK_M // 2, BLOCK_N)
                unit = tile * (BLOCK_M // 2) + tl.arange(0, BLOCK_M // 2)
            else:
                value = tl.maximum(total, 0.0)
                value = value * value
                unit = at
            tl.store(
                inner_ptr + tl.where(live, pair, 0)[None, :] * INNER + unit[:, None],
                value.to(inner_ptr.dtype.element_ty),
                mask=live[None, :] & (unit < INNER)[:, None],
            )
            tl.debug_barrier()
            tl.atomic_add(arrivals_ptr + block, 1, sem="release")
    else:
        at = tile * BLOCK_M + lane
        inside = at < HIDDEN
        rank = tl.arange(0, TOP_K_POW2)
        if block == 0:
            # Rows without any expert are nobody's last arrival: they are written here.
            t = tl.arange(0, TOKENS_POW2)
            ids = tl.load(
                ids_ptr + t[:, None] * TOP_K + rank[None, :],
                mask=(t < TOKENS)[:, None] & (rank < TOP_K)[None, :],
                other=-1,
            )
            present = tl.sum(((ids >= 0) & (ids < EXPERTS)).to(tl.int32), 1)
            alone = (present == 0) & (t < TOKENS)
            if tl.max(alone.to(tl.int32), 0) > 0:
                where = t[None, :] * HIDDEN + at[:, None]
                mask = alone[None, :] & inside[:, None]
                value = tl.zeros([BLOCK_M, TOKENS_POW2], tl.float32)
                if RESIDUAL:
                    value += tl.load(residual_ptr + where, mask=mask, other=0.0).to(tl.float32)
                tl.store(out_ptr + where, value.to(out_ptr.dtype.element_ty), mask=mask)
        if used:
            row = (tl.load(weight_row_ptr + expert) if INDIRECT else expert).to(tl.int64)
            weights = down_ptr + row * (HIDDEN * INNER)
            if PREFETCH > 0:
                ITEM: tl.constexpr = down_ptr.dtype.element_ty.primitive_bitwidth // 8
                last = tl.minimum(at, HIDDEN - 1)
                _prefetch(weights, last, INNER * ITEM, PREFETCH * ITEM)
            ids = tl.load(
                ids_ptr + token[:, None] * TOP_K + rank[None, :], mask=(rank < TOP_K)[None, :], other=-1
            )
            present = tl.sum(((ids >= 0) & (ids < EXPERTS)).to(tl.int32), 1)
            # Low half: gate-up tiles done. High half: down tiles done.
            arrived = tl.atomic_add(arrivals_ptr + block, 0, sem="acquire")
            while (arrived & 0xFFFF) < GATE_TILES:
                arrived = tl.atomic_add(arrivals_ptr + block, 0, sem="acquire")
            total = _tile(
                weights,
                at,
                inside,
                inner_ptr,
                tl.where(live, pair, 0),
                live,
                INNER,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                HIDDEN % BLOCK_M == 0,
            )
            if DOWN_BIAS:
                bias = tl.load(down_bias_ptr + row * HIDDEN + at, mask=inside, other=0.0)
                total += bias.to(tl.float32)[:, None]
            tl.store(
                pair_ptr + tl.where(live, pair, 0)[None, :] * HIDDEN + at[:, None],
                total,
                mask=live[None, :] & inside[:, None],
            )
            tl.debug_barrier()
            counter = arrivals_ptr + BLOCKS + token * DOWN_TILES + tile
            before = tl.atomic_add(counter, 1, mask=live, sem="acq_rel")
            ready = live & (before == present - 1)
            if tl.max(ready.to(tl.int32), 0) > 0:
                tl.debug_barrier()
                mask = ready[None, :] & inside[:, None]
                summed = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                for r in tl.static_range(TOP_K):
                    other = tl.load(ids_ptr + token * TOP_K + r)
                    exists = ready & (other >= 0) & (other < EXPERTS)
                    scale = tl.load(scale_ptr + token * TOP_K + r, mask=exists, other=0.0)
                    vector = tl.load(
                        pair_ptr + (token * TOP_K + r)[None, :] * HIDDEN + at[:, None],
                        mask=mask & exists[None, :],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    summed += scale[None, :] * vector
                where = token[None, :] * HIDDEN + at[:, None]
                if RESIDUAL:
                    summed += tl.load(residual_ptr + where, mask=mask, other=0.0).to(tl.float32)
                tl.store(out_ptr + where, summed.to(out_ptr.dtype.element_ty), mask=mask)
                tl.store(counter, 0, mask=ready)
            done = tl.atomic_add(arrivals_ptr + block, 0x10000, sem="acq_rel")
            if done == (DOWN_TILES - 1) * 0x10000 + GATE_TILES:
                tl.store(arrivals_ptr + block, 0)
