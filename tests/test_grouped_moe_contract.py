"""The expert block's promises besides values: memory, compilations, what packing costs, how refusals read."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import backends as bench
import reference_numpy as truth
from backends import SWIGLU, assert_close, layer, normal, quick, routing
from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.grouped_moe import (
    Activation,
    ExpertWeights,
    MoEConfig,
    explain,
    grouped_moe,
    pack_experts,
)
from moe_jax.pallas_kernels.grouped_moe.api import GROUPED_MOE
from moe_jax.pallas_kernels.route import RouterConfig, Routing, route

every_backend = pytest.mark.parametrize("backend", bench.backends_of(GROUPED_MOE))
RELU2 = Activation(name="relu2", layout=None)


def moe(config: MoEConfig, backend: str):
    """The op with its static arguments bound."""
    return lambda x, r, w: grouped_moe(x, r, w, config, backend=backend)


@every_backend
def test_C63_rebuilt_configs_do_not_compile_again(backend: str) -> None:
    def build() -> MoEConfig:
        router = RouterConfig(experts=4, top_k=2, score="sigmoid", renormalize=True)
        return MoEConfig(router=router, activation=Activation(name="swiglu", layout="halves"))

    assert build() == build()
    assert hash(build()) == hash(build())
    _, weights = layer(4, 2, 16, 12)
    x, logits = normal(1, (5, 16)), normal(2, (5, 4))
    step = jax.jit(grouped_moe, static_argnames=("config", "backend"))
    with bench.counted_compiles() as compiles:
        step(x, logits, weights, config=build(), backend=backend).block_until_ready()
        assert len(compiles) == 1
        for _ in range(50):
            step(x, logits, weights, config=build(), backend=backend)
        assert len(compiles) == 1
    grouped_moe(x, logits, weights, build(), backend=backend)
    with bench.counted_compiles() as compiles:
        for _ in range(50):
            grouped_moe(x, logits, weights, build(), backend=backend)
    assert not compiles
    other = dataclasses.replace(build(), activation=Activation(name="geglu_erf", layout="halves"))
    assert other != build()
    assert "activation=Activation(name='geglu_erf'" in repr(other)


def temp_bytes(function: Any, *args: Any) -> int:
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes


def abstract(experts: int, hidden: int, inner: int, tokens: int, top_k: int) -> tuple[Any, ...]:
    config, _ = layer(experts, top_k, 1, 1)

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    weights = ExpertWeights(gate_up=array(experts, 2 * inner, hidden), down=array(experts, hidden, inner))
    r = Routing(array(tokens, top_k, dtype=jnp.float32), array(tokens, top_k, dtype=jnp.int32))
    return config, (array(tokens, hidden), r, weights)


@every_backend
def test_C108_memory_grows_with_rows_not_with_experts(backend: str) -> None:
    """Bound: four f32 arrays of tokens*k rows (blocks with their padding, their gather) and one expert in f32."""

    def measured(experts: int, inner: int, tokens: int = 8192, hidden: int = 512, top_k: int = 2) -> int:
        config, args = abstract(experts, hidden, inner, tokens, top_k)
        chosen = []

        def step(*args: Any) -> jax.Array:
            chosen.append(explain(*args, config, backend=backend))
            return moe(config, backend)(*args)

        got = temp_bytes(step, *args)
        assert [choice.backend for choice in chosen] == [backend]
        assert got <= 4 * (4 * tokens * top_k * hidden) + 4 * 3 * inner * hidden * 2 + (1 << 20)
        return got

    with bench.served(backend, 8192):
        base = measured(64, 256)
        dense = 4 * 8192 * 64 * 2 * 256
        assert base < dense / 4
        assert measured(256, 256) <= 1.5 * base  # only more padding, although four times the experts
        # Activations of every pair, and with kernels of as much padding again; a few rows of one expert, not of all.
        places = 2 * 8192 * 2
        assert measured(64, 1024) - base <= 2 * places * 768 + 8 * 3 * 768 * 512 * 4 < dense / 4
        assert measured(64, 256, tokens=2048) <= 0.5 * base


@every_backend
def test_C108_gradients_need_no_dense_product(backend: str) -> None:
    config, args = abstract(64, 128, 64, 4096, 2)
    step = jax.grad(lambda *a: moe(config, backend)(*a).astype(jnp.float32).sum(), argnums=(0, 2))
    rows, weights = 4 * 4096 * 2 * 128, 2 * 64 * 3 * 64 * 128
    # Rows of pairs and of their cotangents, and one f32 accumulator of the weights.
    with bench.served(backend, 4096):
        assert temp_bytes(step, *args) <= 8 * rows + 3 * 2 * weights


def test_explain_runs_nothing() -> None:
    config, weights = layer(13, 2, 16, 12)  # a size of its own: nothing is compiled yet
    x, logits = normal(1, (5, 16)), normal(2, (5, 13))
    with bench.counted_compiles() as compiles:
        assert explain(x, logits, weights, config).backend == "reference"
    assert not compiles
    assert explain(x, route(logits, config.router), weights, config).backend == "reference"
    chosen = []
    jax.jit(lambda *a: chosen.append(explain(*a, config)))(x, logits, weights)
    assert chosen[0].backend == "reference"


@pytest.mark.parametrize("activation", [SWIGLU, Activation(name="swiglu", layout="interleaved"), RELU2], ids=str)
def test_C32_packing_says_what_it_costs(activation: Activation) -> None:
    config = MoEConfig(router=RouterConfig(experts=3, top_k=1), activation=activation)
    gate, up, down = normal(1, (3, 5, 8)), normal(2, (3, 5, 8)), normal(3, (3, 8, 5))
    packed = pack_experts(gate if activation.gated else None, up, down, config=config)
    assert packed.gate_up.nbytes == 4 * 3 * activation.rows(5) * 8
    assert packed.nbytes == packed.gate_up.nbytes + down.nbytes
    # Only what must be joined is new memory.
    assert packed.down.unsafe_buffer_pointer() == down.unsafe_buffer_pointer()
    assert activation.gated or packed.gate_up.unsafe_buffer_pointer() == up.unsafe_buffer_pointer()
    x, r = normal(4, (4, 8)), routing([[0], [2], [1], [0]])
    want = [truth.f64(up[e]) @ truth.f64(x[t]) for t, e in enumerate([0, 2, 1, 0])]
    got = np.stack([truth.f64(packed.gate_up[e]) @ truth.f64(x[t]) for t, e in enumerate([0, 2, 1, 0])])
    got = {None: got, "halves": got[:, -5:], "interleaved": got[:, 1::2]}[activation.layout]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    out = quick(moe(config, "reference"), x, r, packed)
    assert_close(out, truth.grouped_moe(x, r.weights, r.ids, packed, config))


CONFIG, WEIGHTS = layer(4, 2, 8, 6, biases=True, shared=5, shared_gate=True)
X, LOGITS, R = jnp.zeros((3, 8)), jnp.zeros((3, 4)), routing([[0, 1]] * 3)
HALF = jnp.bfloat16


def replaced(**fields: Any) -> ExpertWeights:
    return dataclasses.replace(WEIGHTS, **fields)


def shared(**fields: Any) -> ExpertWeights:
    assert WEIGHTS.shared is not None
    return replaced(shared=dataclasses.replace(WEIGHTS.shared, **fields))


@pytest.mark.parametrize(
    ("call", "got", "wanted"),
    [
        (lambda: grouped_moe(X, LOGITS, WEIGHTS, CONFIG.router), "RouterConfig", "MoEConfig"),
        (lambda: grouped_moe(X, LOGITS, (1, 2), CONFIG), "tuple", "ExpertWeights"),
        (lambda: grouped_moe([[0.0] * 8], LOGITS, WEIGHTS, CONFIG), "list", "an array"),
        (lambda: grouped_moe(X.astype(jnp.int32), LOGITS, WEIGHTS, CONFIG), "int32", "bfloat16 or float16 or float32"),
        (lambda: grouped_moe(X.astype(HALF), LOGITS, WEIGHTS, CONFIG), "float32", "bfloat16"),
        (lambda: grouped_moe(X[:, :7], LOGITS, WEIGHTS, CONFIG), "[3, 7]", "[T, 8]"),
        (lambda: grouped_moe(X[None], LOGITS, WEIGHTS, CONFIG), "[1, 3, 8]", "[T, 8]"),
        (lambda: grouped_moe(X, LOGITS[:, :3], WEIGHTS, CONFIG), "[3, 3]", "[3, 4]"),
        (lambda: grouped_moe(X, LOGITS[:2], WEIGHTS, CONFIG), "[2, 4]", "[3, 4]"),
        (lambda: grouped_moe(X, LOGITS.astype(HALF), WEIGHTS, CONFIG), "bfloat16", "float32"),
        (lambda: grouped_moe(X, tuple(R), WEIGHTS, CONFIG), "tuple", "an array"),
        (lambda: grouped_moe(X, Routing(R.weights, [[0, 1]] * 3), WEIGHTS, CONFIG), "list", "an array"),
        (lambda: grouped_moe(X, Routing(R.weights, R.ids.astype(jnp.int8)), WEIGHTS, CONFIG), "int8", "int32"),
        (lambda: grouped_moe(X, Routing(R.weights, R.ids[:2]), WEIGHTS, CONFIG), "[2, 2]", "[3, k]"),
        (lambda: grouped_moe(X, Routing(R.weights[:, :1], R.ids), WEIGHTS, CONFIG), "[3, 1]", "[3, 2]"),
        (lambda: grouped_moe(X, Routing(R.weights.astype(HALF), R.ids), WEIGHTS, CONFIG), "bfloat16", "float32"),
        (lambda: grouped_moe(X, Routing(R.weights[:, :0], R.ids[:, :0]), WEIGHTS, CONFIG), "0", "at least 1"),
        (lambda: grouped_moe(X, R, WEIGHTS, CONFIG, selection_bias=LOGITS[0]), "an array", "None, or router logits"),
        (lambda: grouped_moe(X, LOGITS, WEIGHTS, CONFIG, selection_bias=LOGITS), "[3, 4]", "[4]"),
        (lambda: grouped_moe(X, LOGITS, WEIGHTS, CONFIG, backend="cuda"), "'cuda'", "auto, mosaic, triton, reference"),
        (lambda: grouped_moe(X, R, replaced(down=WEIGHTS.down[:3]), CONFIG), "[4, 12, 8]", "[3, 12, 8]"),
        (lambda: grouped_moe(X, LOGITS, layer(3, 2, 8, 6)[1], CONFIG), "3", "router.experts=4"),
        (lambda: grouped_moe(X, R, replaced(down=None), CONFIG), "NoneType", "an array"),
        (lambda: grouped_moe(X, R, replaced(gate_up=None), CONFIG), "NoneType", "an array"),
        (lambda: grouped_moe(X, R, replaced(shared=3), CONFIG), "int", "SharedExpert"),
        (lambda: grouped_moe(X, R, shared(gate_up=None), CONFIG), "NoneType", "an array"),
        (lambda: explain(X, LOGITS, WEIGHTS, CONFIG, selection_bias="x"), "str", "an array"),
        (lambda: pack_experts(WEIGHTS.down, WEIGHTS.down, WEIGHTS.down, config=None), "NoneType", "MoEConfig"),
        (
            lambda: pack_experts(*(jnp.zeros(s, jnp.int8) for s in ((4, 6, 8), (4, 6, 8), (4, 8, 6))), config=CONFIG),
            "int8",
            "bfloat16 or float16",
        ),
        (lambda: grouped_moe(X, R, replaced(gate_up=WEIGHTS.gate_up[:, :6]), CONFIG), "[4, 6, 8]", "[4, 12, 8]"),
        (lambda: grouped_moe(X, R, replaced(gate_up=WEIGHTS.gate_up.astype(HALF)), CONFIG), "bfloat16", "float32"),
        (lambda: grouped_moe(X, R, replaced(gate_up_bias=WEIGHTS.gate_up_bias[:, :6]), CONFIG), "[4, 6]", "[4, 12]"),
        (lambda: grouped_moe(X, R, replaced(down_bias=WEIGHTS.down_bias[:3]), CONFIG), "[3, 8]", "[4, 8]"),
        (lambda: grouped_moe(X, R, shared(down=WEIGHTS.shared.down[:7]), CONFIG), "[7, 5]", "[8, S]"),
        (lambda: grouped_moe(X, R, shared(gate_up=WEIGHTS.shared.gate_up[:5]), CONFIG), "[5, 8]", "[10, 8]"),
        (lambda: grouped_moe(X, R, shared(gate=WEIGHTS.shared.gate[0]), CONFIG), "[8]", "[1, 8]"),
        (lambda: pack_experts(None, jnp.zeros((4, 6, 8)), WEIGHTS.down, config=CONFIG), "None", "an array"),
        (lambda: pack_experts(X, X, WEIGHTS.down, config=CONFIG), "[3, 8]", "[E, I, H]"),
        (
            lambda: pack_experts(jnp.zeros((4, 5, 8)), jnp.zeros((4, 6, 8)), WEIGHTS.down, config=CONFIG),
            "[4, 5, 8]",
            "[4, 6, 8]",
        ),
        (
            lambda: pack_experts(jnp.zeros((4, 5, 8)), jnp.zeros((4, 5, 8)), WEIGHTS.down, config=CONFIG),
            "[4, 8, 6]",
            "[4, 8, 5]",
        ),
        (
            lambda: pack_experts(jnp.zeros((4, 6, 8), HALF), jnp.zeros((4, 6, 8)), WEIGHTS.down, config=CONFIG),
            "bfloat16",
            "float32",
        ),
        (
            lambda: pack_experts(
                WEIGHTS.down, WEIGHTS.down, X, config=MoEConfig(router=CONFIG.router, activation=RELU2)
            ),
            "an array",
            "None",
        ),
    ],
)
def test_C117_refusals_name_both_values(call, got: str, wanted: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        call()
    assert got in str(caught.value.got)
    assert wanted in str(caught.value.wanted)
    assert str(caught.value.got) in str(caught.value)
    assert str(caught.value.wanted) in str(caught.value)
    assert caught.value.where


def test_a_dtype_is_told_with_what_it_is_taken_from() -> None:
    x = np.zeros((3, 8))  # f64, NumPy's default
    with pytest.raises(InvalidArgument, match=r"weights.down: got float32, wanted float64, as x has$"):
        grouped_moe(x, LOGITS, WEIGHTS, CONFIG)
    with pytest.raises(InvalidArgument, match=r"weights.down: got bfloat16, wanted float32, as up has$"):
        pack_experts(*(jnp.zeros((4, 6, 8)),) * 2, jnp.zeros((4, 8, 6), HALF), config=CONFIG)


@pytest.mark.parametrize("gated", [True, False])
def test_weights_of_the_other_layout_are_told_the_right_one(gated: bool) -> None:
    config = CONFIG if gated else MoEConfig(router=CONFIG.router, activation=RELU2)
    rows, named = (12, "2·intermediate") if gated else (6, "intermediate")
    gate_up, down = jnp.zeros((4, 8, rows)), jnp.zeros((4, 8, 6))
    with pytest.raises(InvalidArgument) as caught:
        grouped_moe(X, R, ExpertWeights(gate_up=gate_up, down=down), config)
    assert caught.value.problem == "shape of weights.gate_up"
    assert caught.value.wanted == f"[4, {rows}, 8] ([experts, {named}, hidden])"
    with pytest.raises(InvalidArgument) as caught:
        grouped_moe(X, R, ExpertWeights(gate_up=gate_up, down=jnp.zeros((4, 6, 8))), config)
    assert caught.value.got == ([4, 6, 8] if gated else [3, 8])
    if gated:  # without gate both fit each other, so it may be x
        assert caught.value.problem == "shape of weights.down"
        wanted = "[E, 8, I] ([experts, hidden, intermediate]) for rows of 8, and gate_up "
        assert caught.value.wanted == f"{wanted}[E, 2I, 8] ([experts, 2·intermediate, hidden])"


def test_configs_of_other_types_are_refused_where_they_are_given() -> None:
    router = RouterConfig(experts=4, top_k=2)
    for wrong, refused in (
        (lambda: MoEConfig(router=8, activation=SWIGLU), "MoEConfig: type of router: got int, wanted RouterConfig"),
        (lambda: MoEConfig(router=router, activation="swiglu"), "MoEConfig: type of activation: got str"),
        (lambda: RouterConfig(experts=4, top_k=2, renormalize="no"), "RouterConfig: type of renormalize: got 'no'"),
        (lambda: route(jnp.zeros((1, 4)), MoEConfig(router=router, activation=SWIGLU)), "route: type of config"),
    ):
        with pytest.raises(InvalidArgument, match=refused):
            wrong()
