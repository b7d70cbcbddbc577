"""Routing: every mode on every back end against the NumPy loops, and the cases that are about routing."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import backends as bench
import reference_numpy as truth
from backends import assert_close, assert_same_bits, both_modes, normal, run
from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.route import RouterConfig, Routing, route, router_logits
from moe_jax.pallas_kernels.route.api import ROUTE

every_backend = pytest.mark.parametrize("backend", bench.backends_of(ROUTE))

MODES = {
    "softmax": RouterConfig(experts=24, top_k=4),
    "softmax-renorm": RouterConfig(experts=24, top_k=4, renormalize=True, scaling_factor=2.5),
    "topk_softmax": RouterConfig(experts=24, top_k=4, score="topk_softmax"),
    "sigmoid": RouterConfig(experts=24, top_k=4, score="sigmoid"),
    "sigmoid-groups": RouterConfig(
        experts=24, top_k=4, score="sigmoid", renormalize=True, scaling_factor=2.5, groups=6, groups_kept=3
    ),
    "softmax-groups": RouterConfig(experts=24, top_k=3, groups=8, groups_kept=2),
    "one-group-each": RouterConfig(experts=24, top_k=3, score="sigmoid", groups=24, groups_kept=5),
    "k=1": RouterConfig(experts=24, top_k=1),
    "k=E": RouterConfig(experts=24, top_k=24, score="sigmoid", renormalize=True),
    "E=1": RouterConfig(experts=1, top_k=1, renormalize=True),
}


def check_against_numpy(got: Routing, logits, config: RouterConfig, bias=None, skip: float = 0.01) -> None:
    """Ids equal wherever f64 tells the candidates apart by more than f32 can confuse; weights always."""
    ids, weights = np.asarray(got.ids), np.asarray(got.weights)
    assert ids.dtype == np.int32
    assert weights.dtype == np.float32
    assert ids.shape == weights.shape == (len(logits), config.top_k)
    _, want_ids = truth.route(logits, config, bias)
    values = np.sort(truth.choice(logits, config, bias), axis=1)[:, ::-1]
    with np.errstate(invalid="ignore"):  # two experts of dropped groups: inf - inf
        steps = values[:, :-1] - values[:, 1:]
        near = (steps[:, : config.top_k] < 1e-6).any(axis=1)
    same = (ids == want_ids).all(axis=1)
    assert same[~near].all()
    assert near.mean() <= skip
    wanted = truth.weights_of(truth.scores(logits, config), ids, config)
    np.testing.assert_allclose(weights, wanted, rtol=2e-6, atol=1e-12)


@every_backend
@both_modes
@pytest.mark.parametrize("name", MODES)
def test_modes_match_numpy(name: str, mode: str, backend: str) -> None:
    config = MODES[name]
    logits = normal(1, (300, config.experts), scale=2.0)
    bias = normal(2, (config.experts,), scale=0.3) if config.score == "sigmoid" else None
    got = run(mode, lambda a, b: route(a, config, selection_bias=b, backend=backend), logits, bias)
    check_against_numpy(got, np.asarray(logits), config, bias)


@every_backend
@both_modes
def test_ties_go_to_the_lower_id(mode: str, backend: str) -> None:
    config = RouterConfig(experts=8, top_k=3, score="topk_softmax")
    rows = [[0.0] * 8, [1, 2, 2, 1, 2, 2, 0, 2], [-0.0, 0.0, -0.0, 0.0, -1, -1, -1, -1], [3, 5, 3, 5, 3, 5, 3, 5]]
    got = run(mode, lambda a: route(a, config, backend=backend), jnp.asarray(rows, jnp.float32))
    np.testing.assert_array_equal(got.ids, [[0, 1, 2], [1, 2, 4], [0, 1, 2], [1, 3, 5]])
    groups = RouterConfig(experts=8, top_k=2, score="sigmoid", groups=4, groups_kept=2)
    tied = route(jnp.zeros((1, 8)), groups, backend=backend)
    np.testing.assert_array_equal(tied.ids, [[0, 1]])


@every_backend
@both_modes
@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
def test_C01_nan_rows_get_distinct_valid_ids(score: str, mode: str, backend: str) -> None:
    config = RouterConfig(experts=128, top_k=8, score=score, renormalize=True)
    logits = normal(3, (8, 128)).at[5:].set(jnp.nan)
    got = run(mode, lambda a: route(a, config, backend=backend), logits)
    alone = run(mode, lambda a: route(a, config, backend=backend), logits[:5])
    assert_same_bits(jax.tree.map(lambda a: a[:5], got), alone)
    for row in np.asarray(got.ids[5:]):
        assert len(set(row)) == 8
        assert row.min() >= 0
        assert row.max() < 128


@every_backend
def test_some_nan_or_infinite_logits_keep_ids_valid(backend: str) -> None:
    rng = np.random.default_rng(4)
    logits = rng.choice([np.nan, np.inf, -np.inf, 0.0, 1.0], size=(200, 12)).astype(np.float32)
    for groups, score in ((1, "softmax"), (1, "topk_softmax"), (4, "topk_softmax"), (4, "sigmoid")):
        config = RouterConfig(experts=12, top_k=3, score=score, groups=groups, groups_kept=max(1, groups // 2))
        ids = np.asarray(route(jnp.asarray(logits), config, backend=backend).ids)
        assert ids.min() >= 0
        assert ids.max() < 12
        assert all(len(set(row)) == 3 for row in ids)
    # An expert whose score is NaN loses to one that has a score.
    row = jnp.asarray([[jnp.nan, 1.0, jnp.nan, 2.0]])
    sigmoid = RouterConfig(experts=4, top_k=2, score="sigmoid")
    np.testing.assert_array_equal(route(row, sigmoid, backend=backend).ids, [[3, 1]])


@every_backend
@both_modes
@pytest.mark.parametrize("name", ["softmax", "sigmoid-groups"])
def test_C06_no_rows(name: str, mode: str, backend: str) -> None:
    config = MODES[name]
    got = run(mode, lambda a: route(a, config, backend=backend), jnp.zeros((0, 24)))
    assert got.ids.shape == got.weights.shape == (0, 4)
    assert got.ids.dtype == jnp.int32
    assert got.weights.dtype == jnp.float32
    batched = run(mode, jax.vmap(lambda a: route(a, config, backend=backend)), jnp.zeros((3, 0, 24)))
    assert batched.ids.shape == (3, 0, 4)
    grad = jax.grad(lambda a: route(a, config, backend=backend).weights.sum())(jnp.zeros((0, 24)))
    assert grad.shape == (0, 24)
    assert route(jnp.zeros((1, 24)), config, backend=backend).ids.shape == (1, 4)


@every_backend
@both_modes
def test_C12_dropped_groups_cannot_win_with_negative_scores(mode: str, backend: str) -> None:
    config = RouterConfig(experts=8, top_k=2, score="sigmoid", groups=4, groups_kept=1)
    scores = np.array([[0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.55, 0.45]])
    logits, bias = jnp.asarray(np.log(scores / (1 - scores)), jnp.float32), jnp.full(8, -1.0)
    got = run(mode, lambda a, b: route(a, config, selection_bias=b, backend=backend), logits, bias)
    np.testing.assert_array_equal(got.ids, [[0, 1]])
    np.testing.assert_allclose(got.weights, [[0.6, 0.5]], rtol=1e-6)
    many = MODES["sigmoid-groups"]
    logits, bias = normal(5, (300, 24)), -jnp.abs(normal(6, (24,))) - 1
    check_against_numpy(route(logits, many, selection_bias=bias, backend=backend), np.asarray(logits), many, bias)


@every_backend
@both_modes
def test_C13_small_scores_keep_their_weight(mode: str, backend: str) -> None:
    config = RouterConfig(experts=256, top_k=8, score="sigmoid", renormalize=True, scaling_factor=2.5)
    rng = np.random.default_rng(7)
    logits = jnp.asarray(rng.uniform(-18, -15, (50, 256)), jnp.float32)
    bias = jnp.asarray(rng.uniform(11, 13, 256), jnp.float32)
    got = run(mode, lambda a, b: route(a, config, selection_bias=b, backend=backend), logits, bias)
    # The biased scores are near-ties in f32, so the weights are judged for the experts that were chosen.
    wanted = truth.weights_of(truth.scores(np.asarray(logits), config), got.ids, config)
    np.testing.assert_allclose(got.weights, wanted, rtol=1e-5)
    np.testing.assert_allclose(got.weights.sum(axis=1), 2.5, rtol=1e-6)


@every_backend
@both_modes
def test_C15_selection_bias_stays_f32(mode: str, backend: str) -> None:
    def run_route(logits, bias, config):
        return run(mode, lambda a, b: route(a, config, selection_bias=b, backend=backend), logits, bias)

    one = RouterConfig(experts=2, top_k=1, score="sigmoid")
    x = jnp.ones((1, 4), jnp.bfloat16)
    logits = router_logits(x, jnp.ones((2, 4), jnp.bfloat16))
    assert run_route(logits, jnp.asarray([1.0, 1.003], jnp.float32), one).ids.item() == 1
    # 10k rows, each with one logit for all experts: only biases that bf16 would merge tell them apart.
    config = RouterConfig(experts=16, top_k=4, score="sigmoid")
    bias = (1 + np.random.default_rng(8).permutation(16) * 2**-12).astype(np.float32)
    assert len(np.unique(np.asarray(jnp.asarray(bias, jnp.bfloat16)))) < 4
    rows = jnp.broadcast_to(normal(9, (10_000, 1)), (10_000, 16))
    got = run_route(rows, jnp.asarray(bias), config)
    want = np.argsort(-bias, kind="stable")[:4]
    np.testing.assert_array_equal(got.ids, np.broadcast_to(want, (10_000, 4)))
    # 10k random rows with close biases.
    logits = normal(10, (10_000, 16))
    check_against_numpy(run_route(logits, jnp.asarray(bias), config), np.asarray(logits), config, bias)


@every_backend
@both_modes
@pytest.mark.parametrize(
    ("config", "ids", "weights"),
    [
        (RouterConfig(experts=4, top_k=2), [0, 1], [0.6439, 0.2369]),
        (RouterConfig(experts=4, top_k=2, renormalize=True), [0, 1], [0.7311, 0.2689]),
        (RouterConfig(experts=4, top_k=2, score="topk_softmax"), [0, 1], [0.7311, 0.2689]),
        (RouterConfig(experts=4, top_k=1), [0], [0.6439]),
        (RouterConfig(experts=4, top_k=1, renormalize=True), [0], [1.0]),
        (RouterConfig(experts=4, top_k=1, score="topk_softmax"), [0], [1.0]),
        (RouterConfig(experts=4, top_k=4), [0, 1, 2, 3], [0.6439, 0.2369, 0.0871, 0.0321]),
        (RouterConfig(experts=4, top_k=4, renormalize=True), [0, 1, 2, 3], [0.6439, 0.2369, 0.0871, 0.0321]),
        (RouterConfig(experts=4, top_k=4, score="topk_softmax"), [0, 1, 2, 3], [0.6439, 0.2369, 0.0871, 0.0321]),
    ],
)
def test_C16_three_orders_of_softmax(config: RouterConfig, ids, weights, mode: str, backend: str) -> None:
    got = run(mode, lambda a: route(a, config, backend=backend), jnp.asarray([[2.0, 1.0, 0.0, -1.0]]))
    np.testing.assert_array_equal(got.ids[0], ids)
    np.testing.assert_allclose(got.weights[0], weights, atol=5e-5)


@every_backend
@both_modes
@pytest.mark.parametrize("name", ["softmax", "topk_softmax", "sigmoid-groups"])
def test_C18_scaling_is_applied_once(name: str, mode: str, backend: str) -> None:
    scaled = dataclasses.replace(MODES[name], scaling_factor=2.5)
    plain = dataclasses.replace(scaled, scaling_factor=1.0)
    logits = normal(11, (20, scaled.experts))
    once, twice = (run(mode, lambda a, c=c: route(a, c, backend=backend), logits) for c in (plain, scaled))
    np.testing.assert_array_equal(once.ids, twice.ids)
    np.testing.assert_array_equal(np.asarray(twice.weights), np.float32(2.5) * np.asarray(once.weights))


@every_backend
@both_modes
def test_C21_bf16_inputs_keep_f32_logits(mode: str, backend: str) -> None:
    config = RouterConfig(experts=4, top_k=2)
    # Rows near 8 whose logits differ by about 1e-3, where the bf16 step is 0.0625.
    rng = np.random.default_rng(12)
    x = np.concatenate([np.ones((500, 1)), rng.choice([0.5, 1.0, 2.0], (500, 8))], axis=1)
    kernel = np.concatenate([np.full((4, 1), 8.0), rng.choice([-1, 1], (4, 8)) * 2.0**-11], axis=1)
    x16, kernel16 = jnp.asarray(x, jnp.bfloat16), jnp.asarray(kernel, jnp.bfloat16)
    logits = run(mode, router_logits, x16, kernel16)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, x @ kernel.T, rtol=1e-7)
    fused = run(mode, lambda a, b: route(router_logits(a, b), config, backend=backend), x16, kernel16)
    _, want = truth.route(x @ kernel.T, config)
    np.testing.assert_array_equal(fused.ids, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("bias_dtype", [None, "same", "float32"])
def test_router_logits_are_f32(dtype: str, bias_dtype: str | None) -> None:
    with jax.enable_x64(dtype == "float64"):
        x, kernel = normal(13, (7, 33), dtype), normal(14, (5, 33), dtype)
        bias = None if bias_dtype is None else normal(15, (5,), dtype if bias_dtype == "same" else bias_dtype)
        got = router_logits(x, kernel, bias)
        want = truth.f64(x) @ truth.f64(kernel).T + (0 if bias is None else truth.f64(bias))
        assert got.dtype == jnp.float32
        assert_close(got, want, 1e-6)


@pytest.mark.gpu
def test_router_logits_do_not_use_tf32() -> None:
    x, kernel = normal(16, (64, 2048)), normal(17, (32, 2048))
    assert_close(jax.jit(router_logits)(x, kernel), truth.f64(x) @ truth.f64(kernel).T, 1e-5)


@every_backend
def test_bits_do_not_change_over_ten_runs(backend: str) -> None:
    config = MODES["sigmoid-groups"]
    logits, bias = normal(18, (100, 24)), normal(19, (24,))
    step = jax.jit(lambda a, b: route(a, config, selection_bias=b, backend=backend))
    first = step(logits, bias)
    for _ in range(9):
        assert_same_bits(step(logits, bias), first)


@every_backend
@both_modes
@pytest.mark.parametrize(("axes", "name"), [((0, None), "softmax"), ((1, 0), "sigmoid-groups"), ((None, 0), "sigmoid")])
def test_vmap(axes, name: str, mode: str, backend: str) -> None:
    config = MODES[name]
    logits, bias = normal(20, (3, 3, 24)), normal(21, (3, 24))

    def one(a, b):
        return route(a, config, selection_bias=b, backend=backend)

    a = logits if axes[0] is not None else logits[0]
    b = bias if axes[1] is not None else bias[0]
    got = run(mode, jax.vmap(one, in_axes=axes), a, b)
    for i in range(3):
        want = one(a if axes[0] is None else jnp.take(a, i, axis=axes[0]), b if axes[1] is None else b[i])
        np.testing.assert_array_equal(got.ids[i], want.ids)
        np.testing.assert_allclose(got.weights[i], want.weights, rtol=1e-6)


@every_backend
@pytest.mark.parametrize("name", ["softmax", "softmax-renorm", "topk_softmax", "sigmoid-groups"])
def test_gradient_matches_finite_differences(name: str, backend: str) -> None:
    config = MODES[name]
    logits, probe = normal(22, (3, 24)), np.asarray(normal(23, (3, config.top_k)))
    got = jax.jit(jax.grad(lambda a: jnp.sum(route(a, config, backend=backend).weights * probe)))(logits)
    base = truth.f64(logits)
    _, ids = truth.route(base, config)

    def loss(values: np.ndarray) -> float:
        return float((truth.weights_of(truth.scores(values, config), ids, config) * probe).sum())

    want = np.zeros_like(base)
    for index in np.ndindex(base.shape):
        step = np.zeros_like(base)
        step[index] = 1e-5
        want[index] = (loss(base + step) - loss(base - step)) / 2e-5
    assert_close(got, want, 1e-5)


def test_C63_equal_configs_are_one() -> None:
    def build() -> RouterConfig:
        return RouterConfig(experts=24, top_k=4, score="sigmoid", groups=6, groups_kept=3)

    assert build() == build()
    assert hash(build()) == hash(build())
    assert repr(build()) == repr(build())
    assert build() != dataclasses.replace(build(), top_k=3)
    step = jax.jit(route, static_argnames="config")
    logits = normal(24, (7, 24))
    step(logits, config=build())
    route(logits, build())
    with bench.counted_compiles() as compiles:
        for _ in range(50):
            step(logits, config=build())
            route(logits, build())
    assert not compiles


F32 = jnp.zeros((3, 8))
ROUTER = RouterConfig(experts=8, top_k=2)


@pytest.mark.parametrize(
    ("call", "got", "wanted"),
    [
        (lambda: RouterConfig(experts=0, top_k=1), "0", "at least 1"),
        (lambda: RouterConfig(experts=8, top_k=0), "0", "1 to experts=8"),
        (lambda: RouterConfig(experts=8, top_k=9), "9", "1 to experts=8"),
        (lambda: RouterConfig(experts=8, top_k=1, score="argmax"), "'argmax'", "'sigmoid'"),
        (lambda: RouterConfig(experts=8, top_k=1, groups=3), "3", "divisor of experts=8"),
        (lambda: RouterConfig(experts=8, top_k=1, groups=0), "0", "divisor of experts=8"),
        (lambda: RouterConfig(experts=8, top_k=1, groups=4, groups_kept=5), "5", "groups=4"),
        (lambda: RouterConfig(experts=8, top_k=1, groups=4, groups_kept=0), "0", "groups=4"),
        (lambda: RouterConfig(experts=8, top_k=3, groups=4, groups_kept=1), "3", "at most the 2 experts"),
        (lambda: route(F32.astype(jnp.bfloat16), ROUTER), "bfloat16", "float32"),
        (lambda: route(F32[:, :7], ROUTER), "[3, 7]", "[T, 8]"),
        (lambda: route(F32[0], ROUTER), "[8]", "[T, 8]"),
        (lambda: route([[0.0] * 8], ROUTER), "list", "an array"),
        (lambda: route(F32, ROUTER, selection_bias=F32[0].astype(jnp.bfloat16)), "bfloat16", "float32"),
        (lambda: route(F32, ROUTER, selection_bias=F32[0, :7]), "[7]", "[8]"),
        (lambda: route(F32, ROUTER, backend="cuda"), "'cuda'", "auto, triton, reference"),
        (lambda: router_logits(F32, F32.astype(jnp.bfloat16)), "bfloat16", "float32"),
        (lambda: router_logits(F32, F32[:, :7]), "[3, 7]", "[E, 8]"),
        (lambda: router_logits(F32[0], F32), "[8]", "[T, H]"),
        (lambda: router_logits(F32.astype(jnp.int32), F32.astype(jnp.int32)), "int32", "bfloat16"),
        *(
            (lambda v=v: RouterConfig(experts=4, top_k=2, scaling_factor=v), got, "a finite number")
            for v, got in ((None, "None"), ("2", "'2'"), (True, "True"), (10**400, "1329 bits"), (float("nan"), "nan"))
        ),
        (lambda: RouterConfig(experts=4, top_k=2, score=np.asarray(["softmax", "sigmoid"])), "array", "'softmax'"),
        (lambda: router_logits([[1.0]], F32), "list", "an array"),
        (lambda: router_logits(F32, F32, F32[0, :4]), "[4]", "[3]"),
        (lambda: router_logits(F32, F32, F32[0, :3].astype(jnp.bfloat16)), "bfloat16", "float32"),
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
