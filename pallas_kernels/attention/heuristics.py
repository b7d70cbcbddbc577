"""Tiles of decode attention. TILE, FAN and CHUNK fix the arithmetic and are the same for every launch."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 64
# Keys of a tile; tiles of a run and runs of a split; splits that the second pass reduces at a time.
TILE = 64
FAN = 4
CHUNK = 16
# Query heads of one program: the matrix unit's rows. 64 would choose another instruction.
MAX_BLOCK_M = 32


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the work is spread. None of it changes a bit.

    Attributes:
        programs: programs that share the work; as many as the device holds at once.
        fill: with fewer pairs of split and key head than this, programs take runs.
        num_warps, num_stages: as Triton means them.
        combine_warps: warps of the second pass. These belong to the arithmetic and depend on nothing.
    """

    programs: int = 264
    fill: int = 128
    num_warps: int = 4
    num_stages: int = 3
    combine_warps: int = 4


def schedule_for(rows: int) -> Schedule:
    """One row has few pieces: all keys of a run in flight. More rows: two programs on a multiprocessor."""
    return Schedule(num_stages=5 if rows == 1 else 3)


def group_rows(rows_of_sequence: int, share: int) -> int:
    """Rows of one sequence that a program takes together, for ``share`` query heads of a key head."""
    fit = max(1, MAX_BLOCK_M // share)
    while rows_of_sequence % fit:
        fit -= 1
    return fit
