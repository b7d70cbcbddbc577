"""Tiles of the routing kernel: all of them belong to the arithmetic, none looks at the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 256
# Rows of a block, the same at every number of rows.
BLOCK_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Tile:
    """What one program computes before the last of a block chooses.

    Attributes:
        block_m: experts; block_k: reduced elements a step; split: parts that H is cut into.
        num_warps: as Triton means it.
    """

    block_m: int
    block_k: int
    split: int
    num_warps: int


def tile_for(hidden: int, experts: int, dtype: str) -> Tile:
    """The tile of a router."""
    if dtype == "float32":
        return Tile(block_m=32, block_k=64, split=min(16, -(-hidden // 64)), num_warps=4)
    return Tile(block_m=128, block_k=128, split=min(16, -(-hidden // 128)), num_warps=8)
