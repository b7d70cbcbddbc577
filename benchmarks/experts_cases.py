"""Shapes, tiles and routings of the expert benches: shared by building (no GPU) and measuring."""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.pallas_kernels.experts import Tile, expert_ffn_spec, tile_for
from moe_jax.pallas_kernels.grouped_moe import Activation
from moe_jax.pallas_kernels.plan import plan_spec
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
    return expert_ffn_spec(tokens, k, experts, hidden, inner, dtype="bfloat16", activation=SWIGLU, tile=tile, **options)


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


def plan_for(shape: tuple[int, int, int, int], spec: KernelSpec, **options) -> KernelSpec | None:
    """The grouping launch before a launch of two rows or more."""
    tokens = spec.arguments[0].shape[0]
    if tokens == 1:
        return None
    return plan_spec(tokens, shape[3], shape[2], dict(spec.constexprs)["BLOCK_N"], **options)


def variants(shape: tuple[int, int, int, int], tokens: int) -> list[tuple[Tile, bool]]:
    """Tiles to try for a case, with or without programmatic dependent launch; the shipped one first."""
    hidden, inner, experts, k = shape
    base = tile_for(tokens, k, experts, hidden, inner, "bfloat16")
    change = lambda **fields: dataclasses.replace(base, **fields)  # noqa: E731
    narrow = 8 if tokens <= 8 else base.block_n
    if tokens == 1:
        tiles = [
            change(lag=4),
            change(block_n=8, num_stages=5),
            change(block_n=8, num_stages=6),
            change(block_n=8, num_stages=6, lag=2),
            change(block_n=8, num_stages=6, prefetch=256),
            change(block_n=8, num_stages=5, lag=1),
        ]
    else:
        tiles = [
            change(block_n=narrow, num_stages=6, programs=264),
            change(block_n=narrow, num_stages=4, programs=264),
            change(block_n=narrow, num_stages=3, programs=528),
            change(block_n=narrow, num_stages=4, programs=396),
            change(block_n=narrow, lag=12),
        ]
    found = [(base, True), (base, False)]
    return found + [(tile, tokens > 1) for tile in dict.fromkeys(tiles) if tile != base]
