"""Grouped matmul over planned blocks: gate-up with the activation, or down. Weights are the M operand.

An output element is reduced over K ascending in one accumulator, so it depends on its row, its weights and the tile,
not on the other rows of a block, the other blocks or the order in which programs run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..experts.triton import _activate, multiply_add


@triton.jit
def _order(item, used, TILES: tl.constexpr, GROUP: tl.constexpr):
    """Block and tile of an item: for each tile of weights GROUP blocks side by side, which then share it in L2."""
    first = item // (GROUP * TILES) * GROUP
    size = tl.minimum(used - first, GROUP)
    within = item - first * TILES
    return first + within % size, within // size


@triton.jit
def _weights(w_at, start, k, IN: tl.constexpr, BLOCK_K: tl.constexpr, ONCE: tl.constexpr):
    """A tile of weights from column ``start`` on; 0 beyond the last."""
    POLICY: tl.constexpr = tl.constexpr("evict_first" if ONCE else "")
    if IN % BLOCK_K == 0:
        return tl.load(w_at + start, eviction_policy=POLICY)
    else:
        return tl.load(w_at + start, mask=((start + k) < IN)[None, :], other=0.0, eviction_policy=POLICY)


@triton.jit
def _inputs(x_at, start, k, IN: tl.constexpr, BLOCK_K: tl.constexpr):
    if IN % BLOCK_K == 0:
        return tl.load(x_at + start)
    else:
        return tl.load(x_at + start, mask=((start + k) < IN)[None, :], other=0.0)


@triton.jit
def _product(
    w_at,
    x_at,
    k,
    stop,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Weight rows times input rows, ``[BLOCK_M, rows]`` in f32."""
    total = tl.zeros([BLOCK_M, x_at.shape[0]], tl.float32)
    for start in range(0, stop, BLOCK_K):
        w = _weights(w_at, start, k, IN, BLOCK_K, ONCE)
        x = _inputs(x_at, start, k, IN, BLOCK_K)
        total = multiply_add(w, x, total)
    return total


@triton.jit
def _product_of_two(
    w_at,
    x_at,
    y_at,
    k,
    stop,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONCE: tl.constexpr,
):
    """`_product` with two sets of input rows, each tile of weights loaded once."""
    total = tl.zeros([BLOCK_M, x_at.shape[0]], tl.float32)
    extra = tl.zeros([BLOCK_M, y_at.shape[0]], tl.float32)
    for start in range(0, stop, BLOCK_K):
        w = _weights(w_at, start, k, IN, BLOCK_K, ONCE)
        x = _inputs(x_at, start, k, IN, BLOCK_K)
        y = _inputs(y_at, start, k, IN, BLOCK_K)
        total = multiply_add(w, x, total)
        extra = multiply_add(w, y, extra)
    return total, extra


