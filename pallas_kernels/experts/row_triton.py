"""The expert block of one row, where its experts' down weights fit shared memory and registers of the device.

Programs first share the gate-up tiles. Each then asks for its own weights of the down product, 16 outputs of every
expert, and only after that waits for all gate-up tiles: memory goes on streaming while the activations are handed over.
A warp has one expert, so that a program holds the vectors of all of a token's pairs and adds them without another
handover. docs/kernels.md has the reasoning and the figures.

Sums have the order of `triton.expert_ffn`: every output ascending over the whole reduction, pairs in rank order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import heuristics
from .triton import gate_up_tile, multiply_add, pause

PAIRS = tl.constexpr(heuristics.PAIRS)


@triton.jit
def _columns(values, N: tl.constexpr):
    """The eight columns of ``[N, 8]``."""
    even, odd = values.reshape(N, 4, 2).split()
    e, f = even.reshape(N, 2, 2).split()
    g, h = odd.reshape(N, 2, 2).split()
    v0, v4 = e.split()
    v2, v6 = f.split()
    v1, v5 = g.split()
    v3, v7 = h.split()
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def _add(count_ptr, amount, THREADS: tl.constexpr):
    """Add to a count; `_before` gives what it was, and only there is it waited for.

    All threads would wait at once for a scalar addition, and a warp for one whose address its threads have in common.
    """
    thread = tl.arange(0, THREADS)
    return tl.atomic_add(count_ptr + thread, thread * 0 + amount, mask=thread == 0, sem="relaxed")


@triton.jit
def _before(added, THREADS: tl.constexpr):
    return tl.max(tl.where(tl.arange(0, THREADS) == 0, added, 0), 0)


@triton.jit
def expert_ffn_row(
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
    out_ptr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
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
    GATE_LINES: tl.constexpr,
    GATE_M: tl.constexpr,
    GATE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HELD: tl.constexpr,
    LATE: tl.constexpr,
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
    GATE_TILES: tl.constexpr = TOP_K * ((ROWS + GATE_LINES - 1) // GATE_LINES)
    STEPS: tl.constexpr = (INNER + BLOCK_K - 1) // BLOCK_K
    # State: the next gate-up tile; gate-up tiles done and (in the high half) programs that have seen all of them.
    done_ptr = state_ptr + SPREAD
    THREADS: tl.constexpr = 32 * PAIRS
    rank = tl.arange(0, PAIRS)
    chosen = tl.load(ids_ptr + rank, mask=rank < TOP_K, other=-1)
    # Line i of the down product: output i % BLOCK_M of the program, by the expert of pair i // BLOCK_M.
    line = tl.arange(0, PAIRS * BLOCK_M)
    own = line // BLOCK_M
    at = tl.program_id(0) * BLOCK_M + line % BLOCK_M
    inside = at < HIDDEN
    row = tl.load(ids_ptr + own, mask=own < TOP_K, other=-1)
    added = _add(state_ptr, 1, THREADS)
    chosen = tl.where(chosen < EXPERTS, chosen, -1)
    row = tl.where(row < EXPERTS, row, -1)
    scale = tl.load(scale_ptr + own, mask=row >= 0, other=0.0)
    if INDIRECT:
        chosen = tl.load(weight_row_ptr + chosen, mask=chosen >= 0, other=-1)
        row = tl.load(weight_row_ptr + row, mask=row >= 0, other=-1)
    exists = inside & (row >= 0)
    stack = tl.where(exists, row, 0).to(tl.int64)
    # Every program claims one tile too many; the last to do so leaves the count as it was.
    item = _before(added, THREADS)
    while item < GATE_TILES:
        added = _add(state_ptr, 1, THREADS)
        block = item // (GATE_TILES // TOP_K)
        tile = item % (GATE_TILES // TOP_K)
        stack_row = tl.max(tl.where(rank == block, chosen, -1), 0)
        if stack_row >= 0:
            gate_up_tile(
                x_ptr, gate_up_ptr, gate_up_bias_ptr, inner_ptr, tl.cast(stack_row, tl.int64), tile,
                rank * 0, rank * 0 + block, rank == 0,
                HIDDEN, INNER, ACTIVATION, GATED, HALVES, LIMIT, LIMIT_AFTER, ALPHA, GATE_UP_BIAS,
                GATE_LINES, GATE_M, PAIRS, GATE_K,
            )  # fmt: skip
        tl.debug_barrier()
        tl.atomic_add(done_ptr, 1, sem="release")
        item = _before(added, THREADS)
    if item == GATE_TILES + PROGRAMS - 1:
        tl.store(state_ptr, 0)

    k = tl.arange(0, BLOCK_K)
    w_at = down_ptr + (stack * (HIDDEN * INNER) + at * INNER)[:, None] + k[None, :]
    ws = ()
    for i in tl.static_range(HELD):
        w_mask = exists[:, None] & (i * BLOCK_K + k < INNER)[None, :]
        w = tl.load(w_at + i * BLOCK_K, mask=w_mask, other=0.0, eviction_policy="evict_first")
        ws = ws + (w,)  # noqa: RUF005 (Triton knows no starred element)
    output = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    bias = 0.0
    residual = 0.0
    if RESIDUAL:
        residual = tl.load(residual_ptr + output, mask=output < HIDDEN, other=0.0).to(tl.float32)
    if DOWN_BIAS:
        bias = tl.load(down_bias_ptr + stack * HIDDEN + at, mask=exists, other=0.0).to(tl.float32)
    # Nothing is left in L1 that an acquire at every look could throw away. What is read below depends on its value:
    # Triton makes loads of additions of 0, and 3.6 dropped those that nothing used.
    arrived = tl.atomic_add(done_ptr, 0, sem="acquire")
    while (arrived & 0xFFFF) < GATE_TILES:
        if BACKOFF > 0:
            pause(BACKOFF)
        arrived = tl.atomic_add(done_ptr, 0, sem="acquire")
    tl.debug_barrier()
    added = _add(done_ptr, 0x10000, THREADS)
    complete = (arrived & 0xFFFF) >= GATE_TILES
    ready = tl.where(rank < TOP_K, arrived & 0xFFFF, 0) >= GATE_TILES
    v_at = inner_ptr + rank[:, None] * INNER + k[None, :]
    vs = ()
    for i in tl.static_range(STEPS):
        v = tl.load(v_at + i * BLOCK_K, mask=ready[:, None] & (i * BLOCK_K + k < INNER)[None, :], other=0.0)
        vs = vs + (v,)  # noqa: RUF005
    # All pairs are columns of every line, and a line's own pair is the one that counts: so the matrix instruction is
    # the one that many rows run, and few bytes go to shared memory.
    total = tl.zeros([PAIRS * BLOCK_M, PAIRS], tl.float32)
    for i in tl.static_range(STEPS):
        w = ws[i]
        if i >= HELD - LATE and i < HELD:
            # Depends on the wait, so that these stay in registers and need not have come when the wait begins.
            w = tl.where(complete, w, 0.0)
        total = multiply_add(w, vs[i], total)
        if i + HELD < STEPS:
            w_mask = exists[:, None] & ((i + HELD) * BLOCK_K + k < INNER)[None, :]
            w = tl.load(w_at + (i + HELD) * BLOCK_K, mask=w_mask, other=0.0, eviction_policy="evict_first")
            ws = ws + (w,)  # noqa: RUF005
    # By select: a column of another pair, or of none, may hold anything.
    vector = tl.sum(tl.where(exists[:, None] & (own[:, None] == rank[None, :]), total, 0.0), 1)
    if DOWN_BIAS:
        vector += bias
    vectors = _columns(tl.trans((vector * scale).reshape(PAIRS, BLOCK_M)), BLOCK_M)
    summed = tl.zeros([BLOCK_M], tl.float32)
    for r in tl.static_range(TOP_K):
        summed += vectors[r]
    if RESIDUAL:
        summed += residual
    tl.store(out_ptr + output, summed.to(out_ptr.dtype.element_ty), mask=output < HIDDEN)
    if _before(added, THREADS) >> 16 == PROGRAMS - 1:
        tl.store(done_ptr, 0)
