"""Tiles of the throughput path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class MatmulTile:
    """What one program of a grouped matmul computes, and how.

    Attributes:
        block_m: weight rows.
        block_k: reduced elements of a step.
        num_warps, num_stages: as Triton means them.
        group: blocks that run side by side on one tile of weights.
        once: weights are read once, so L2 need not keep them.
        programs: programs that share all tiles; 0: one for each tile.
    """

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8
    once: bool = False
    programs: int = 0


@dataclass(frozen=True, kw_only=True)
class PrefillTile:
    """The shape of the plan's blocks and the tiles of the two matmuls.

    Attributes:
        main: places that one accumulator holds, a power of two.
        tail: places of a second, smaller accumulator, a power of two; 0: none. Blocks with no more pairs than that
            use it alone.
        extend: a block has main + tail places rather than main.
        gate_up, down: tiles of the two launches.
    """

    main: int
    tail: int
    extend: bool
    gate_up: MatmulTile
    down: MatmulTile

    @property
    def block(self) -> int:
        """Places of a block."""
        return self.main + self.tail if self.extend else self.main


def prefill_tile_for(
    tokens: int, top_k: int, experts: int, hidden: int, inner: int, dtype: str, *, capability: int = 90
) -> PrefillTile:
    """The tile for a launch, by the pairs that an expert has on average.

    Args:
        capability: of the device; below 90 and above it tiles fit in 99 KiB of shared memory, which all have.
    """
    mean, hopper = tokens * top_k / experts, capability == 90
    if dtype == "float32" or hidden % 8 or inner % 8:
        # No matrix unit; or rows that do not begin at multiples of 16 bytes and are loaded piece by piece. Both take
        # registers.
        part = MatmulTile(block_m=64, block_k=32, num_warps=4, num_stages=2)
        return PrefillTile(main=16 if mean <= 16 else 32, tail=0, extend=False, gate_up=part, down=part)
    if mean <= 96:
        # Bound by reading the weights, once: an expert's pairs in one block, weights not kept in L2.
        main, tail = (16, 0) if mean <= 9 else (16, 16) if mean <= 24 else (64, 0) if mean <= 48 else (64, 32)
        wide = main > 32 and hopper
        part = MatmulTile(
            block_m=256 if wide else 128, block_k=64, num_warps=8 if wide else 4, num_stages=4, group=2, once=True
        )
        # Fewer rows a tile leave more programs in flight; gate-up of few rows a block likes long steps.
        down = replace(part, block_m=128, num_warps=4, num_stages=3 if wide else 4)
        up = replace(part, block_m=64, block_k=128) if main == 16 and hopper else part
        return PrefillTile(main=main, tail=tail, extend=tail > 0, gate_up=up, down=down)
    if not hopper:
        part = MatmulTile(block_m=128, block_k=64, num_warps=8, num_stages=3, group=16)
        return PrefillTile(main=128, tail=32, extend=False, gate_up=part, down=part)
    if mean <= 400:
        part = MatmulTile(block_m=128, block_k=64, num_warps=8, num_stages=4, group=16)
        return PrefillTile(main=256, tail=32, extend=True, gate_up=part, down=replace(part, group=8))
    part = MatmulTile(block_m=256, block_k=64, num_warps=8, num_stages=4, group=16)
    return PrefillTile(main=128, tail=32, extend=False, gate_up=part, down=part)


def candidates(shape: Sequence[int], tokens: int) -> list[PrefillTile]:
    """bf16 tiles to try for (H, I, E, k) on sm_90, the heuristic's first."""
    hidden, inner, experts, k = shape
    base = prefill_tile_for(tokens, k, experts, hidden, inner, "bfloat16")
    both: list[tuple[dict, dict]] = [({}, {"num_stages": 3})]
    if tokens * k / experts > 96:
        both += [
            ({"main": 256}, {"block_m": 128}),
            ({}, {"group": 8}),
            ({}, {"block_m": 128, "num_warps": 4, "num_stages": 3}),
        ]
    else:
        both += [({}, {"block_m": 128, "num_warps": 4}), ({}, {"block_m": 64, "block_k": 128, "num_warps": 4})]
    tiles = [
        replace(base, **form, gate_up=replace(base.gate_up, **part), down=replace(base.down, **part))
        for form, part in [({}, {}), *both]
    ]
    return list(dict.fromkeys(tiles))