@triton.jit
def _finish(
    total,
    bias,
    out_ptr,
    place,
    keep,
    tile,
    OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    LIMIT_AFTER: tl.constexpr,
    ALPHA: tl.constexpr,
):
    """Bias, activation, and the rows of the output at some places."""
    BLOCK_M: tl.constexpr = total.shape[0]
    ROWS: tl.constexpr = total.shape[1]
    if bias is not None:
        total += bias[:, None]
    if GATED:
        gate, up = total.reshape(BLOCK_M // 16, 2, 8, ROWS).permute(0, 2, 3, 1).split()
        value = _activate(gate, up, ACTIVATION, LIMIT, LIMIT_AFTER, ALPHA).reshape(BLOCK_M // 2, ROWS)
        unit = tile * (BLOCK_M // 2) + tl.arange(0, BLOCK_M // 2)
    else:
        value = total
        if ACTIVATION == "relu2":
            value = tl.maximum(value, 0.0)
            value = value * value
        unit = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(
        out_ptr + place.to(tl.int64)[None, :] * OUT + unit[:, None],
        value.to(out_ptr.dtype.element_ty),
        mask=keep[None, :] & (unit < OUT)[:, None],
    )


@triton.jit
def _input_rows(x_ptr, pair, place, k, TOP_K: tl.constexpr, IN: tl.constexpr, GATHER: tl.constexpr):
    """Addresses of the first BLOCK_K inputs of some places: by token, or rows in planned order.

    A place without a pair reads whatever stands there (row 0 by token); what comes of it is not written.
    """
    row = tl.where(pair >= 0, pair // TOP_K, 0) if GATHER else place
    return x_ptr + row.to(tl.int64)[:, None] * IN + k[None, :]


@triton.jit
def grouped_matmul(
    x_ptr,
    used_ptr,
    block_row_ptr,
    block_pair_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    TOP_K: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GATHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HALVES: tl.constexpr,
    LIMIT: tl.constexpr,
    LIMIT_AFTER: tl.constexpr,
    ALPHA: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    ONCE: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """See `prefill.specs` for the arguments. A block with few pairs takes the smallest of TAIL, MAIN, MAIN + TAIL."""
    ROWS: tl.constexpr = 2 * OUT if GATED else OUT
    TILES: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    lane = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    main_slot = tl.arange(0, MAIN)
    used = tl.load(used_ptr)
    # IN, but not known to the compiler, which would unroll a short loop until it spills.
    stop = tl.where(used > 0, IN, 0)
    for item in range(tl.program_id(0), used * TILES, PROGRAMS):
        block, tile = _order(item, used, TILES, GROUP)
        stack_row = tl.load(block_row_ptr + block)
        if GATED:
            # Gate rows and up rows by eights: a matrix unit's thread then holds both of a pair.
            unit = tile * (BLOCK_M // 2) + (lane // 16) * 8 + lane % 8
            is_up = (lane // 8) % 2
            unit = tl.minimum(unit, OUT - 1)
            at = is_up * OUT + unit if HALVES else 2 * unit + is_up
        else:
            at = tl.minimum(tile * BLOCK_M + lane, OUT - 1)
        w_at = weight_ptr + stack_row.to(tl.int64) * (ROWS * IN) + at[:, None] * IN + k[None, :]
        bias = None
        if BIAS:
            bias = tl.load(bias_ptr + stack_row.to(tl.int64) * ROWS + at).to(tl.float32)
        first = block * BLOCK
        main_pair = tl.load(block_pair_ptr + first + main_slot)
        main_at = _input_rows(x_ptr, main_pair, first + main_slot, k, TOP_K, IN, GATHER)
        count = tl.sum((main_pair >= 0).to(tl.int32), 0)
        whole = count >= 0
        if TAIL > 0:
            tail_slot = tl.arange(0, TAIL)
            # Of two forms of one size the first has no pairs beyond it only when it is not full.
            if count <= (TAIL if TAIL < MAIN else MAIN - 1):
                whole = count < 0
                pair = tl.load(block_pair_ptr + first + tail_slot)
                x_at = _input_rows(x_ptr, pair, first + tail_slot, k, TOP_K, IN, GATHER)
                total = _product(w_at, x_at, k, stop, IN, BLOCK_M, BLOCK_K, ONCE)
                _finish(
                    total, bias, out_ptr, first + tail_slot, pair >= 0, tile,
                    OUT, ACTIVATION, GATED, LIMIT, LIMIT_AFTER, ALPHA,
                )  # fmt: skip
            elif BLOCK > MAIN:
                extra_place = first + MAIN + tail_slot
                extra_pair = tl.load(block_pair_ptr + extra_place)
                if tl.max(extra_pair, 0) >= 0:
                    whole = count < 0
                    extra_at = _input_rows(x_ptr, extra_pair, extra_place, k, TOP_K, IN, GATHER)
                    total, extra = _product_of_two(w_at, main_at, extra_at, k, stop, IN, BLOCK_M, BLOCK_K, ONCE)
                    _finish(
                        total, bias, out_ptr, first + main_slot, main_pair >= 0, tile,
                        OUT, ACTIVATION, GATED, LIMIT, LIMIT_AFTER, ALPHA,
                    )  # fmt: skip
                    _finish(
                        extra, bias, out_ptr, extra_place, extra_pair >= 0, tile,
                        OUT, ACTIVATION, GATED, LIMIT, LIMIT_AFTER, ALPHA,
                    )  # fmt: skip
        if whole:
            total = _product(w_at, main_at, k, stop, IN, BLOCK_M, BLOCK_K, ONCE)
            _finish(
                total, bias, out_ptr, first + main_slot, main_pair >= 0, tile,
                OUT, ACTIVATION, GATED, LIMIT, LIMIT_AFTER, ALPHA,
            )  # fmt: skip
