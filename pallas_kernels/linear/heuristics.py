"""Tiles of the small-row matmul. What fixes the arithmetic is chosen without looking at the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

from ..device import shared_memory

MAX_ROWS = 64
# Elements of K in a step of the sums of squares; steps of the product are as long, or multiples of it with ``early``.
STEP = 128


@dataclass(frozen=True, kw_only=True)
class Tile:
    """What one program computes, and how.

    Attributes:
        split: parts of K in programs of their own. Belongs to the arithmetic: may depend on (N, K, dtype) only.
        block_k: reduced elements of a product. Up to `STEP` it belongs to the arithmetic; a multiple of that takes
            several steps in one product, which the matrix unit adds up in the same order.
        block_m: weight rows, num_warps: as Triton means it; 4 warps for each 64 rows, so that the matrix
            instruction is one and the same.
        block_n: batch rows, at least the rows of the launch.
        num_stages: loads in flight.
        early: all weights of a part are read into registers before anything else, before the wait for the kernel
            before. A part is a few steps then.
    """

    block_k: int
    split: int
    block_m: int
    num_warps: int
    block_n: int
    num_stages: int
    early: bool = False


def tile_for(rows: int, inputs: int, outputs: int, dtype: str, *, capability: int = 90) -> Tile:
    """The tile for a launch of at most `MAX_ROWS` rows.

    Args:
        capability: of the device; says how many loads fit its shared memory.
    """
    block_n = max(8, 1 << (rows - 1).bit_length())
    if dtype == "float32":
        return Tile(block_m=32, block_k=32, split=1, num_warps=4, block_n=max(16, block_n), num_stages=3)
    block_m, block_k = 64, STEP
    # All weights of a layer's projection in flight at once want some 250 programs; a part has two steps at least.
    tiles, split = -(-outputs // block_m), 1
    while tiles * split < 240 and inputs // (2 * split * block_k) >= 2:
        split *= 2
    if rows > 16:
        # Rows are as many bytes as weights here: half the programs read them half as often.
        programs = -(-outputs // 128) * split
        stages = 2 if 132 < programs <= 264 else 4 if shared_memory(capability) > 99 else 3
        return Tile(block_k=block_k, split=split, block_m=128, num_warps=8, block_n=block_n, num_stages=stages)
    even = not inputs % (split * block_k) and not outputs % block_m
    early = even and inputs // (split * block_k) <= 4
    # Three programs on a multiprocessor must fit its shared memory.
    stages = 4 if block_n <= 8 else 3
    return Tile(
        block_k=block_k, split=split, block_m=block_m, num_warps=4, block_n=block_n, num_stages=stages, early=early
    )  # fmt: skip
