"""What PyTorch users have: ``torch._grouped_mm``, and the two-launch Triton kernel over sorted rows of serving engines.

Needs PyTorch and Triton; `contenders` says whether they are there without importing them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from moe_jax.bench.contenders import Contender, Work
from moe_jax.bench.layer import Layer, Step
from moe_jax.errors import CannotServe

# The first launch's columns a tile, reduced elements a step, loads in flight, warps; then the second's.
type TwoTiles = tuple[tuple[int, int, int, int], tuple[int, int, int, int]]
# Rows of a block, by the mean number of rows of an expert; and tiles to try with them.
TWO_LAUNCH: tuple[tuple[float, int, tuple[TwoTiles, ...]], ...] = (
    (12, 16, (
        ((32, 128, 4, 4), (64, 128, 4, 4)), ((64, 64, 4, 4), (64, 64, 4, 4)), ((32, 64, 5, 4), (64, 64, 5, 4)),
        ((64, 128, 3, 8), (128, 64, 4, 8)), ((32, 128, 3, 4), (32, 128, 4, 4)),
    )),
    (48, 32, (
        ((64, 64, 4, 4), (128, 64, 4, 4)), ((64, 128, 3, 4), (64, 128, 3, 4)), ((128, 64, 3, 8), (128, 64, 4, 8)),
    )),
    (96, 64, (
        ((64, 64, 4, 4), (128, 64, 4, 4)), ((128, 64, 3, 8), (128, 64, 4, 8)), ((128, 64, 4, 4), (128, 64, 3, 4)),
    )),
    (float("inf"), 128, (
        ((64, 64, 4, 4), (128, 64, 4, 4)), ((128, 64, 3, 8), (128, 64, 4, 8)), ((64, 64, 4, 8), (256, 64, 3, 8)),
        ((128, 32, 4, 8), (128, 32, 4, 8)), ((128, 64, 4, 8), (256, 64, 4, 8)),
    )),
)  # fmt: skip


class Blocks(NamedTuple):
    """A routing with its pairs sorted by expert on the host, which costs the peer nothing.

    Attributes:
        order, back: pairs by expert, and where each pair stands in that order.
        ends: last row of each expert, plus one.
        block_expert, block_pair: blocks of pairs of one expert; padded with the number of pairs.
        scale: the weights ``[T, k]``.
    """

    order: Any
    back: Any
    ends: Any
    block_expert: Any
    block_pair: Any
    scale: Any


def blocks(ids: np.ndarray, experts: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """``(block_expert [N], block_pair [N, block])`` of sorted pairs; the number of pairs stands for none."""
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable")
    counts = np.bincount(flat, minlength=experts)
    per_expert = -(-counts // block)
    first_block = np.concatenate([[0], np.cumsum(per_expert)])[:-1]
    first_pair = np.concatenate([[0], np.cumsum(counts)])[:-1]
    expert = flat[order]
    place = first_block[expert] * block + np.arange(len(flat)) - first_pair[expert]
    pairs = np.full(per_expert.sum() * block, len(flat), np.int32)
    pairs[place] = order
    return np.repeat(np.arange(experts, dtype=np.int32), per_expert), pairs.reshape(-1, block)


def _prepared(layer: Layer, step: Step, block: int) -> Blocks:
    import torch

    def put(array: np.ndarray) -> Any:
        return torch.from_numpy(np.ascontiguousarray(array)).cuda()

    flat = step.host_ids.reshape(-1)
    order = np.argsort(flat, kind="stable")
    ends = np.cumsum(np.bincount(flat, minlength=layer.shape.experts)).astype(np.int32)
    expert, pair = blocks(step.host_ids, layer.shape.experts, block)
    return Blocks(put(order), put(np.argsort(order)), put(ends), put(expert), put(pair), put(step.host_scale))


def _work(
    label: str,
    layer: Layer,
    steps: Sequence[Step],
    block: int,
    weights: Sequence[tuple[Any, Any]],
    one: Callable[..., Any],
    builder: str | None = None,
) -> Work:
    """A chain of ``one(x, blocks, weights)``."""
    import torch

    rows = [torch.from_dlpack(step.x) for step in steps]
    plans = [_prepared(layer, step, block) for step in steps]

    def run() -> Any:
        out = None
        for i, (x, plan) in enumerate(zip(rows, plans, strict=True)):
            out = one(x, plan, weights[i % len(weights)])
        return out

    def result() -> Any:
        out = run()
        torch.cuda.synchronize()
        return out.float().cpu().numpy()

    return Work(label, "torch", run, result, builder)


def grouped_mm(layer: Layer, steps: Sequence[Step]) -> Iterator[Work]:
    """On our layout of weights, and on ``[E, in, out]``."""
    import torch

    def one(x: Any, plan: Blocks, weights: tuple[Any, Any]) -> Any:
        k = plan.scale.shape[1]
        h = torch._grouped_mm(x[plan.order // k], weights[0], offs=plan.ends)
        gate, up = h.chunk(2, dim=1)
        y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, weights[1], offs=plan.ends)
        y = y[plan.back].view(x.shape[0], k, -1)
        return torch.bmm(plan.scale[:, None].to(y.dtype), y)[:, 0]

    def as_torch(*pair: Any) -> tuple[Any, Any]:
        return torch.from_dlpack(pair[0]), torch.from_dlpack(pair[1])

    ours = [tuple(w.transpose(1, 2) for w in as_torch(s.gate_up, s.down)) for s in layer.sets]
    yield _work("[E, out, in]", layer, steps, 16, ours, one)
    yield _work("[E, in, out]", layer, steps, 16, [as_torch(*pair) for pair in layer.transposed], one)


def two_launch(layer: Layer, steps: Sequence[Step]) -> Iterator[Work]:
    """Gate-up with the activation, then down, over blocks of sorted rows; the sum over a row's experts is PyTorch's."""
    import torch
    import triton

    from moe_jax.bench import peers_triton

    gate_up: Any = peers_triton.gate_up
    down: Any = peers_triton.down
    hidden, inner, experts, k = layer.shape
    tokens = steps[0].x.shape[0]
    pairs = tokens * k
    _, block, tiles = next(t for t in TWO_LAUNCH if pairs / min(experts, pairs) <= t[0])
    weights = [(torch.from_dlpack(s.gate_up), torch.from_dlpack(s.down)) for s in layer.sets]
    fitting = [(a, b) for a, b in tiles if not (inner % a[0] or hidden % a[1] or hidden % b[0] or inner % b[1])]
    if not fitting:
        raise CannotServe("tiles", where="two-launch Triton", got=f"H {hidden}, I {inner}", wanted="multiples of 32")
    h = torch.empty(pairs, inner, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(pairs, hidden, device="cuda", dtype=torch.bfloat16)
    for first, second in fitting:

        def one(x: Any, plan: Blocks, weights: tuple[Any, Any], first=first, second=second) -> Any:
            (n1, b1, s1, w1), (n2, b2, s2, w2) = first, second
            count = plan.block_expert.numel()
            gate_up[(inner // n1, count)](
                x, weights[0], plan.block_expert, plan.block_pair, h, pairs,
                K=k, H=hidden, I=inner, M=block, N=n1, B=b1, num_stages=s1, num_warps=w1,
            )  # fmt: skip
            down[(hidden // n2, count)](
                h, weights[1], plan.block_expert, plan.block_pair, plan.scale, y, pairs,
                H=hidden, I=inner, M=block, N=n2, B=b2, num_stages=s2, num_warps=w2,
            )  # fmt: skip
            return y.view(tokens, k, hidden).sum(1)

        label = f"block {block}, {first} and {second}"
        yield _work(label, layer, steps, block, weights, one, f"triton {triton.__version__}")


def contenders() -> list[Contender]:
    """Those that can be imported."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("triton")):
        return []
    return [Contender("two-launch Triton", False, two_launch), Contender("torch._grouped_mm", False, grouped_mm)]
