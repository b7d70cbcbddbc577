"""Cells, tiles and compiling of the prefill bench: nothing here needs a GPU."""

from __future__ import annotations

import dataclasses

from moe_jax.bench.cases import NAMED, Shape
from moe_jax.bench.layer import SWIGLU
from moe_jax.pallas_kernels import compiled
from moe_jax.pallas_kernels.prefill import (
    MatmulTile,
    PrefillTile,
    combine_spec,
    down_spec,
    gate_up_spec,
    plan_specs,
    prefill_tile_for,
)
from moe_jax.pallas_kernels.spec import KernelSpec

CELLS: dict[str, tuple[Shape, int]] = {
    **{f"qwen3:{rows}": (NAMED["qwen3-30b-a3b"], rows) for rows in (256, 4096, 1024, 128, 512)},
    **{f"mixtral:{rows}": (NAMED["mixtral-8x7b"], rows) for rows in (256, 4096, 1024, 128, 512)},
    "deepseek:16384": (NAMED["deepseek-v3-ep4"], 16384),
}


def _tile(block_m: int, num_warps: int, num_stages: int, *, block_k: int = 64, **rest) -> MatmulTile:
    return MatmulTile(block_m=block_m, block_k=block_k, num_warps=num_warps, num_stages=num_stages, **rest)


def _forms(mean: float) -> list[tuple[int, int, bool]]:
    """Blocks to try: main, tail, extend."""
    if mean <= 9:
        return [(16, 0, False), (32, 0, False)]
    if mean <= 24:
        return [(32, 0, False), (16, 16, True)]
    if mean <= 48:
        return [(64, 0, False), (32, 16, True)]
    if mean <= 96:
        return [(64, 32, True), (64, 16, True), (128, 0, False)]
    if mean <= 200:
        return [(128, 32, True), (128, 32, False)]
    if mean <= 400:
        return [(128, 32, False), (256, 32, True), (128, 64, False)]
    return [(128, 32, False), (256, 32, False)]


def _parts(mean: float, main: int) -> list[MatmulTile]:
    """Tiles to try on blocks of one form."""
    if mean <= 24:
        once = {"once": True, "group": 2}
        return [
            _tile(128, 4, 4, **once), _tile(128, 4, 5, **once), _tile(64, 4, 4, block_k=128, **once),
            _tile(64, 4, 6, **once), _tile(256, 8, 4, **once),
        ]  # fmt: skip
    if mean <= 96:
        once = {"once": True, "group": 2}
        return [
            _tile(256, 8, 4, **once), _tile(256, 8, 3, **once), _tile(128, 4, 4, **once), _tile(128, 4, 3, **once),
            _tile(128, 8, 4, **once),
        ]  # fmt: skip
    wide = 128 if main == 256 else 256
    tiles = [
        _tile(wide, 8, 4, group=16), _tile(wide, 8, 3, group=16), _tile(wide, 8, 4, group=8),
        _tile(wide, 8, 4, group=16, programs=132),
    ]  # fmt: skip
    return tiles if main == 256 else [*tiles, _tile(128, 4, 3, group=16)]


def tiles_of(cell: str) -> list[PrefillTile]:
    """Tiles of a cell, the shipped one first; both matmuls of one have the same tile."""
    (hidden, inner, experts, k), tokens = CELLS[cell]
    mean = tokens * k / experts
    found = [prefill_tile_for(tokens, k, experts, hidden, inner, "bfloat16")]
    for main, tail, extend in _forms(mean):
        found += [
            PrefillTile(main=main, tail=tail, extend=extend, gate_up=part, down=part) for part in _parts(mean, main)
        ]
    return list(dict.fromkeys(found))


def matmul_specs(cell: str, tile: PrefillTile) -> tuple[KernelSpec, KernelSpec]:
    """Gate-up and down of a cell, bf16."""
    (hidden, inner, experts, k), tokens = CELLS[cell]
    first = gate_up_spec(tokens, k, experts, hidden, inner, dtype="bfloat16", activation=SWIGLU, tile=tile)
    return first, down_spec(tokens, k, experts, hidden, inner, dtype="bfloat16", tile=tile)


def shared_specs(cell: str, tile: PrefillTile) -> tuple[KernelSpec, ...]:
    """Grouping (one launch or three), then the sum over a token's pairs."""
    (hidden, _, experts, k), tokens = CELLS[cell]
    plan = plan_specs(tokens, k, experts, tile.block)
    places = plan[-1].arguments[-2].shape
    return (*plan, combine_spec(tokens, k, places[0] * places[1], hidden, dtype="bfloat16"))


def build(job: tuple[str, PrefillTile, int]) -> tuple[compiled.CompiledKernel, compiled.Resources]:
    """Compile the job's launch: 0 gate-up, 1 down, 2 and on those of `shared_specs`."""
    cell, tile, which = job
    spec = matmul_specs(cell, tile)[which] if which < 2 else shared_specs(cell, tile)[which - 2]
    kernel = compiled.compile_spec(spec, 90)
    return kernel, compiled.resources(kernel)


def short(tile: PrefillTile, which: int) -> str:
    """A tile in a few letters."""
    part = (tile.gate_up, tile.down)[which]
    form = f"n{tile.main}{'+' if tile.extend else '/'}{tile.tail}"
    text = f"{form} m{part.block_m} k{part.block_k} w{part.num_warps} s{part.num_stages} g{part.group}"
    return text + (" once" if part.once else "") + (f" p{part.programs}" if part.programs else "")


def joined(gate_up: PrefillTile, down: PrefillTile) -> PrefillTile:
    """One tile's gate-up with another's down, over blocks of the same form."""
    return dataclasses.replace(gate_up, down=down.down)
