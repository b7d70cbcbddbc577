"""Tiles of decode attention. What fixes the arithmetic is the same for every launch."""

from __future__ import annotations

from dataclasses import dataclass

from ..device import shared_memory

MAX_ROWS = 64
# Pieces of a sequence: a program multiplies two numbers of them in 32 bits.
MAX_PIECES = 46340
# Keys of a tile, half of them in float32.
TILE = 64
# Of the second launch: a thread for each element of a head of 128.
COMBINE_WARPS = 4
# Query heads of one program: the matrix unit's rows. 64 would choose another instruction.
MAX_BLOCK_M = 32


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the work is spread.

    Attributes:
        split, stretch: tiles of a split and splits of a stretch. These belong to the arithmetic.
        programs: programs that share the work; as many as the device holds at once.
        at_once: tiles at most that a program takes one after the other, without an end of its loads.
        fill: programs that the work is to keep busy; with less than a stretch for each, pieces are splits.
        num_warps, num_stages: as Triton means them.
        linger: nanoseconds that programs without work stay, where attention appends: else the weights of the next
            launch would come into their place at once, and slow what the others read.
    """

    split: int = 2
    stretch: int = 8
    programs: int = 264
    at_once: int = 32
    fill: int = 264
    num_warps: int = 4
    num_stages: int = 3
    linger: int = 1200


def pieces_at_once(stretch: int, rows: int, heads: int) -> tuple[int, int]:
    """Pieces that a program of the second launch asks for at once, where there are few and where there are many: whole
    stretches of splits. Few programs may have registers for many; of many as many as can be shall be resident.
    """
    programs = rows * heads
    few, many = (16, 32) if programs <= 264 else (16, 16) if programs <= 792 else (8, 8)
    return stretch * max(1, few // stretch), stretch * max(1, many // stretch)


def max_dim(dtype: str) -> int:
    """The longest head whose sums fit registers."""
    return 128 if dtype == "float32" else 256


def tile_keys(dtype: str) -> int:
    """Keys of a tile. Float32 goes through no matrix unit, and takes the more registers for that."""
    return TILE // 2 if dtype == "float32" else TILE


def schedule_for(
    rows: int, dim: int = 128, dtype: str = "bfloat16", *, together: int = 16, capability: int = 90
) -> Schedule:
    """One row has few pieces: several tiles in flight, and no more programs than are resident with them, so that the
    next kernel is not kept from starting. More rows: two programs on a multiprocessor.

    Args:
        together: heads of a program; by 8 warps the sums of more than 16 stay in registers.
        capability: of the device; says how many keys fit its shared memory.
    """
    wide, small = dim > 128 or dtype == "float32", shared_memory(capability) <= 99
    num_warps = 8 if wide or together > 16 else 4
    if rows == 1 and not wide and not small:
        return Schedule(num_stages=5, num_warps=num_warps, programs=132, fill=132)
    return Schedule(num_stages=2 if dim > 128 and small else 3, num_warps=num_warps)


def group_rows(rows_of_sequence: int, share: int) -> int:
    """Rows of one sequence that a program takes together, for ``share`` query heads of a key head."""
    fit = max(1, MAX_BLOCK_M // share)
    while rows_of_sequence % fit:
        fit -= 1
    return fit
