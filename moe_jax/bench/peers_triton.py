"""The two launches of the sorted-row Triton peer, over blocks of M pairs of one expert."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_up(x_ptr, w_ptr, expert_ptr, pair_ptr, h_ptr, PAIRS, K: tl.constexpr, H: tl.constexpr, I: tl.constexpr,  # noqa: E741
            M: tl.constexpr, N: tl.constexpr, B: tl.constexpr):  # fmt: skip
    """``silu(x @ gate.T) * (x @ up.T)`` of N columns of a block."""
    n = tl.program_id(0) * N + tl.arange(0, N)
    block = tl.program_id(1)
    pair = tl.load(pair_ptr + block * M + tl.arange(0, M))
    live = pair < PAIRS
    w_ptr += tl.load(expert_ptr + block).to(tl.int64) * (2 * I * H)
    b = tl.arange(0, B)
    gate, up = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
    row = (pair // K).to(tl.int64)
    for start in range(0, H, B):
        x = tl.load(x_ptr + row[:, None] * H + start + b[None, :], mask=live[:, None], other=0.0)
        g = tl.load(w_ptr + n[None, :] * H + start + b[:, None])
        u = tl.load(w_ptr + (n + I)[None, :] * H + start + b[:, None])
        gate = tl.dot(x, g, gate)
        up = tl.dot(x, u, up)
    value = gate * tl.sigmoid(gate) * up
    tl.store(h_ptr + pair.to(tl.int64)[:, None] * I + n[None, :], value.to(tl.bfloat16), mask=live[:, None])


@triton.jit
def down(h_ptr, w_ptr, expert_ptr, pair_ptr, scale_ptr, y_ptr, PAIRS, H: tl.constexpr, I: tl.constexpr,  # noqa: E741
         M: tl.constexpr, N: tl.constexpr, B: tl.constexpr):  # fmt: skip
    """``(h @ down.T) * scale`` of N columns of a block."""
    n = tl.program_id(0) * N + tl.arange(0, N)
    block = tl.program_id(1)
    pair = tl.load(pair_ptr + block * M + tl.arange(0, M))
    live = pair < PAIRS
    w_ptr += tl.load(expert_ptr + block).to(tl.int64) * (I * H)
    b = tl.arange(0, B)
    total = tl.zeros([M, N], tl.float32)
    at = pair.to(tl.int64)[:, None]
    for start in range(0, I, B):
        h = tl.load(h_ptr + at * I + start + b[None, :], mask=live[:, None], other=0.0)
        w = tl.load(w_ptr + n[None, :] * I + start + b[:, None])
        total = tl.dot(h, w, total)
    total *= tl.load(scale_ptr + pair, mask=live, other=0.0)[:, None]
    tl.store(y_ptr + at * H + n[None, :], total.to(tl.bfloat16), mask=live[:, None])
