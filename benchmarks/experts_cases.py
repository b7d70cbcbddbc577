"""Launches and tiles that are built ahead and searched: shared by building (no GPU) and tuning."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from moe_jax.bench.cases import NAMED, Shape
from moe_jax.bench.launches import DTYPE, layer_launches, shipped_tile
from moe_jax.pallas_kernels.experts import MAX_ROWS, Tile, tile_for
from moe_jax.pallas_kernels.experts.heuristics import of_one_arithmetic
from moe_jax.pallas_kernels.prefill import PrefillTile
from moe_jax.pallas_kernels.spec import KernelSpec
from moe_jax.pallas_kernels.tuned.lookup import arithmetic_of

BUCKETS = (1, 4, 16, 64)


class Planned(NamedTuple):
    """A layer's launches before they are bound to a spec, so that another process can do it."""

    shape: Shape
    tokens: int
    tile: Tile | PrefillTile
    pdl: bool

    def specs(self) -> list[KernelSpec]:
        return [one.spec for one in layer_launches(self.shape, self.tokens, self.tile, pdl=self.pdl)]


class Arithmetic(NamedTuple):
    """What one (H, I, dtype) has one value of, whatever the rows."""

    block_m: int
    block_k: int
    num_warps: int


def heuristic(shape: Shape, tokens: int) -> Tile:
    hidden, inner, experts, k = shape
    return tile_for(tokens, k, experts, hidden, inner, DTYPE)


def arithmetics(shape: Shape) -> list[Arithmetic]:
    """Values to try, the heuristic's first."""
    base = heuristic(shape, 4)
    first = Arithmetic(base.block_m, base.block_k, base.num_warps)
    return list(dict.fromkeys([first, *(Arithmetic(*v) for v in ((64, 64, 4), (128, 64, 4), (32, 128, 4)))]))


def tiles(shape: Shape, tokens: int, arithmetic: Arithmetic) -> list[Tile]:
    """Tiles to try for a row count, the heuristic's first."""
    base = heuristic(shape, tokens)
    if arithmetic_of("expert_ffn", dataclasses.asdict(base)) != arithmetic_of("expert_ffn", arithmetic._asdict()):
        base = of_one_arithmetic(dataclasses.replace(base, **arithmetic._asdict()))

    def change(**fields: int) -> Tile:
        return dataclasses.replace(base, **fields)

    if tokens == 1:
        found = [
            *(change(block_n=n, num_stages=s, ring=0, ahead=0) for n in (8, 16) for s in (3, 4, 5, 6)),
            change(lag=4, ring=0, ahead=0), change(lag=2, block_n=8, num_stages=6, ring=0, ahead=0),
            *(change(block_m=2 * base.block_m, num_warps=8, block_n=8, num_stages=s, ring=0, ahead=0)
              for s in (3, 4) if (base.block_m, base.num_warps) == (64, 4)),
        ]  # fmt: skip
        if base.ring:
            found += [change(ring=ring, ahead=ahead) for ring in range(6, 10) for ahead in range(4, ring)]
    else:
        narrow = 8 if tokens <= 8 else base.block_n
        found = [
            *(change(block_n=narrow, num_stages=s, programs=p) for s, p in ((3, 528), (4, 396), (4, 264), (6, 264))),
            *(change(num_stages=3, programs=p) for p in (396, 528)),
            change(block_n=8, num_stages=3, programs=528, lag=48),
            change(lag=12), change(lag=32), change(block_n=2 * base.block_n if base.block_n < 32 else 16),
            change(backoff=0), change(backoff=0, spread=1), change(backoff=20), change(backoff=300),
        ]  # fmt: skip
    return list(dict.fromkeys([base, *found]))


def shipped(shape: Shape, tokens: int, device_kind: str, capability: int) -> list[Planned]:
    """What a device of a kind runs at a row count, with programmatic dependent launch and without."""
    tile, _ = shipped_tile(shape, tokens, device_kind, capability)
    pdls = (False, True) if tokens <= MAX_ROWS and capability >= 90 else (False,)
    return [Planned(shape, tokens, tile, pdl) for pdl in pdls]


def searched(shape: Shape, tokens: int) -> list[Planned]:
    """Everything that tuning may time at a row count."""
    found = [tile for arithmetic in arithmetics(shape) for tile in tiles(shape, tokens, arithmetic)]
    return [Planned(shape, tokens, tile, False) for tile in found]


def default_shapes() -> list[Shape]:
    return list(NAMED.values())
