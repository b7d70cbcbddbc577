"""The expert block through raw launches at sizes on the edges of tiles, by any runner: the interpreter's or the GPU's.

A runner is a function of a spec and its inputs by name that gives every array after the launch (see `arena`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from cases import ACTIVATIONS

import reference_numpy as truth
from moe_jax.pallas_kernels.experts import Tile, expert_ffn_spec, tile_for
from moe_jax.pallas_kernels.grouped_moe import Activation, ExpertWeights, MoEConfig
from moe_jax.pallas_kernels.plan import plan_spec
from moe_jax.pallas_kernels.prefill import (
    PrefillTile,
    combine_spec,
    down_spec,
    gate_up_spec,
    plan_specs,
    prefill_tile_for,
)
from moe_jax.pallas_kernels.route import RouterConfig
from moe_jax.pallas_kernels.spec import KernelSpec

type Runner = Callable[[KernelSpec, Mapping[str, np.ndarray]], dict[str, np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class Edge:
    """Rows, ranks, experts, H and I of a call."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    inner: int
    activation: Activation = ACTIVATIONS[0]
    biases: bool = False

    def __str__(self) -> str:
        return f"{self.tokens}x{self.top_k}of{self.experts}-{self.hidden}x{self.inner}-{self.activation.name}"


# One below, at and one above what tiles are multiples of; sizes of one; rows that fill no block and rows that fill one.
EDGES = (
    Edge(tokens=1, top_k=1, experts=1, hidden=1, inner=1),
    Edge(tokens=1, top_k=3, experts=5, hidden=127, inner=31, activation=ACTIVATIONS[1], biases=True),
    Edge(tokens=2, top_k=2, experts=3, hidden=128, inner=32),
    Edge(tokens=3, top_k=1, experts=2, hidden=129, inner=33, activation=ACTIVATIONS[4], biases=True),
    Edge(tokens=5, top_k=2, experts=3, hidden=7, inner=63, activation=ACTIVATIONS[6]),
    Edge(tokens=9, top_k=3, experts=20, hidden=65, inner=64, activation=ACTIVATIONS[3], biases=True),
    Edge(tokens=33, top_k=1, experts=2, hidden=63, inner=129, activation=ACTIVATIONS[2]),
)
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}


def made(edge: Edge, dtype: str, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Random arrays of a call, a slot of -1 and one of E among them where there are rows enough; and the f64 result."""
    rng, kind = np.random.default_rng(seed), ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    hidden, inner, experts = edge.hidden, edge.inner, edge.experts
    rows = edge.activation.rows(inner)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(kind)

    ids = np.argsort(rng.random((edge.tokens, experts)), axis=1)[:, : edge.top_k].astype(np.int32)
    if edge.tokens > 2:
        ids[1], ids[2, -1] = -1, experts
    scale = (rng.random(ids.shape) + 0.1).astype(np.float32)
    arrays = {
        "x": normal(edge.tokens, hidden),
        "ids": ids,
        "scale": scale,
        "gate_up": normal(experts, rows, hidden, scale=hidden**-0.5),
        "down": normal(experts, hidden, inner, scale=inner**-0.5),
    }
    if edge.biases:
        arrays |= {"gate_up_bias": normal(experts, rows), "down_bias": normal(experts, hidden)}
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    weights = ExpertWeights(**{name: arrays[name] for name in names if name in arrays})
    config = MoEConfig(router=RouterConfig(experts=experts, top_k=edge.top_k), activation=edge.activation)
    return arrays, truth.grouped_moe(arrays["x"], scale, ids, weights, config)


def given(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays under the names of the kernels' parameters."""
    return {f"{name}_ptr": array for name, array in arrays.items()}


def one_launch(
    run: Runner, edge: Edge, dtype: str, arrays: Mapping[str, np.ndarray], tile: Tile | None = None
) -> np.ndarray:
    """Grouping and the one-launch kernel of 1 to 64 rows."""
    shape = (edge.tokens, edge.top_k, edge.experts)
    tile = tile or tile_for(*shape, edge.hidden, edge.inner, dtype)
    spec = expert_ffn_spec(
        *shape,
        edge.hidden,
        edge.inner,
        dtype=dtype,
        activation=edge.activation,
        gate_up_bias=edge.biases,
        down_bias=edge.biases,
        # The interpreter runs one program after another: a few show all that there is to see.
        tile=replace(tile, programs=min(tile.programs, 8)),
    )
    inputs = given(arrays)
    if edge.tokens > 1:
        inputs |= run(plan_spec(*shape, tile.block_n), inputs)
    return run(spec, {a.name: inputs[a.name] for a in spec.inputs if a.name in inputs})["out_ptr"]


def many_rows(
    run: Runner, edge: Edge, dtype: str, arrays: Mapping[str, np.ndarray], tile: PrefillTile | None = None
) -> np.ndarray:
    """Grouping, gate-up, down and sum of the throughput path."""
    shape = (edge.tokens, edge.top_k, edge.experts)
    full = (*shape, edge.hidden, edge.inner)
    tile = tile or prefill_tile_for(*full, dtype)
    inputs = given(arrays)
    for spec in plan_specs(*shape, tile.block):
        inputs |= run(spec, {a.name: inputs[a.name] for a in spec.inputs if a.name in inputs})
    blocks = {name: inputs[name] for name in ("used_ptr", "block_row_ptr", "block_pair_ptr")}

    def product(spec: KernelSpec, x: np.ndarray, name: str) -> np.ndarray:
        more = {"x_ptr": x, "weight_ptr": arrays[name]}
        if edge.biases:
            more["bias_ptr"] = arrays[f"{name}_bias"]
        return run(spec, blocks | more)["out_ptr"]

    options = {"dtype": dtype, "tile": tile, "bias": edge.biases}
    inner = product(gate_up_spec(*full, activation=edge.activation, **options), arrays["x"], "gate_up")
    pair = product(down_spec(*full, **options), inner, "down")
    last = combine_spec(edge.tokens, edge.top_k, pair.shape[0], edge.hidden, dtype=dtype)
    return run(last, {"pair_ptr": pair, **{name: inputs[name] for name in ("place_ptr", "scale_ptr")}})["out_ptr"]


PATHS = {"one launch": one_launch, "many rows": many_rows}


def compare(run: Runner, path: str, edge: Edge, dtype: str, seed: int) -> None:
    arrays, want = made(edge, dtype, seed)
    got = PATHS[path](run, edge, dtype, arrays).astype(np.float64)
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= TOLERANCE[dtype] * np.abs(want).max()
    if edge.tokens > 2:
        assert not got[1].any()
