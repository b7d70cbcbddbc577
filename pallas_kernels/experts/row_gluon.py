"""The expert block of one row, as one stream of weights through shared memory.

A program has one gate-up tile and then 16 outputs of every expert. Weights of both come by asynchronous copies into a
ring, and those of the second are asked for while the first is still being multiplied. Activations are handed over by
words that say themselves whether they are there: a fence would wait for the copies. docs/kernels.md has the reasoning
and the figures.

Sums have the order of `triton.expert_ffn`: every output ascending over the whole reduction, pairs in rank order.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import heuristics
from .triton import _activate, gate_lines

PAIRS = tl.constexpr(heuristics.PAIRS)
M = tl.constexpr(16 * heuristics.PAIRS)
"""Lines of a tile: a warp's 16 for each pair."""
K = tl.constexpr(heuristics.ROW_DEPTH)
"""Reduced elements of a step: the 128 bytes of a swizzle."""
THERE = tl.constexpr(1)
"""Low half of a word that holds an activation in its high half."""

# Triton 3.9 has renamed it.
copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
# What both kernels compute alike is written once.
activate = gluon.jit(_activate.fn)
lines_of_tile = gluon.jit(gate_lines.fn)


@gluon.jit
def _add(count_ptr, thread):
    """Add one to a count; `_before` gives what it was, and only there is it waited for.

    A warp would wait at once for an address that its threads have in common.
    """
    return gl.atomic_add(count_ptr + thread, thread * 0 + 1, mask=thread == 0, sem="relaxed")


@gluon.jit
def _before(added, thread):
    return gl.max(gl.where(thread == 0, added, 0), 0)


