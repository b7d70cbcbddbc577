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
        programs: programs that share the tiles of two rows or more; as many as the device holds at once.
        backoff: nanoseconds between two looks at an arrival count.
        spread: 32-bit words between the arrival counts of two blocks; 32 gives each a cache line.
    """

    block_m: int
    block_k: int
    num_warps: int
    block_n: int
    num_stages: int
    lag: int
    programs: int
    backoff: int
    spread: int


def down_split(inner: int) -> int:
    """Parts that the down projection's reduction is cut into, for enough tiles at one row. Fixes the arithmetic."""
    return max(1, min(8, inner // 3584))


def tile_for(tokens: int, top_k: int, experts: int, hidden: int, inner: int, dtype: str) -> Tile:
    """The tile for a launch of at most `MAX_ROWS` rows."""
    if dtype == "float32":
        return Tile(
            block_m=32, block_k=32, num_warps=4, block_n=16, num_stages=3, lag=8, programs=264, backoff=100, spread=32,
        )  # fmt: skip
    mean = tokens * top_k / min(experts, tokens * top_k)
    block_n = 8 if 1 < tokens <= 8 else 16 if mean <= 8 else 32
    # Long reductions want loads in flight, short ones programs that cover for each other's ends.
    stages, programs = (4, 396 if tokens <= 8 else 264) if inner > 2048 or tokens <= 8 else (3, 528)
    return Tile(
        block_m=64, block_k=128, num_warps=4, block_n=block_n, num_stages=stages, lag=8 if tokens == 1 else 24,
        programs=programs, backoff=100, spread=32,
    )  # fmt: skip
