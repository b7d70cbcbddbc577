"""Routings, plans and whole layers shared by the tests of the prefill kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from moe_jax.pallas_kernels.grouped_moe import Activation, ExpertWeights
from moe_jax.pallas_kernels.prefill import combine_spec, down_spec, gate_up_spec, plan_specs
from moe_jax.pallas_kernels.prefill.heuristics import MatmulTile, PrefillTile
from moe_jax.pallas_kernels.prefill.reference import Plan
from moe_jax.pallas_kernels.route import Routing
from moe_jax.pallas_kernels.spec import KernelSpec

Launch = Callable[[KernelSpec, Mapping[str, np.ndarray]], dict[str, np.ndarray]]


def small_tile(main: int = 16, tail: int = 0, extend: bool = False, **part: Any) -> PrefillTile:
    """A tile for small sizes: many blocks, several tiles of weights and steps of K."""
    one = MatmulTile(**({"block_m": 64, "block_k": 64, "num_warps": 4, "num_stages": 3, "group": 3} | part))
    return PrefillTile(main=main, tail=tail, extend=extend, gate_up=one, down=one)


def ids_of(rng: np.random.Generator, tokens: int, top_k: int, experts: int, kind: str = "random") -> np.ndarray:
    """Ids of one kind: ``random`` (some -1, some E, some experts empty), ``one`` (all on one expert), ``none``."""
    if kind == "none":
        return rng.choice(np.array([-1, experts], np.int32), (tokens, top_k))
    if kind == "one":
        return np.full((tokens, top_k), experts // 2, np.int32)
    ids = rng.integers(0, experts, (tokens, top_k)).astype(np.int32)
    ids[ids == experts // 3] = -1 if experts > 1 else 0
    ids[rng.random(ids.shape) < 0.1] = -1
    ids[rng.random(ids.shape) < 0.1] = experts
    return ids


def run_plan(
    launch: Launch, ids: np.ndarray, experts: int, block: int, weight_row: np.ndarray | None = None, slots: int = 0
) -> Plan:
    """The plan's launches, one after the other, into outputs that hold what no plan does (-1 is padding's)."""
    given = {"ids_ptr": ids}
    if weight_row is not None:
        given["weight_row_ptr"] = weight_row
    specs = plan_specs(*ids.shape, experts, block, slots=None if weight_row is None else slots)
    for spec in specs:
        dirty = {a.name: np.full(a.shape, -7, np.int32) for a in spec.outputs}
        after = launch(spec, dirty | {a.name: given[a.name] for a in spec.inputs if a.name in given})
        given |= {a.name: after[a.name] for a in spec.outputs}
    return Plan(*(given[a.name] for a in specs[-1].outputs))


def weights_of(
    rng: np.random.Generator, experts: int, hidden: int, inner: int, dtype: Any, activation: Activation, bias: bool
) -> ExpertWeights:
    """Random experts whose sums have about the size of one."""
    rows = activation.rows(inner)

    def random(*shape: int, scale: float) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32) * scale).astype(dtype)

    return ExpertWeights(
        gate_up=random(experts, rows, hidden, scale=hidden**-0.5),
        down=random(experts, hidden, inner, scale=inner**-0.5),
        gate_up_bias=random(experts, rows, scale=0.3) if bias else None,
        down_bias=random(experts, hidden, scale=0.3) if bias else None,
    )


def run_layer(
    launch: Launch,
    x: np.ndarray,
    routing: Routing,
    weights: ExpertWeights,
    activation: Activation,
    tile: PrefillTile,
    *,
    residual: np.ndarray | None = None,
    weight_row: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, Plan]:
    """Output, pair vectors ``[T, k, H]`` (NaN where there is none) and plan of one layer, launch by launch."""
    ids, scale = np.asarray(routing.ids), np.asarray(routing.weights)
    slots, hidden, inner = weights.down.shape
    experts = slots if weight_row is None else len(weight_row)
    shape = (*ids.shape, experts, hidden, inner)
    dtype = x.dtype.name
    plan = run_plan(launch, ids, experts, tile.block, weight_row, slots)
    blocks = dict(zip(("used_ptr", "block_row_ptr", "block_pair_ptr"), plan[:3], strict=True))

    def with_bias(given: dict[str, Any], bias: Any) -> dict[str, np.ndarray]:
        return {k: np.asarray(v) for k, v in given.items()} | ({} if bias is None else {"bias_ptr": np.asarray(bias)})

    first = gate_up_spec(
        *shape, dtype=dtype, activation=activation, tile=tile, slots=slots, bias=weights.gate_up_bias is not None
    )
    given = with_bias({"x_ptr": x, "weight_ptr": weights.gate_up} | blocks, weights.gate_up_bias)
    inner_rows = launch(first, given)["out_ptr"]
    second = down_spec(*shape, dtype=dtype, tile=tile, slots=slots, bias=weights.down_bias is not None)
    given = with_bias({"x_ptr": inner_rows, "weight_ptr": weights.down} | blocks, weights.down_bias)
    pair = launch(second, given)["out_ptr"]
    live = plan.block_pair.reshape(-1) >= 0
    for rows in (inner_rows, pair):
        assert np.isfinite(rows[live]).all()
        assert np.isnan(rows[~live]).all(), "padding was written"
    last = combine_spec(*ids.shape, *pair.shape, dtype=dtype, residual=residual is not None)
    given = {"pair_ptr": pair, "place_ptr": plan.place, "scale_ptr": scale}
    out = launch(last, given | ({} if residual is None else {"residual_ptr": residual}))["out_ptr"]
    vectors = np.where(plan.place[..., None] >= 0, pair[np.maximum(plan.place, 0)], np.asarray(np.nan, pair.dtype))
    return out, vectors, plan


def layer_in_f64(
    x: np.ndarray,
    routing: Routing,
    weights: ExpertWeights,
    activation: Activation,
    residual: np.ndarray | None = None,
    weight_row: np.ndarray | None = None,
) -> np.ndarray:
    """The layer expert by expert in f64, nothing rounded on the way."""
    ids, scale = np.asarray(routing.ids), np.asarray(routing.weights, np.float64)
    experts = weights.down.shape[0] if weight_row is None else len(weight_row)
    total = np.zeros(x.shape) if residual is None else residual.astype(np.float64)
    for e in range(experts):
        token, rank = np.nonzero(ids == e)
        if not len(token):
            continue
        row = e if weight_row is None else weight_row[e]
        h = x[token].astype(np.float64) @ np.asarray(weights.gate_up[row], np.float64).T
        if weights.gate_up_bias is not None:
            h = h + np.asarray(weights.gate_up_bias[row], np.float64)
        y = _activate(h, activation) @ np.asarray(weights.down[row], np.float64).T
        if weights.down_bias is not None:
            y = y + np.asarray(weights.down_bias[row], np.float64)
        np.add.at(total, token, scale[token, rank, None] * y)
    return total


def _activate(h: np.ndarray, a: Activation) -> np.ndarray:
    if a.name == "relu2":
        return np.square(np.maximum(h, 0))
    gate, up = (h[:, 0::2], h[:, 1::2]) if a.layout == "interleaved" else np.split(h, 2, axis=1)

    def sigmoid(v: np.ndarray) -> np.ndarray:
        return 0.5 * (1 + np.tanh(0.5 * v))

    if a.name == "gpt_oss_swiglu":
        assert a.limit is not None and a.alpha is not None
        gate, up = np.minimum(gate, a.limit), np.clip(up, -a.limit, a.limit)
        return gate * sigmoid(a.alpha * gate) * (up + 1)
    if a.name == "geglu_tanh":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    if a.name == "geglu_erf":
        from math import erf

        return 0.5 * gate * (1 + np.vectorize(erf)(gate / np.sqrt(2))) * up
    if a.limit is None:
        return gate * sigmoid(gate) * up
    up = np.clip(up, -a.limit, a.limit)
    if a.limit_after:
        return np.minimum(gate * sigmoid(gate), a.limit) * up
    gate = np.minimum(gate, a.limit)
    return gate * sigmoid(gate) * up


def random_layer(
    rng: np.random.Generator,
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    inner: int,
    dtype: str,
    activation: Activation,
    *,
    bias: bool = False,
    kind: str = "random",
) -> tuple[np.ndarray, Routing, ExpertWeights]:
    """Rows, a routing and experts, new for every call."""
    kept = jnp.dtype(dtype)
    x = rng.standard_normal((tokens, hidden), np.float32).astype(kept)
    ids = ids_of(rng, tokens, top_k, experts, kind)
    scale = (rng.random(ids.shape) + 0.1).astype(np.float32)
    return x, Routing(scale, ids), weights_of(rng, experts, hidden, inner, kept, activation, bias)


def relative(out: Any, exact: np.ndarray) -> float:
    """``‖out - exact‖ / ‖exact‖``; NaN where anything is."""
    return float(np.linalg.norm(np.asarray(out, np.float64) - exact) / np.linalg.norm(exact))
