"""Tiles of decode attention. TILE and SPLIT_TILES fix the arithmetic and are the same for every launch."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 64
# Keys of a tile, tiles of a split, splits that the second pass reduces at a time.
TILE = 128
SPLIT_TILES = 4
CHUNK = 16
# Query heads of one program: the matrix unit's rows. 64 would choose another instruction.
MAX_BLOCK_M = 32


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the work is spread. None of it changes a bit.

    Attributes:
        programs: programs that share the work; as many as the device holds at once.
        fill: with fewer (split, head) pairs than this, programs take tiles instead of splits.
        num_warps, num_stages: as Triton means them.
        combine_warps: warps of the second pass. These belong to the arithmetic and depend on nothing.
    """

    programs: int = 264
    fill: int = 264
    num_warps: int = 4
    num_stages: int = 2
    combine_warps: int = 4


def group_rows(rows_of_sequence: int, share: int) -> int:
    """Rows of one sequence that a program takes together, for ``share`` query heads of a key head."""
    fit = max(1, MAX_BLOCK_M // share)
    while rows_of_sequence % fit:
        fit -= 1
    return fit
