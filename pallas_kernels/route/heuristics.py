"""Tiles of the routing kernels: all of them belong to the arithmetic, none looks at the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 256
# What one program chooses from for its rows, all in registers; and by a loop that is written out.
MAX_PLACES, MAX_TOP_K = 512, 32
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
        return Tile(block_m=32, block_k=64, split=min(16, -(-hidden // 64)), num_warps=8 if experts > 256 else 4)
    return Tile(block_m=128, block_k=128, split=min(16, -(-hidden // 128)), num_warps=8)


def choice_warps(experts: int) -> int:
    """Warps of a program that chooses from finished logits, which it holds in registers."""
    return 16 if experts > 256 else 4
