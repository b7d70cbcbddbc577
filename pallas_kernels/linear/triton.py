"""``x @ w.T`` for 1 to 64 rows: weights are the M operand of the matrix unit, rows of the batch the N operand.

Every output is reduced over K in ascending order inside SPLIT parts, and the parts are added in ascending order by
the last of their programs to arrive: a row's bits depend on (N, K, dtype) and on nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def prefetch_rows(ptr, rows, STRIDE_BYTES: tl.constexpr, BYTES: tl.constexpr):
    """Ask for the first BYTES (a multiple of 16) of some rows to be brought into L2. A hint: no value is read."""
    at = ptr.to(tl.int64) + rows.to(tl.int64) * STRIDE_BYTES
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
def linear(
    x_ptr,
    gain_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    partial_ptr,
    square_ptr,
    state_ptr,
    out_ptr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """See `linear.specs.linear_spec` for the arguments."""
    PART: tl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    EVEN_K: tl.constexpr = K % (SPLIT * BLOCK_K) == 0
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = at < N
    if PREFETCH:
        # Weights do not change while a step runs: the only thing that may be asked for before the wait.
        ITEM: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
        prefetch_rows(w_ptr + part * PART, tl.minimum(at, N - 1), K * ITEM, PART * ITEM)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.arange(0, BLOCK_N)
    live = row < ROWS
    k = part * PART + tl.arange(0, BLOCK_K)
    w_at = w_ptr + at.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x_ptr + row[:, None] * K + k[None, :]
    gain_at = gain_ptr + k
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # A thread's eight neighbours in K are added at once: a row's sum has one order at every width.
    squares = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    for start in range(0, PART, BLOCK_K):
        if EVEN_K:
            if N % BLOCK_M == 0:
                w = tl.load(w_at, eviction_policy="evict_first")
            else:
                w = tl.load(w_at, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_at, mask=live[:, None], other=0.0)
        else:
            there = (k + start) < K
            w = tl.load(w_at, mask=inside[:, None] & there[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_at, mask=live[:, None] & there[None, :], other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum((wide * wide).reshape(BLOCK_N, BLOCK_K // 8, 8), 2)
            gain = tl.load(gain_at) if EVEN_K else tl.load(gain_at, mask=(k + start) < K, other=0.0)
            x = (wide * gain.to(tl.float32)[None, :]).to(x.dtype)
            gain_at += BLOCK_K
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
        w_at += BLOCK_K
        x_at += BLOCK_K

    mask = live[None, :] & inside[:, None]
    square = tl.sum(squares, 1)
    last = True
    if SPLIT > 1:
        mine = (tile * SPLIT + part) * ROWS
        tl.store(partial_ptr + (part * ROWS + row).to(tl.int64)[None, :] * N + at[:, None], total, mask=mask)
        if NORM:
            tl.store(square_ptr + mine + row, square, mask=live)
        tl.debug_barrier()
        last = tl.atomic_add(state_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
        tl.debug_barrier()
    if last:
        if SPLIT > 1:
            UNROLL: tl.constexpr = 8192 // (BLOCK_M * BLOCK_N) if BLOCK_M * BLOCK_N < 8192 else 1
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            square = tl.zeros([BLOCK_N], tl.float32)
            # As many sums in flight as registers hold.
            for p in tl.range(0, SPLIT, loop_unroll_factor=UNROLL):
                where = partial_ptr + (p * ROWS + row).to(tl.int64)[None, :] * N + at[:, None]
                total += tl.load(where, mask=mask, other=0.0, cache_modifier=".cg")
                if NORM:
                    theirs = square_ptr + (tile * SPLIT + p) * ROWS + row
                    square += tl.load(theirs, mask=live, other=0.0, cache_modifier=".cg")
            tl.store(state_ptr + tile, 0)
        if NORM:
            total *= tl.rsqrt(square / K + EPS)[None, :]
        if BIAS:
            total += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)[:, None]
        where = row.to(tl.int64)[None, :] * N + at[:, None]
        if RESIDUAL:
            total += tl.load(residual_ptr + where, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + where, total.to(out_ptr.dtype.element_ty), mask=mask)
