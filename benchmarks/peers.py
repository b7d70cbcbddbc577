"""What users have today, for the same layer: `torch._grouped_mm` and the two-launch sorted-token Triton kernel.

Sorting the rows by expert is left out of both of their times; the expert kernel's own time includes it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


@triton.jit
def _read(data_ptr, sink_ptr, SIZE: tl.constexpr, LOOPS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * SIZE * LOOPS
    total = tl.zeros([SIZE], tl.int32)
    for i in tl.static_range(LOOPS):
        total ^= tl.load(data_ptr + start + i * SIZE + tl.arange(0, SIZE))
    if tl.sum(total, 0) == 123456789:
        tl.store(sink_ptr, 1)


def stream_read(data: torch.Tensor, sink: torch.Tensor, size: int, warps: int) -> None:
    """Read a tensor once."""
    _read[(data.numel() // (size * 4),)](data, sink, SIZE=size, LOOPS=4, num_warps=warps)


class Prepared(NamedTuple):
    """A routing sorted by expert: rows for grouped_mm, and padded blocks of 16 for the Triton kernel."""

    order: torch.Tensor
    back: torch.Tensor
    ends: torch.Tensor
    block_expert: torch.Tensor
    block_pair: torch.Tensor
    scale: torch.Tensor
    k: int


def prepare(shape: tuple[int, int, int, int], ids: torch.Tensor, scale: torch.Tensor, block: int = 16) -> Prepared:
    experts = shape[2]
    flat = ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts)
    expert, pair = [], []
    start = 0
    for e, count in enumerate(counts.tolist()):
        for first in range(0, count, block):
            mine = order[start + first : start + min(count, first + block)].tolist()
            expert.append(e)
            pair += mine + [flat.numel()] * (block - len(mine))
        start += count
    as_int = {"dtype": torch.int32, "device": "cuda"}
    return Prepared(
        order, torch.argsort(order), counts.cumsum(0).int(),
        torch.tensor(expert, **as_int), torch.tensor(pair, **as_int), scale, ids.shape[1],
    )  # fmt: skip


def grouped_mm(layer, tokens):
    def run(x, plan, weights):
        rows = x[plan.order // plan.k]
        h = torch._grouped_mm(rows, weights[0].transpose(1, 2), offs=plan.ends)
        gate, up = h.chunk(2, dim=1)
        y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, weights[1].transpose(1, 2), offs=plan.ends)
        y = y[plan.back].view(x.shape[0], plan.k, -1)
        return torch.bmm(plan.scale[:, None].to(y.dtype), y)[:, 0]

    return [run]


@triton.jit
def _gate_up(x_ptr, w_ptr, expert_ptr, pair_ptr, h_ptr, PAIRS, K: tl.constexpr, H: tl.constexpr, I: tl.constexpr,  # noqa: E741
             M: tl.constexpr, N: tl.constexpr, B: tl.constexpr):  # fmt: skip
    n = tl.program_id(0) * N + tl.arange(0, N)
    block = tl.program_id(1)
    pair = tl.load(pair_ptr + block * M + tl.arange(0, M))
    live = pair < PAIRS
    w_ptr += tl.load(expert_ptr + block).to(tl.int64) * (2 * I * H)
    b = tl.arange(0, B)
    gate, up = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
    for start in range(0, H, B):
        x = tl.load(x_ptr + (pair // K)[:, None] * H + start + b[None, :], mask=live[:, None], other=0.0)
        g = tl.load(w_ptr + n[None, :] * H + start + b[:, None])
        u = tl.load(w_ptr + (n + I)[None, :] * H + start + b[:, None])
        gate = tl.dot(x, g, gate)
        up = tl.dot(x, u, up)
    value = gate * tl.sigmoid(gate) * up
    tl.store(h_ptr + pair[:, None] * I + n[None, :], value.to(tl.bfloat16), mask=live[:, None])


@triton.jit
def _down(h_ptr, w_ptr, expert_ptr, pair_ptr, scale_ptr, y_ptr, PAIRS, H: tl.constexpr, I: tl.constexpr,  # noqa: E741
          M: tl.constexpr, N: tl.constexpr, B: tl.constexpr):  # fmt: skip
    n = tl.program_id(0) * N + tl.arange(0, N)
    block = tl.program_id(1)
    pair = tl.load(pair_ptr + block * M + tl.arange(0, M))
    live = pair < PAIRS
    w_ptr += tl.load(expert_ptr + block).to(tl.int64) * (I * H)
    b = tl.arange(0, B)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, I, B):
        h = tl.load(h_ptr + pair[:, None] * I + start + b[None, :], mask=live[:, None], other=0.0)
        w = tl.load(w_ptr + n[None, :] * I + start + b[:, None])
        total = tl.dot(h, w, total)
    total *= tl.load(scale_ptr + pair, mask=live, other=0.0)[:, None]
    tl.store(y_ptr + pair[:, None] * H + n[None, :], total.to(tl.bfloat16), mask=live[:, None])


def two_launch(layer, tokens):
    hidden, inner, _, k = layer.shape
    pairs = tokens * k
    h = torch.empty(pairs, inner, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(pairs, hidden, device="cuda", dtype=torch.bfloat16)
    runs = []
    for (n1, b1, s1, w1), (n2, b2, s2, w2) in (
        ((32, 128, 4, 4), (64, 128, 4, 4)), ((64, 64, 4, 4), (64, 64, 4, 4)), ((32, 64, 5, 4), (64, 64, 5, 4)),
        ((64, 128, 3, 8), (128, 64, 4, 8)),
    ):  # fmt: skip

        def run(x, plan, weights, c=(n1, b1, s1, w1, n2, b2, s2, w2)):
            n1, b1, s1, w1, n2, b2, s2, w2 = c
            blocks = plan.block_expert.numel()
            _gate_up[(inner // n1, blocks)](
                x, weights[0], plan.block_expert, plan.block_pair, h, pairs,
                K=k, H=hidden, I=inner, M=16, N=n1, B=b1, num_stages=s1, num_warps=w1,
            )  # fmt: skip
            _down[(hidden // n2, blocks)](
                h, weights[1], plan.block_expert, plan.block_pair, plan.scale, y, pairs,
                H=hidden, I=inner, M=16, N=n2, B=b2, num_stages=s2, num_warps=w2,
            )  # fmt: skip
            return y.view(tokens, k, hidden).sum(1)

        runs.append(run)
    return runs


PEERS = {"two-launch Triton": two_launch, "torch._grouped_mm": grouped_mm}
