"""The expert block: every back end against the NumPy loops, and the cases that are about values, shapes and memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backends as bench
import reference_numpy as truth
from backends import (
    GPT_OSS,
    SWIGLU,
    assert_close,
    assert_same_bits,
    both_modes,
    dirty_memory,
    layer,
    normal,
    quick,
    random_ids,
    routing,
    run,
)
from moe_jax.pallas_kernels.grouped_moe import (
    Activation,
    ExpertWeights,
    MoEConfig,
    grouped_moe,
    pack_experts,
    reference,
)
from moe_jax.pallas_kernels.grouped_moe.api import GROUPED_MOE
from moe_jax.pallas_kernels.route import RouterConfig, Routing
from test_activation import every_activation

every_backend = pytest.mark.parametrize("backend", bench.backends_of(GROUPED_MOE))
RELU2 = Activation(name="relu2", layout=None)


def moe(config: MoEConfig, backend: str):
    """The op with its static arguments bound."""
    return lambda x, r, w: grouped_moe(x, r, w, config, backend=backend)


def check(x: Any, r: Routing, weights: ExpertWeights, config: MoEConfig, backend: str, mode: str = "") -> jax.Array:
    args = moe(config, backend), x, r, weights
    got = run(mode, *args) if mode else quick(*args)
    assert got.dtype == x.dtype
    assert_close(got, truth.grouped_moe(x, r.weights, r.ids, weights, config))
    return got


@every_backend
@both_modes
@pytest.mark.parametrize("shared", ["none", "plain", "gated"])
def test_from_logits_with_biases_and_shared_expert(shared: str, mode: str, backend: str) -> None:
    config, weights = layer(
        6, 3, 24, 20, biases=True, shared=0 if shared == "none" else 28, shared_gate=shared == "gated", renormalize=True
    )
    x, logits = normal(1, (10, 24)), normal(2, (10, 6))
    got = run(mode, moe(config, backend), x, logits, weights)
    want = truth.grouped_moe(x, *truth.route(logits, config.router), weights, config)
    assert_close(got, want)


@every_backend
@both_modes
def test_selection_bias_reaches_the_router(mode: str, backend: str) -> None:
    config, weights = layer(8, 2, 16, 12, score="sigmoid", groups=4, groups_kept=2, scaling_factor=2.5)
    x, logits, bias = normal(1, (7, 16)), normal(2, (7, 8)), normal(3, (8,))
    got = run(
        mode,
        lambda *a: grouped_moe(*a[:3], config, selection_bias=a[3], backend=backend),
        x,
        logits,
        weights,
        bias,
    )
    assert_close(got, truth.grouped_moe(x, *truth.route(logits, config.router, bias), weights, config))
    assert not np.allclose(got, grouped_moe(x, logits, weights, config, backend=backend))


@every_backend
@pytest.mark.parametrize("activation", every_activation(), ids=str)
def test_every_activation_and_layout(activation: Activation, backend: str) -> None:
    config, weights = layer(4, 2, 12, 10, activation=activation, biases=True, shared=6)
    check(normal(1, (5, 12), scale=2.0), routing(random_ids(2, 5, 2, 4)), weights, config, backend)


def naive(x: jax.Array, r: Routing, w: ExpertWeights) -> jax.Array:
    """What one would write by hand: all experts, everything in the dtype of ``x``."""
    h = jnp.einsum("th,eih->tei", x, w.gate_up)
    gate, up = jnp.split(h, 2, axis=-1)
    y = jnp.einsum("tei,ehi->teh", jax.nn.silu(gate) * up, w.down)
    picked = jnp.take_along_axis(y, r.ids[:, :, None], axis=1)
    return jnp.einsum("tk,tkh->th", r.weights.astype(x.dtype), picked)


@every_backend
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_error_is_at_most_twice_that_of_a_naive_computation(dtype: str, backend: str) -> None:
    with bench.served(backend, 40, dtype), jax.enable_x64(dtype == "float64"):
        config, weights = layer(6, 3, 64, 48, dtype=dtype)
        x, r = normal(1, (40, 64), dtype), routing(random_ids(2, 40, 3, 6))
        if dtype == "float64":
            # Weights of a power of two, so that their being f32 costs neither side anything.
            r = Routing(jnp.full_like(r.weights, 0.5), r.ids)
        want = truth.grouped_moe(x, r.weights, r.ids, weights, config)
        got = quick(moe(config, backend), x, r, weights)
        hand = quick(naive, x, r, weights)
        assert got.dtype == hand.dtype == x.dtype
        ours, theirs = (np.sqrt(np.mean((truth.f64(a) - want) ** 2)) for a in (got, hand))
        # Half precision: f32 between the roundings must show (it gives about 0.5, without it 1.1).
        assert ours <= {"float64": 2.0, "float32": 2.0}.get(dtype, 0.75) * theirs + 1e-15


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [b.name for b in GROUPED_MOE.backends if b.name != "mosaic"])
def test_f32_does_not_use_tf32(backend: str) -> None:
    config, weights = layer(4, 2, 512, 384)
    r = routing(random_ids(2, 64, 2, 4))
    check(normal(1, (64, 512)), r, weights, config, backend)


@every_backend
def test_bits_do_not_change_over_ten_runs(backend: str) -> None:
    config, weights = layer(6, 3, 24, 20, shared=8)
    args = normal(1, (40, 24)), routing(random_ids(2, 40, 3, 6, sentinels=True)), weights
    step = jax.jit(moe(config, backend))
    first = step(*args)
    for _ in range(9):
        dirty_memory()
        assert_same_bits(step(*args), first)


@every_backend
@both_modes
def test_C01_nan_rows_leave_the_others_alone(mode: str, backend: str) -> None:
    config, weights = layer(128, 8, 16, 8, renormalize=True)
    x, logits = normal(1, (8, 16)), normal(2, (8, 128)).at[5:].set(jnp.nan)
    got = run(mode, moe(config, backend), x, logits, weights)
    clean = run(mode, moe(config, backend), x, logits.at[5:].set(0.0), weights)
    alone = run(mode, moe(config, backend), x[:5], logits[:5], weights)
    assert_same_bits(got[:5], clean[:5])
    assert_same_bits(got[:5], alone)


@every_backend
@both_modes
@pytest.mark.parametrize("sentinel", [-1, 4])
def test_C03_sentinels_add_exactly_zero(sentinel: int, mode: str, backend: str) -> None:
    config, weights = layer(4, 2, 16, 12, biases=True)
    ids = np.array([[-1, 1], [0, -1], [-1, -1], [2, 3]])  # experts 4..7 of 8, as this rank numbers them
    ids = np.where(ids < 0, sentinel, ids)
    r = routing(ids)
    r = Routing(jnp.where(r.ids == sentinel, jnp.nan, r.weights), r.ids)
    dirty_memory()
    got = np.asarray(run(mode, moe(config, backend), normal(1, (4, 16)), r, weights))
    assert (got[2] == 0).all()
    assert_close(got, truth.grouped_moe(normal(1, (4, 16)), r.weights, r.ids, weights, config))


@every_backend
@both_modes
def test_C03_absent_experts_may_hold_nan(mode: str, backend: str) -> None:
    """The first and last experts, where a wrapped or clamped sentinel would land, are NaN and never routed to."""
    config, weights = layer(4, 2, 16, 12, biases=True)
    poisoned = jax.tree.map(lambda w: w.at[0].set(jnp.nan).at[3].set(jnp.nan), weights)
    r = routing([[-1, 1], [2, 4], [4, -1], [1, 2]])
    got = run(mode, moe(config, backend), normal(1, (4, 16)), r, poisoned)
    assert_same_bits(got, run(mode, moe(config, backend), normal(1, (4, 16)), r, weights))
    assert (np.asarray(got)[2] == 0).all()


@every_backend
@both_modes
def test_C04_ranks_with_an_expert_map_sum_to_the_whole(mode: str, backend: str) -> None:
    config, weights = layer(8, 2, 16, 12, biases=True)
    x, r = normal(1, (3, 16)), routing([[2, 3], [0, 5], [2, 7]])
    total = np.zeros((3, 16))
    step = jax.jit(moe(config, backend)) if mode == "jit" else moe(config, backend)
    for rank in range(4):
        expert_map = np.full(8, -1, np.int32)
        expert_map[2 * rank : 2 * rank + 2] = [0, 1]
        ids = jnp.asarray(expert_map)[r.ids]
        if rank == 1:
            np.testing.assert_array_equal(ids.reshape(-1)[np.asarray(ids.reshape(-1)) >= 0], [0, 1, 0])
        part = jax.tree.map(lambda w, rank=rank: w[2 * rank : 2 * rank + 2], weights)
        total += np.asarray(step(x, Routing(r.weights, ids), part))
    assert_close(total, grouped_moe(x, r, weights, config, backend=backend))
    assert_close(total, truth.grouped_moe(x, r.weights, r.ids, weights, config))


@every_backend
@both_modes
def test_C05_rows_after_the_last_group_are_zero(mode: str, backend: str) -> None:
    config, weights = layer(4, 1, 16, 12)
    ids = np.repeat([0, 2, 3, -1], [5, 4, 3, 4])[:, None]
    runs = []
    for _ in range(2):
        dirty_memory()
        runs.append(check(normal(1, (16, 16)), routing(ids), weights, config, backend, mode))
        assert (np.asarray(runs[-1])[12:] == 0).all()
    assert_same_bits(*runs)


@every_backend
@pytest.mark.parametrize(("mode", "dtype"), [("eager", "float32"), ("jit", "bfloat16")])
def test_C06_empty_batch(mode: str, dtype: str, backend: str) -> None:
    config, weights = layer(4, 2, 16, 12, dtype=dtype, biases=True, shared=8, shared_gate=True)
    f = moe(config, backend)
    x, logits = jnp.zeros((0, 16), dtype), jnp.zeros((0, 4))
    with bench.served(backend, rows=0):
        got = run(mode, f, x, logits, weights)
        assert got.shape == (0, 16)
        assert got.dtype == x.dtype
        assert run(mode, jax.vmap(f, in_axes=(0, 0, None)), x[None], logits[None], weights).shape == (1, 0, 16)
        grads = run(mode, jax.grad(lambda *a: f(*a).sum().astype(jnp.float32), argnums=(0, 1, 2)), x, logits, weights)
        assert grads[0].shape == (0, 16)
        assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(grads[2]))
    assert run(mode, f, jnp.ones((1, 16), dtype), jnp.zeros((1, 4)), weights).shape == (1, 16)


@every_backend
@both_modes
def test_C06_rank_without_tokens(mode: str, backend: str) -> None:
    config, weights = layer(4, 2, 16, 12, biases=True)
    got = run(mode, moe(config, backend), normal(1, (40, 16)), routing(np.full((40, 2), -1)), weights)
    np.testing.assert_array_equal(got, np.zeros((40, 16)))


# Tokens on both sides of every step of `block_rows`: one row a block up to 64 pairs, then powers of two of the
# mean group, up to 512.
BLOCK_STEPS = {
    **{(4, 2, t): rows for t, rows in ((32, 1), (33, 16), (64, 32), (66, 64), (514, 512), (1026, 512))},
    **{(60, 6, t): rows for t, rows in ((10, 1), (11, 1), (20, 2))},
}
ALL_SIZES = [
    (e, k, t)
    for e in (1, 3, 5, 60, 72, 160, 384)
    for k, t in ((1, 3), (2, 70), (6, 5), (8, 33), (e, 2))
    if k < e or (k == e and t == 2)
]


def test_C23_block_rows_steps() -> None:
    assert {(e, k, t): reference.block_rows(k * t, e) for e, k, t in BLOCK_STEPS} == BLOCK_STEPS


@every_backend
@pytest.mark.parametrize(("experts", "top_k", "tokens"), [*ALL_SIZES, *BLOCK_STEPS])
def test_C23_any_number_of_experts(experts: int, top_k: int, tokens: int, backend: str) -> None:
    config, weights = layer(experts, top_k, 8, 4)
    with bench.served(backend, tokens):
        check(normal(1, (tokens, 8)), routing(random_ids(2, tokens, top_k, experts)), weights, config, backend)


@every_backend
def test_C28_no_token_is_dropped(backend: str) -> None:
    config, weights = layer(8, 2, 16, 12)
    x, rng = normal(1, (48, 16)), np.random.default_rng(3)
    f = jax.jit(moe(config, backend))
    same = np.broadcast_to([5, 2], (48, 2))  # every token to the same two experts
    mixed = np.concatenate([same[:12], random_ids(4, 36, 2, 8)])
    for ids in (same, mixed, np.broadcast_to([7, 0], (48, 2))):
        r = routing(ids)
        got = f(x, r, weights)
        assert_close(got, truth.grouped_moe(x, r.weights, r.ids, weights, config))
        alone = f(x[:12], Routing(r.weights[:12], r.ids[:12]), weights)
        assert_close(got[:12], alone, 1e-6)
        order = rng.permutation(48)
        shuffled = f(x[order], Routing(r.weights[order], r.ids[order]), weights)
        assert_close(shuffled, got[order], 1e-6)


@every_backend
@pytest.mark.parametrize(
    ("hidden", "inner"), [(72, 192), (192, 1001), (320, 704), (704, 72), (1001, 320), (1408, 2880), (2880, 1408)]
)
def test_C29_sizes_that_no_tile_divides(hidden: int, inner: int, backend: str) -> None:
    config, weights = layer(2, 1, hidden, inner)
    dirty_memory()
    check(normal(1, (3, hidden)), routing([[1], [0], [1]]), weights, config, backend)


@every_backend
def test_C32_views_equal_packed_weights(backend: str) -> None:
    config, packed = layer(4, 2, 16, 12)
    x, r = normal(1, (6, 16)), routing(random_ids(2, 6, 2, 4))
    f = moe(config, backend)
    compiled = jax.jit(f).lower(x, r, packed).compile()
    want = compiled(x, r, packed)
    w13, w2 = packed.gate_up, packed.down
    views = {
        "slices": (lambda g, d: pack_experts(g[:, :12], g[:, 12:], d, config=config), w13, w2),
        "swapped": (
            lambda g, d: ExpertWeights(gate_up=g.swapaxes(1, 2), down=d.swapaxes(1, 2)),
            w13.swapaxes(1, 2),
            w2.swapaxes(1, 2),
        ),
        "reversed": (
            lambda g, d: ExpertWeights(gate_up=g[::-1, ::-1], down=d[:, :, ::-1]),
            w13[::-1, ::-1],
            w2[:, :, ::-1],
        ),
        "padded": (
            lambda g, d: ExpertWeights(gate_up=g[1:, :, :16], down=d[:-1, ::2]),
            jnp.pad(w13, ((1, 0), (0, 0), (0, 5)), constant_values=jnp.nan),
            jnp.pad(jnp.repeat(w2, 2, axis=1), ((0, 1), (0, 0), (0, 0)), constant_values=jnp.nan),
        ),
    }
    for view, gate_up, down in views.values():
        step = jax.jit(lambda x, r, g, d, view=view: f(x, r, view(g, d))).lower(x, r, gate_up, down).compile()
        assert_close(step(x, r, gate_up, down), want, 1e-6)
        # At worst the views are laid out once more, for this call.
        extra = step.memory_analysis().temp_size_in_bytes - compiled.memory_analysis().temp_size_in_bytes
        assert extra <= packed.nbytes + 4096


@every_backend
@pytest.mark.parametrize("activation", [SWIGLU, GPT_OSS, RELU2], ids=str)
def test_C37_zero_rows_and_blocks(activation: Activation, backend: str) -> None:
    config, weights = layer(4, 2, 256, 128, activation=activation)
    x = np.array(normal(1, (12, 256)))
    x[[0, 5, 11]] = 0
    x[2, :128] = x[3, 128:] = 0
    got = check(jnp.asarray(x), routing(random_ids(2, 12, 2, 4)), weights, config, backend)
    assert (np.asarray(got)[[0, 5, 11]] == 0).all()


@every_backend
def test_C18_output_is_scaled_exactly_once(backend: str) -> None:
    # Whole numbers and relu², k=1 with weight one: nothing rounds but, on a GPU, XLA's division by the sum of one.
    rng = np.random.default_rng(1)
    weights = ExpertWeights(
        gate_up=jnp.asarray(rng.integers(-2, 3, (4, 6, 8)), jnp.float32),
        down=jnp.asarray(rng.integers(-2, 3, (4, 8, 6)), jnp.float32),
    )
    x, logits = jnp.asarray(rng.integers(-2, 3, (9, 8)), jnp.float32), normal(2, (9, 4))
    router = RouterConfig(experts=4, top_k=1, renormalize=True)
    outputs = [
        np.asarray(quick(moe(MoEConfig(router=r, activation=RELU2), backend), x, logits, weights))
        for r in (router, dataclasses.replace(router, scaling_factor=2.5))
    ]
    assert np.abs(outputs[0]).max() > 10
    np.testing.assert_allclose(outputs[1], 2.5 * outputs[0], rtol=2e-7, atol=0)


@every_backend
def test_C18_the_shared_expert_is_not_scaled(backend: str) -> None:
    config, weights = layer(4, 2, 16, 12, shared=8)
    scaled = dataclasses.replace(config, router=dataclasses.replace(config.router, scaling_factor=2.0))
    x, logits = normal(1, (5, 16)), normal(2, (5, 4))
    alone = dataclasses.replace(weights, shared=None)

    def difference(x: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        twice = grouped_moe(x, logits, weights, scaled, backend=backend)
        return twice - grouped_moe(x, logits, weights, config, backend=backend), moe(config, backend)(x, logits, alone)

    assert_close(*quick(difference, x, logits))


@every_backend
def test_C71_one_and_4096_rows_in_one_program(backend: str) -> None:
    config, weights = layer(4, 2, 8, 4)
    x, r = normal(1, (4096, 8)), routing(random_ids(2, 4096, 2, 4))
    one, r_one = x[:1], Routing(r.weights[:1], r.ids[:1])
    f = moe(config, backend)
    step = jax.jit(lambda a, ra, b, rb, w: (f(a, ra, w), f(b, rb, w)))
    want = truth.grouped_moe(x[:50], r.weights[:50], r.ids[:50], weights, config)
    with bench.served(backend, 4096):
        for args in ((one, r_one, x, r), (x, r, one, r_one), (one, r_one, x, r)):
            for rows in step(*args, weights):
                assert_close(rows[:50], want[: len(rows)])


SHAPES = [(1, 3, 3), (4, 2, 9), (7, 4, 20)]


@every_backend
@settings(max_examples=40, deadline=None)
@given(shape=st.sampled_from(SHAPES), data=st.data())
def test_random_ids_with_sentinels(backend: str, shape: tuple[int, int, int], data: st.DataObject) -> None:
    """Any ids at all: repeated experts, sentinels anywhere, whole rows absent."""
    experts, top_k, tokens = shape
    config, weights = layer(experts, min(experts, top_k), 8, 6, biases=True)
    row = st.lists(st.integers(-1, experts), min_size=top_k, max_size=top_k)
    ids = data.draw(st.lists(row, min_size=tokens, max_size=tokens))
    seed = data.draw(st.integers(0, 2**31))
    r, x = routing(ids, seed), normal(seed, (tokens, 8))
    got = jax.jit(grouped_moe, static_argnums=(3,), static_argnames="backend")(x, r, weights, config, backend=backend)
    assert_close(got, truth.grouped_moe(x, r.weights, r.ids, weights, config))
    absent = ((np.asarray(ids) < 0) | (np.asarray(ids) >= experts)).all(axis=1)
    assert (np.asarray(got)[absent] == 0).all()


@settings(max_examples=60, deadline=None)
@given(shape=st.sampled_from([(1, 1, 3), (5, 2, 20), (3, 4, 50)]), data=st.data())
def test_blocks_hold_every_pair_once(shape: tuple[int, int, int], data: st.DataObject) -> None:
    experts, top_k, tokens = shape
    count = tokens * top_k
    ids = np.array(data.draw(st.lists(st.integers(-1, experts), min_size=count, max_size=count)), np.int32)
    blocks = jax.jit(reference.plan_blocks, static_argnums=1)(jnp.asarray(ids.reshape(tokens, top_k)), experts)
    expert, pair, place, used = map(np.asarray, blocks)
    size = reference.block_rows(count, experts)
    groups = np.array([(ids == e).sum() for e in range(experts)])
    assert used == (count if size == 1 else sum(-(-groups // size)))
    # A block has an expert if and only if it holds a pair, and none does from `used` on.
    np.testing.assert_array_equal(expert < experts, (pair < count).any(axis=1))
    assert (expert[used:] == experts).all()
    for p, e in enumerate(ids):
        if 0 <= e < experts:
            assert pair.reshape(-1)[place[p]] == p
            assert expert[place[p] // size] == e
        else:
            assert place[p] == pair.size
    assert (pair < count).sum() == groups.sum()
    held = [pair[expert == e].reshape(-1) for e in range(experts)]
    assert all((np.diff(h[h < count]) > 0).all() for h in held)  # stable order
