"""Two chained products of equal numbers, whose result is known exactly, through every shipped tile (C31).

Rows of 1 times gate-up weights of 8 / H are 8, squared 64; times down weights of 64 / 2**n, with 2**n the power of two
from I on, and summed with weights of 2 together: 8192 * I / 2**n. Every step is exact in bf16, f16 and f32.
"""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
from edges import Edge, Runner, many_rows, one_launch

from moe_jax.pallas_kernels.experts import Tile, tile_for
from moe_jax.pallas_kernels.grouped_moe import Activation
from moe_jax.pallas_kernels.plan.specs import power_of_two
from moe_jax.pallas_kernels.prefill import PrefillTile, prefill_tile_for
from moe_jax.pallas_kernels.tuned.lookup import DATA

RELU2 = Activation(name="relu2", layout=None)
# H, I, E, k
SHAPES = {"qwen3": (2048, 768, 128, 8), "mixtral": (4096, 14336, 8, 2)}
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
MANY = (65, 256, 1024, 4096, 16384)


def constants(hidden: int, inner: int, top_k: int) -> tuple[float, float, float, float]:
    """Gate-up weight, down weight, routing weight and result."""
    assert hidden == power_of_two(hidden), f"8 / {hidden} is not exact"
    whole = power_of_two(inner)
    return 8 / hidden, 64 / whole, 2 / top_k, 8192 * inner / whole


def tiles(dtype: str) -> list[tuple[int, Tile]]:
    """Tiles of the one-launch kernel, with the least rows for which one is taken; tuned ones too."""
    found: dict[Tile, int] = {}
    for hidden, inner, experts, k in SHAPES.values():
        for rows in BUCKETS:
            found.setdefault(tile_for(rows, k, experts, hidden, inner, dtype), rows)
    names = {field.name for field in fields(Tile)}
    for path in sorted(DATA.glob("*.json")):
        for entry in json.loads(path.read_text())["operations"].get("expert_ffn", {}).get("entries", ()):
            if entry["dtype"] == dtype and set(entry["tile"]) == names:
                found.setdefault(Tile(**entry["tile"]), entry["tokens"])
    return [(rows, tile) for tile, rows in found.items()]


def prefill_tiles(dtype: str) -> list[PrefillTile]:
    """Tiles of the throughput path."""
    shapes = SHAPES.values()
    return list(dict.fromkeys(prefill_tile_for(t, k, e, h, i, dtype) for t in MANY for h, i, e, k in shapes))


def arrays(edge: Edge, dtype: type) -> tuple[dict[str, np.ndarray], float]:
    gate_up, down, scale, result = constants(edge.hidden, edge.inner, edge.top_k)
    ids = np.broadcast_to(np.arange(edge.top_k, dtype=np.int32), (edge.tokens, edge.top_k))
    made = {
        "x": np.ones((edge.tokens, edge.hidden), dtype),
        "ids": ids,
        "scale": np.full(ids.shape, scale, np.float32),
        "gate_up": np.full((edge.experts, edge.inner, edge.hidden), gate_up, dtype),
        "down": np.full((edge.experts, edge.hidden, edge.inner), down, dtype),
    }
    return made, result


def one_launch_is_exact(run: Runner, rows: int, tile: Tile, dtype: type) -> None:
    """Few rows of 128 with 64 between, as in the report; one row where the tile is for one, as long as its ring."""
    hidden = power_of_two(max(128, 64 * tile.ring))
    edge = Edge(tokens=1 if rows == 1 else 64, top_k=2, experts=2, hidden=hidden, inner=64, activation=RELU2)
    given, result = arrays(edge, dtype)
    got = one_launch(run, edge, np.dtype(dtype).name, given, tile)
    assert result == 8192
    np.testing.assert_array_equal(got.astype(np.float32), np.full(got.shape, 8192, np.float32))


def many_rows_are_exact(run: Runner, tile: PrefillTile, dtype: type) -> None:
    """The same with more rows than a block holds."""
    edge = Edge(tokens=tile.block + 17, top_k=2, experts=2, hidden=128, inner=64, activation=RELU2)
    given, result = arrays(edge, dtype)
    got = many_rows(run, edge, np.dtype(dtype).name, given, tile)
    assert result == 8192
    np.testing.assert_array_equal(got.astype(np.float32), np.full(got.shape, 8192, np.float32))