@gluon.jit
def _count(STEPS: gl.constexpr):
    """STEPS, which the compiler does not know: some write a short loop out, and run out of registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gl.to_tensor(STEPS)], gl.int32, True, 1)


@gluon.jit
def _multiply(total, ring, vectors, slot, step):
    """``total`` and one step of a reduction. The step before is done, and its place free, when it returns."""
    fence_async_shared()
    total = warpgroup_mma(ring.index(slot), vectors.index(step).permute((1, 0)), total, is_async=True)
    return warpgroup_mma_wait(num_outstanding=1, deps=[total])


@gluon.jit
def _hand_over(
    total,
    words_ptr,
    bias_ptr,
    block,
    tile,
    INNER: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    HALVES: gl.constexpr,
    LIMIT: gl.constexpr,
    LIMIT_AFTER: gl.constexpr,
    ALPHA: gl.constexpr,
    BIAS: gl.constexpr,
    LINES: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Activated sums of a gate-up tile, in column 0, to the words of pair ``block``."""
    if BIAS:
        line = gl.arange(0, M, gl.SliceLayout(1, total.type.layout))
        at, inside = lines_of_tile(line, tile, INNER, GATED, HALVES, LINES)
        total += gl.load(bias_ptr + at, mask=inside, other=0.0).to(gl.float32)[:, None]
    if GATED:
        gate, up = total.reshape([M // 16, 2, 8, PAIRS]).permute((0, 2, 3, 1)).split()
        value = activate(gate, up, ACTIVATION, LIMIT, LIMIT_AFTER, ALPHA).reshape([M // 2, PAIRS])
        UNITS: gl.constexpr = LINES // 2
        HEIGHT: gl.constexpr = M // 2
    else:
        value = gl.maximum(total, 0.0)
        value = value * value
        UNITS: gl.constexpr = LINES
        HEIGHT: gl.constexpr = M
    word = (value.to(DTYPE).to(gl.int16, bitcast=True).to(gl.int32) << 16) | THERE
    local = gl.arange(0, HEIGHT, gl.SliceLayout(1, word.type.layout))
    column = gl.arange(0, PAIRS, gl.SliceLayout(0, word.type.layout))
    unit = tile * UNITS + local
    mask = ((unit < INNER) & (local < UNITS))[:, None] & (column == 0)[None, :]
    at = words_ptr + block * INNER + unit[:, None] + 0 * column[None, :]
    gl.atomic_xchg(at, word, mask=mask, sem="relaxed")


@gluon.jit
def _columns(values, N: gl.constexpr):
    """The eight columns of ``[N, 8]``."""
    even, odd = values.reshape([N, 4, 2]).split()
    e, f = even.reshape([N, 2, 2]).split()
    g, h = odd.reshape([N, 2, 2]).split()
    v0, v4 = e.split()
    v2, v6 = f.split()
    v1, v5 = g.split()
    v3, v7 = h.split()
    return v0, v1, v2, v3, v4, v5, v6, v7


@gluon.jit
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
    out_ptr,
    TOP_K: gl.constexpr,
    EXPERTS: gl.constexpr,
    HIDDEN: gl.constexpr,
    INNER: gl.constexpr,
    INDIRECT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    HALVES: gl.constexpr,
    LIMIT: gl.constexpr,
    LIMIT_AFTER: gl.constexpr,
    ALPHA: gl.constexpr,
    GATE_UP_BIAS: gl.constexpr,
    DOWN_BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    GATE_LINES: gl.constexpr,
    OUTPUTS: gl.constexpr,
    RING: gl.constexpr,
    AHEAD: gl.constexpr,
    PROGRAMS: gl.constexpr,
    SPREAD: gl.constexpr,
    PDL: gl.constexpr,
):
    """See `experts.specs.expert_ffn_spec` for the arguments."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    ROWS: gl.constexpr = 2 * INNER if GATED else INNER
    TILES_OF_PAIR: gl.constexpr = (ROWS + GATE_LINES - 1) // GATE_LINES
    TILES: gl.constexpr = TOP_K * TILES_OF_PAIR
    GATE_STEPS: gl.constexpr = HIDDEN // K
    STEPS: gl.constexpr = INNER // K
    FLYING: gl.constexpr = RING - 1
    EARLY: gl.constexpr = AHEAD if AHEAD < STEPS else STEPS
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[PAIRS, 1], instr_shape=[16, PAIRS, 16])
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [PAIRS, 1], [1, 0])
    spread: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [PAIRS, 1], [1, 0])
    whole: gl.constexpr = gl.BlockedLayout([1, PAIRS], [32, 1], [PAIRS, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ring = gl.allocate_shared_memory(DTYPE, [RING, M, K], shared)
    # Column 0 is the row; what the other columns of its products hold is never read.
    x_ring = gl.allocate_shared_memory(DTYPE, [RING, PAIRS, K], shared)
    activations = gl.allocate_shared_memory(DTYPE, [STEPS, PAIRS, K], shared)
    # State: the next gate-up tile; programs that have read all activations; words of activations.
    left_ptr = state_ptr + SPREAD
    words_ptr = state_ptr + 2 * SPREAD
    thread = gl.arange(0, 32 * PAIRS, gl.BlockedLayout([1], [32], [PAIRS], [0]))

    added = _add(state_ptr, thread)
    rank = gl.arange(0, PAIRS, gl.SliceLayout(0, mma))
    chosen = gl.load(ids_ptr + rank, mask=rank < TOP_K, other=-1)
    # Line i of the down product: output i % OUTPUTS of the program, by the expert of pair i // OUTPUTS.
    line = gl.arange(0, M, gl.SliceLayout(1, copied))
    row = gl.load(ids_ptr + line // OUTPUTS, mask=line // OUTPUTS < TOP_K, other=-1)
    chosen = gl.where(chosen < EXPERTS, chosen, -1)
    row = gl.where(row < EXPERTS, row, -1)
    if INDIRECT:
        chosen = gl.load(weight_row_ptr + chosen, mask=chosen >= 0, other=-1)
        row = gl.load(weight_row_ptr + row, mask=row >= 0, other=-1)
    k = gl.arange(0, K, gl.SliceLayout(0, copied))
    output = gl.program_id(0) * OUTPUTS + line % OUTPUTS
    exists = ((row >= 0) & (output < HIDDEN))[:, None]
    stack = gl.maximum(row, 0).to(gl.int64)
    down_at = down_ptr + (stack * (HIDDEN * INNER) + output * INNER)[:, None] + k[None, :]
    x_row = gl.arange(0, PAIRS, gl.SliceLayout(1, copied))
    x_at = x_ptr + 0 * x_row[:, None] + k[None, :]

    # Gate-up tiles are claimed, so a program that does not run holds none that others wait for. Each claims one too
    # many; the last to do so leaves the count as it was.
    first = 0
    begun = False
    item = _before(added, thread)
    while item < TILES:
        added = _add(state_ptr, thread)
        block = item // TILES_OF_PAIR
        tile = item % TILES_OF_PAIR
        stack_row = gl.max(gl.where(rank == block, chosen, -1), 0)
        if stack_row >= 0:
            at, inside = lines_of_tile(line, tile, INNER, GATED, HALVES, GATE_LINES)
            gate_at = gate_up_ptr + stack_row.to(gl.int64) * (ROWS * HIDDEN) + (at * HIDDEN)[:, None] + k[None, :]
            for i in gl.static_range(FLYING):
                copy(ring.index(i), gate_at + i * K, mask=inside[:, None])
                copy(x_ring.index(i), x_at + i * K, mask=(x_row == 0)[:, None])
                async_copy.commit_group()
            total = gl.zeros([M, PAIRS], gl.float32, mma)
            for step in range(GATE_STEPS):
                async_copy.wait_group(FLYING - 1)
                total = _multiply(total, ring, x_ring, step % RING, step % RING)
                following = step + FLYING
                place = ring.index(following % RING)
                if following < GATE_STEPS:
                    copy(place, gate_at + following * K, mask=inside[:, None])
                    copy(x_ring.index(following % RING), x_at + following * K, mask=(x_row == 0)[:, None])
                else:
                    if following == GATE_STEPS:
                        item = _before(added, thread)
                        begun = item >= TILES
                    if begun & (following - GATE_STEPS < EARLY):
                        copy(place, down_at + (following - GATE_STEPS) * K, mask=exists)
                async_copy.commit_group()
            total = warpgroup_mma_wait(num_outstanding=0, deps=[total])
            _hand_over(
                total, words_ptr, gate_up_bias_ptr + stack_row * ROWS, block, tile,
                INNER, ACTIVATION, GATED, HALVES, LIMIT, LIMIT_AFTER, ALPHA, GATE_UP_BIAS, GATE_LINES, DTYPE,
            )  # fmt: skip
        else:
            UNITS: gl.constexpr = GATE_LINES // 2 if GATED else GATE_LINES
            unit = tile * UNITS + thread
            inside_row = (thread < UNITS) & (unit < INNER)
            gl.atomic_xchg(words_ptr + block * INNER + unit, thread * 0 + THERE, mask=inside_row, sem="relaxed")
            item = _before(added, thread)
    if item == TILES + PROGRAMS - 1:
        gl.store(state_ptr, 0)
    if begun:
        first = GATE_STEPS % RING
    else:
        for i in gl.static_range(FLYING):
            if i < EARLY:
                copy(ring.index(i), down_at + i * K, mask=exists)
            async_copy.commit_group()

    own = gl.arange(0, M, gl.SliceLayout(1, mma)) // OUTPUTS
    own_row = gl.load(ids_ptr + own, mask=own < TOP_K, other=-1)
    own_row = gl.where(own_row < EXPERTS, own_row, -1)
    scale = gl.load(scale_ptr + own, mask=own_row >= 0, other=0.0)
    bias = 0.0
    if DOWN_BIAS:
        at = gl.program_id(0) * OUTPUTS + gl.arange(0, M, gl.SliceLayout(1, mma)) % OUTPUTS
        slot = own_row
        if INDIRECT:
            slot = gl.load(weight_row_ptr + own_row, mask=own_row >= 0, other=-1)
        there = (own_row >= 0) & (at < HIDDEN)
        bias = gl.load(down_bias_ptr + slot * HIDDEN + at, mask=there, other=0.0).to(gl.float32)
    pair = gl.arange(0, PAIRS, gl.SliceLayout(1, spread))
    word_at = words_ptr + pair[:, None] * INNER + gl.arange(0, K, gl.SliceLayout(0, spread))[None, :]
    missing = 1
    while missing != 0:
        # What is looked at is what is used: a word is one 32-bit access, its halves come together. Looking takes as
        # long as the copies asked for before it, so there is nothing to gain by a pause.
        found = gl.full([PAIRS, K], THERE, gl.int32, spread)
        words = ()
        for i in gl.static_range(STEPS):  # all asked for before one is stored, or they come one after another
            word = gl.load(word_at + i * K, mask=(pair < TOP_K)[:, None], other=THERE, volatile=True)
            words = words + (word,)  # noqa: RUF005 (Triton knows no starred element)
        for i in gl.static_range(STEPS):
            found &= words[i]
            activations.index(i).store((words[i] >> 16).to(gl.int16).to(DTYPE, bitcast=True))
        missing = gl.max(gl.max((found ^ THERE) & THERE, 1), 0)
    added = _add(left_ptr, thread)

    for i in gl.static_range(EARLY, FLYING):
        if i < STEPS:
            copy(ring.index((first + i) % RING), down_at + i * K, mask=exists)
        async_copy.commit_group()
    total = gl.zeros([M, PAIRS], gl.float32, mma)
    for step in range(_count(STEPS)):
        if step < EARLY:
            # The groups that were empty while others were waited for came between these and the later ones.
            async_copy.wait_group(2 * FLYING - 1 - EARLY)
        else:
            async_copy.wait_group(FLYING - 1)
        total = _multiply(total, ring, activations, (first + step) % RING, step)
        if step + FLYING < STEPS:
            copy(ring.index((first + step + FLYING) % RING), down_at + (step + FLYING) * K, mask=exists)
        async_copy.commit_group()
    total = warpgroup_mma_wait(num_outstanding=0, deps=[total])
    if _before(added, thread) == PROGRAMS - 1:
        # All have read: the words are put back to nothing.
        for i in gl.static_range(STEPS):
            gl.store(word_at + i * K, gl.zeros([PAIRS, K], gl.int32, spread), mask=(pair < TOP_K)[:, None])
        gl.store(left_ptr, 0)
    # By select: a column of another pair, or of none, may hold anything.
    vector = gl.sum(gl.where((own_row >= 0)[:, None] & (own[:, None] == rank[None, :]), total, 0.0), 1)
    if DOWN_BIAS:
        vector += bias
    by_output = gl.convert_layout((vector * scale).reshape([PAIRS, OUTPUTS]).permute((1, 0)), whole)
    vectors = _columns(by_output, OUTPUTS)
    outputs: gl.constexpr = gl.SliceLayout(1, whole)
    summed = gl.zeros([OUTPUTS], gl.float32, outputs)
    for r in gl.static_range(TOP_K):
        summed += gl.convert_layout(vectors[r], outputs)
    written = gl.program_id(0) * OUTPUTS + gl.arange(0, OUTPUTS, outputs)
    if RESIDUAL:
        summed += gl.load(residual_ptr + written, mask=written < HIDDEN, other=0.0).to(gl.float32)
    gl.store(out_ptr + written, summed.to(out_ptr.dtype.element_ty), mask=written < HIDDEN)
