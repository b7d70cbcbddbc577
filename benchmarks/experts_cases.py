"""Shapes, tiles and routings of the expert benches: shared by building (no GPU) and measuring."""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.pallas_kernels.experts import Tile, expert_ffn_spec, tile_for
from moe_jax.pallas_kernels.grouped_moe import Activation
from moe_jax.pallas_kernels.spec import KernelSpec

SWIGLU = Activation(name="swiglu", layout="halves")
# H, I, E, k
QWEN3 = (2048, 768, 128, 8)
MIXTRAL = (4096, 14336, 8, 2)
SHAPES = (QWEN3, MIXTRAL)
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
BENCHED = (1, 4, 16, 64)


def spec_for(shape: tuple[int, int, int, int], tokens: int, tile: Tile | None = None, **options) -> KernelSpec:
    """The bf16 launch of a case."""
    hidden, inner, experts, k = shape
    return expert_ffn_spec(
        tokens, k, experts, hidden, inner, dtype="bfloat16", activation=SWIGLU, tile=tile, **options
    )


def routing(rng: np.random.Generator, tokens: int, experts: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights of rows that choose k distinct experts uniformly."""
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k].astype(np.int32)
    weights = rng.random((tokens, k)).astype(np.float32) + 0.1
    return ids, weights / weights.sum(1, keepdims=True)


def touched_bytes(shape: tuple[int, int, int, int], ids: np.ndarray) -> int:
    """bf16 bytes of the distinct experts in a routing."""
    hidden, inner, experts, _ = shape
    present = np.unique(ids[(ids >= 0) & (ids < experts)])
    return len(present) * 3 * hidden * inner * 2


def flops(shape: tuple[int, int, int, int], tokens: int) -> int:
    hidden, inner, _, k = shape
    return tokens * k * 3 * hidden * inner * 2


def variants(shape: tuple[int, int, int, int], tokens: int) -> list[tuple[Tile, bool]]:
    """Tiles to try for a case, with and without programmatic dependent launch; the shipped one first."""
    hidden, inner, experts, k = shape
    base = tile_for(tokens, k, experts, hidden, inner, "bfloat16")
    change = lambda **fields: dataclasses.replace(base, **fields)  # noqa: E731
    narrow = 8 if tokens <= 8 else base.block_n
    found = [(base, True), (base, False)]
    tiles = []
    if tokens == 1:
        for prefetch in (0, inner // 3, inner) if shape == QWEN3 else (0, 1024):
            tiles += [change(block_n=8, prefetch=prefetch), change(block_n=8, num_stages=3, prefetch=prefetch)]
        tiles += [change(block_n=8, num_stages=6), change(block_n=8, lag=4), change(block_n=8, lag=2)]
        tiles += [change(block_n=8, block_k=256, num_stages=3), change(block_n=8, block_k=64, num_stages=6)]
        tiles += [change(block_n=8, block_k=256, block_m=32, num_stages=4)]
        tiles += [change(block_n=8, block_k=256, num_stages=3, prefetch=inner // 3)]
    else:
        for block_n in sorted({narrow, 16, 32} if tokens < 64 else {16, 32, 64}):
            tiles += [change(block_n=block_n), change(block_n=block_n, num_stages=3)]
        tiles += [change(block_n=narrow, num_stages=6), change(block_n=narrow, lag=2), change(block_n=narrow, lag=24)]
        tiles += [change(block_n=narrow, prefetch=inner // 3)]
        tiles += [change(block_n=narrow, block_k=256, num_stages=3), change(block_n=narrow, block_k=64, num_stages=6)]
    tiles += [
        change(block_n=narrow, block_m=128, block_k=64, num_stages=4, num_warps=8),
        change(block_n=narrow, block_m=128, block_k=128, num_stages=3, num_warps=8),
        change(block_n=narrow, block_m=128, block_k=64, num_stages=4, num_warps=4),
    ]
    for tile in tiles:
        if all(tile != other for other, _ in found):
            found.append((tile, True))
    return found
