"""``x @ w.T`` for 1 to 64 rows: weights are the M operand of the matrix unit, rows of the batch the N operand.

Every output is reduced over K in ascending order inside SPLIT parts, and the parts are added in ascending order by
the last of their programs to arrive: a row's bits depend on (N, K, dtype) and on nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def linear(
    x_ptr,
    gain_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    state_ptr,
    partial_ptr,
    square_ptr,
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
    NORM_K: tl.constexpr,
    SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """See `linear.specs.linear_spec` for the arguments."""
    if PDL:
        gdc_launch_dependents()
    PART: tl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    EVEN_K: tl.constexpr = K % (SPLIT * BLOCK_K) == 0
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = at < N
    row = tl.arange(0, BLOCK_N)
    live = row < ROWS
    k = part * PART + tl.arange(0, BLOCK_K)
    w_at = w_ptr + at.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x_ptr + row[:, None] * K + k[None, :]
    gain_at = gain_ptr + k
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # A thread's eight neighbours in K are added at once: a row's sum has one order at every width.
    squares = tl.zeros([BLOCK_N, NORM_K // 8], tl.float32)
    if EARLY:
        # Weights do not change while a step runs: all of the part's are asked for before the wait, into registers.
        # (Tuples grow by addition: Triton knows no starred element.)
        STEPS: tl.constexpr = PART // BLOCK_K
        ws = ()
        gains = ()
        for i in tl.static_range(STEPS):
            ws = ws + (tl.load(w_at + i * BLOCK_K, eviction_policy="evict_first"),)  # noqa: RUF005
            if NORM:
                gains = gains + (tl.load(gain_at + i * BLOCK_K),)  # noqa: RUF005
        if PDL:
            gdc_wait()
        xs = ()
        for i in tl.static_range(STEPS):
            xs = xs + (tl.load(x_at + i * BLOCK_K, mask=live[:, None], other=0.0),)  # noqa: RUF005
        if NORM and NORM_K < BLOCK_K:
            # Read once more, in the pieces that the order of this sum is made of.
            piece_at = x_ptr + row[:, None] * K + (part * PART + tl.arange(0, NORM_K))[None, :]
            for i in tl.static_range(PART // NORM_K):
                wide = tl.load(piece_at + i * NORM_K, mask=live[:, None], other=0.0).to(tl.float32)
                squares += tl.sum((wide * wide).reshape(BLOCK_N, NORM_K // 8, 8), 2)
        for i in tl.static_range(STEPS):
            x = xs[i]
            if NORM:
                wide = x.to(tl.float32)
                if NORM_K == BLOCK_K:
                    squares += tl.sum((wide * wide).reshape(BLOCK_N, NORM_K // 8, 8), 2)
                x = (wide * gains[i].to(tl.float32)[None, :]).to(x.dtype)
            total = tl.dot(ws[i], tl.trans(x), total, input_precision="ieee")
    else:
        if PDL:
            gdc_wait()
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
                squares += tl.sum((wide * wide).reshape(BLOCK_N, NORM_K // 8, 8), 2)
                gain = tl.load(gain_at) if EVEN_K else tl.load(gain_at, mask=(k + start) < K, other=0.0)
                x = (wide * gain.to(tl.float32)[None, :]).to(x.dtype)
                gain_at += BLOCK_K
            total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
            w_at += BLOCK_K
            x_at += BLOCK_K

    mask = live[None, :] & inside[:, None]
    square = tl.sum(squares, 1)
    last = True
    # By tile, rows innermost: neighbours in a thread's registers are neighbours in memory.
    own = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + row[None, :]
    if SPLIT > 1:
        mine = (tile * SPLIT + part) * ROWS
        tl.store(partial_ptr + (tile * SPLIT + part).to(tl.int64) * (BLOCK_M * BLOCK_N) + own, total)
        if NORM:
            tl.store(square_ptr + mine + row, square, mask=live)
        tl.debug_barrier()
        last = tl.atomic_add(state_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
        tl.debug_barrier()
    if last:
        if SPLIT > 1:
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            square = tl.zeros([BLOCK_N], tl.float32)
            # As many sums in flight as registers hold.
            UNROLL: tl.constexpr = (8192 + BLOCK_M * BLOCK_N - 1) // (BLOCK_M * BLOCK_N)
            for p in tl.range(0, SPLIT, loop_unroll_factor=UNROLL):
                where = partial_ptr + (tile * SPLIT + p).to(tl.int64) * (BLOCK_M * BLOCK_N) + own
                total += tl.load(where, cache_modifier=".cg")
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
