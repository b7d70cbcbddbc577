"""Cases of the expert block that need a suite of their own: the worst skew at the largest size, alternating columns."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import backends as bench
import reference_numpy as truth
from backends import GPT_OSS, assert_close, layer, normal, quick, random_ids, routing
from moe_jax import hf_names
from moe_jax.pallas_kernels.grouped_moe import Activation, ExpertWeights, MoEConfig, grouped_moe, pack_experts
from moe_jax.pallas_kernels.grouped_moe.api import GROUPED_MOE
from moe_jax.pallas_kernels.route import RouterConfig, Routing

every_backend = pytest.mark.parametrize("backend", bench.backends_of(GROUPED_MOE))


def by_expert(x: jax.Array, r: Routing, weights: ExpertWeights) -> np.ndarray:
    """A SwiGLU layer in f64, an expert at a time: the loops of `reference_numpy` over rows take a minute here."""
    out, rows, ids, shares = np.zeros(x.shape), truth.f64(x), np.asarray(r.ids), truth.f64(r.weights)
    for expert, (gate_up, down) in enumerate(zip(truth.f64(weights.gate_up), truth.f64(weights.down), strict=True)):
        tokens, ranks = np.nonzero(ids == expert)
        gate, up = np.split(rows[tokens] @ gate_up.T, 2, axis=1)
        out[tokens] += shares[tokens, ranks, None] * ((gate / (1 + np.exp(-gate)) * up) @ down.T)
    return out


@every_backend
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("tokens", [64, 8192])
def test_C26_the_worst_skew_needs_no_more_memory_than_an_even_load(tokens: int, top_k: int, backend: str) -> None:
    """One compiled program, with its memory planned, serves an even load and all tokens on the same experts."""
    experts, hidden, inner = 32, 64, 48
    config, weights = layer(experts, top_k, hidden, inner)
    x, even = normal(1, (tokens, hidden)), random_ids(2, tokens, top_k, experts)
    step = jax.jit(lambda x, r, w: grouped_moe(x, r, w, config, backend=backend))
    with bench.served(backend, tokens):
        program = step.lower(x, routing(even), weights).compile()
        most = 4 * (4 * tokens * top_k * hidden + 2 * 3 * inner * hidden) + (1 << 20)
        assert program.memory_analysis().temp_size_in_bytes <= most
        first = np.broadcast_to(np.arange(top_k), (tokens, top_k))
        for ids in (even, first, experts - 1 - first):
            r = routing(ids)
            assert_close(program(x, r, weights), by_expert(x, r, weights))


# Row j of gate_up, and entry j of its bias, is filled with j: gate has the even numbers, up the odd ones.
INNER, HIDDEN, EXPERTS = 3, 2, 2
GATE, UP = (np.arange(start, 2 * INNER, 2, dtype=np.float32) for start in (0, 1))


def numbered(values: np.ndarray) -> np.ndarray:
    return np.broadcast_to(values[:, None], (EXPERTS, values.size, HIDDEN))


@pytest.mark.parametrize("activation", [Activation(name="swiglu", layout="interleaved"), GPT_OSS], ids=str)
def test_C94_gate_and_up_alternate_in_packed_weights_and_under_hf_names(activation: Activation) -> None:
    config = MoEConfig(router=RouterConfig(experts=EXPERTS, top_k=1), activation=activation)
    down = np.zeros((EXPERTS, HIDDEN, INNER), np.float32)
    packed = pack_experts(jnp.asarray(numbered(GATE)), jnp.asarray(numbered(UP)), jnp.asarray(down), config=config)
    in_order = numbered(np.arange(2 * INNER, dtype=np.float32))
    np.testing.assert_array_equal(packed.gate_up, in_order)
    arrays = {"router": np.zeros((EXPERTS, HIDDEN), np.float32), "gate_up": packed.gate_up, "down": packed.down}
    tensors = hf_names.to_hf(arrays, config, "qwen3_moe")
    for e in range(EXPERTS):
        np.testing.assert_array_equal(tensors[f"mlp.experts.{e}.gate_proj.weight"], numbered(GATE)[e])
        np.testing.assert_array_equal(tensors[f"mlp.experts.{e}.up_proj.weight"], numbered(UP)[e])
    np.testing.assert_array_equal(hf_names.from_hf(tensors, config, "qwen3_moe")["gate_up"], in_order)


@every_backend
@pytest.mark.parametrize("part", ["weights", "biases"])
def test_C94_gate_and_up_alternate_in_the_op(part: str, backend: str) -> None:
    """A row of (1, 0) meets column j alone; with a ``down`` of ones the output is the sum over the pairs."""
    config, weights = layer(EXPERTS, 1, HIDDEN, INNER, activation=GPT_OSS, biases=True)
    in_order = np.arange(2 * INNER, dtype=np.float32)
    filled = {
        "weights": {"gate_up": jnp.asarray(numbered(in_order))},
        "biases": {"gate_up_bias": jnp.asarray(np.broadcast_to(in_order, (EXPERTS, in_order.size)))},
    }[part]
    weights = jax.tree.map(jnp.zeros_like, weights)
    weights = dataclasses.replace(weights, down=jnp.ones_like(weights.down), **filled)
    gate, up = GATE.astype(np.float64), UP.astype(np.float64)
    want = (gate / (1 + np.exp(-1.702 * gate)) * (up + 1)).sum()  # no number here reaches the clamp of 7
    r = routing([[0], [1]])
    x = jnp.asarray([[1.0, 0.0], [1.0, 0.0]])
    got = quick(lambda x, r, w: grouped_moe(x, r, w, config, backend=backend), x, r, weights)
    assert_close(got, np.asarray(r.weights) * want * np.ones((1, HIDDEN)))
