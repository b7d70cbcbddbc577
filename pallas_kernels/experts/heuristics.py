"""Tiles of the expert kernel. What fixes the arithmetic is chosen without looking at the number of rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ..errors import InvalidArgument

MAX_ROWS = 64
# The kernel for one row: pairs, a warp for each; reduced elements of a step; outputs of a program.
PAIRS = 8
ROW_DEPTH = 64
ROW_OUTPUTS = 16
MOST_INNER = 1536
ROW_DEVICES = ("H100 80GB HBM3", "H100 NVL", "H200", "GH200", "H800")  # whole ones have 132 multiprocessors


@dataclass(frozen=True, kw_only=True)
class Tile:
    """What one program computes, and how.

    Attributes:
        block_m: weight rows, block_k: reduced elements a step, num_warps: as Triton means it. These belong to the
            arithmetic: they may depend on (H, I, dtype) only, but for `tuned.lookup.arithmetic_of`.
        block_n: batch rows of one expert.
        num_stages: loads in flight.
        lag: blocks of gate-up that start before the first down tile.
        programs: programs that share the tiles of two rows or more; as many as the device holds at once.
        backoff: nanoseconds between two looks at an arrival count.
        spread: 32-bit words between the arrival counts of two blocks; 32 gives each a cache line.
        ring: for one row, steps of weights that shared memory has places for; one is multiplied while the others come.
            0: the kernel of any number of rows. Of the rest the other one takes ``spread`` only.
        ahead: steps of the down product that it asks for before it looks for activations, which takes until these have
            come.
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
    ring: int = 0
    ahead: int = 0

    def __post_init__(self) -> None:
        for name in ("block_m", "block_k", "num_warps", "block_n"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise InvalidArgument(name, where="Tile", got=size, wanted="a power of two")
        for name, least in (("num_stages", 1), ("lag", 1), ("programs", 1), ("backoff", 0), ("spread", 1)):
            if getattr(self, name) < least:
                raise InvalidArgument(name, where="Tile", got=getattr(self, name), wanted=f"at least {least}")


def down_split(inner: int) -> int:
    """Parts that the down projection's reduction is cut into, for enough tiles at one row. Fixes the arithmetic."""
    return max(1, min(8, inner // 3584))


def tile_for(
    tokens: int, top_k: int, experts: int, hidden: int, inner: int, dtype: str, *, capability: int = 90
) -> Tile:
    """The tile for a launch of at most `MAX_ROWS` rows.

    Args:
        capability: of the device, 90 for 9.0; says whether one row has a kernel of its own.
    """
    if dtype == "float32":
        return Tile(
            block_m=32, block_k=32, num_warps=4, block_n=16, num_stages=3, lag=8, programs=264, backoff=100, spread=32,
        )  # fmt: skip
    mean = tokens * top_k / min(experts, tokens * top_k)
    block_n = 8 if 1 < tokens <= 8 else 16 if mean <= 8 else 32
    # Long reductions want loads in flight, short ones programs that cover for each other's ends.
    if inner > 2048 or tokens <= 8:
        stages, programs = 4, 396 if tokens <= 8 else 264
    else:
        stages, programs = 3, 396 if tokens <= 32 else 528
    tile = Tile(
        block_m=64, block_k=128, num_warps=4, block_n=block_n, num_stages=stages, lag=8 if tokens == 1 else 24,
        programs=programs, backoff=100, spread=32,
    )  # fmt: skip
    if tokens > 1 or not 90 <= capability < 100:
        return tile
    if row_refusal(top_k, hidden, inner) is None and _has_gluon():
        return replace(tile, ring=8, ahead=6)
    # One row and long reductions: a program for each tile, so tiles of twice the rows come to an end half as often.
    return replace(tile, block_m=128, num_warps=8, block_n=8, num_stages=3) if inner > 2048 else tile


@functools.cache
def _has_gluon() -> bool:
    """Whether this Triton has what the kernel for one row is written in: its lower level moves between releases."""
    try:
        from . import row_gluon  # noqa: F401 (only whether it can be)
    except (ImportError, AttributeError):
        return False
    return True


def row_refusal(top_k: int, hidden: int, inner: int) -> str | None:
    """Why one row does not go to the kernel of its own, or None.

    It has a program for `ROW_OUTPUTS` outputs, and one fills a multiprocessor: they should be about as many as a 9.0
    has, whose matrix instruction is the one that gives both kernels equal bits.
    """
    if not PAIRS // 2 < top_k <= PAIRS:
        return f"{top_k} experts a row: it has a warp for each of {PAIRS}"
    if hidden % ROW_DEPTH or inner % ROW_DEPTH:
        return f"H={hidden} and I={inner}: it takes multiples of {ROW_DEPTH}"
    if not 96 <= hidden // ROW_OUTPUTS <= 132:
        return f"H={hidden}: {hidden // ROW_OUTPUTS} programs, a 9.0 has 132 multiprocessors"
    if inner > MOST_INNER:
        return f"I={inner}: activations of at most {MOST_INNER} fit beside the weights"
    return None


def of_device(tile: Tile, device_kind: str) -> Tile:
    """The tile, without the kernel for one row where a device may have fewer multiprocessors than that has programs.

    Then some programs would run after the others, and the kernel takes nearly twice as long.
    """
    whole = "PCIe" not in device_kind and "MIG" not in device_kind
    return tile if whole and any(name in device_kind for name in ROW_DEVICES) else replace(tile, ring=0, ahead=0)


def of_one_arithmetic(tile: Tile) -> Tile:
    """The tile, without the kernel for one row where its matrix instruction is not that of other row counts' tiles."""
    return tile if tile.block_m == 16 * tile.num_warps else replace(tile, ring=0, ahead=0)
