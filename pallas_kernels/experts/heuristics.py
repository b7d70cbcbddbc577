"""Tiles of the expert kernel. What fixes the arithmetic is chosen without looking at the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Tile:
    """What one program computes, and how.

    Attributes:
        block_m: weight rows, block_k: reduced elements a step, num_warps: as Triton means it. These belong to the
            arithmetic: they may depend on (H, I, dtype) only.
        block_n: batch rows of one expert.
        num_stages: loads in flight.
        lag: blocks of gate-up that start before the first down tile.
        prefetch: reduced elements of each down row that are asked into L2 while waiting for gate-up.
    """

    block_m: int
    block_k: int
    num_warps: int
    block_n: int
    num_stages: int
    lag: int
    prefetch: int


def tile_for(tokens: int, top_k: int, experts: int, hidden: int, inner: int, dtype: str) -> Tile:
    """The tile for a launch of at most `MAX_ROWS` rows."""
    if dtype == "float32":
        return Tile(block_m=32, block_k=32, num_warps=4, block_n=16, num_stages=3, lag=8, prefetch=0)
    mean = tokens * top_k / min(experts, tokens * top_k)
    block_n = 16 if tokens <= 16 or mean <= 8 else 32
    return Tile(block_m=64, block_k=128, num_warps=4, block_n=block_n, num_stages=4, lag=8, prefetch=0)
