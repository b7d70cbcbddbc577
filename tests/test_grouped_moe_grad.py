"""The expert block under JAX's transformations: gradients, vmap, checkpoint, scan, donation."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import backends as bench
from backends import GPT_OSS, SWIGLU, assert_close, layer, normal, quick, random_ids, routing, run
from moe_jax.pallas_kernels.grouped_moe import Activation, ExpertWeights, MoEConfig, activate, grouped_moe
from moe_jax.pallas_kernels.grouped_moe.api import GROUPED_MOE
from moe_jax.pallas_kernels.route import Routing

every_backend = pytest.mark.parametrize("backend", bench.backends_of(GROUPED_MOE))
RELU2 = Activation(name="relu2", layout=None)


def loss(config: MoEConfig, backend: str):
    return lambda x, r, w: jnp.sum(jnp.sin(grouped_moe(x, r, w, config, backend=backend).astype(jnp.float32)))


def dense(x: jax.Array, logits: jax.Array, w: ExpertWeights, config: MoEConfig) -> jax.Array:
    """All experts for all rows, so that JAX's own rules differentiate everything."""
    with jax.default_matmul_precision("highest"):  # on a GPU f32 products are tf32 otherwise
        return _dense(x, logits, w, config)


def _dense(x: jax.Array, logits: jax.Array, w: ExpertWeights, config: MoEConfig) -> jax.Array:
    scores = jax.nn.softmax(logits, axis=-1)
    ids = jnp.argsort(-logits, axis=-1)[:, : config.router.top_k]
    picked = jnp.take_along_axis(scores, ids, axis=1)
    if config.router.renormalize:
        picked = picked / picked.sum(axis=1, keepdims=True)
    h = jnp.einsum("th,eih->tei", x, w.gate_up)
    h = h if w.gate_up_bias is None else h + w.gate_up_bias
    y = jnp.einsum("tei,ehi->teh", activate(h, config.activation), w.down)
    y = y if w.down_bias is None else y + w.down_bias
    out = jnp.einsum("tk,tkh->th", picked, jnp.take_along_axis(y, ids[:, :, None], axis=1))
    if w.shared is not None:
        always = activate(x @ w.shared.gate_up.T, config.activation) @ w.shared.down.T
        out = out + (always if w.shared.gate is None else always * jax.nn.sigmoid(x @ w.shared.gate.T))
    return out


def assert_trees_close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b, tolerance)


@every_backend
@pytest.mark.parametrize(
    ("mode", "activation", "tokens"),
    [("eager", SWIGLU, 5), ("jit", SWIGLU, 40), ("jit", GPT_OSS, 40), ("jit", RELU2, 5)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_gradients_match_dense_autodiff(mode: str, activation: Activation, tokens: int, backend: str) -> None:
    config, weights = layer(
        5, 2, 12, 8, activation=activation, biases=True, shared=6, shared_gate=activation != RELU2, renormalize=True
    )
    args = normal(1, (tokens, 12)), normal(2, (tokens, 5)), weights
    got = run(mode, jax.grad(loss(config, backend), argnums=(0, 1, 2)), *args)
    want = quick(jax.grad(lambda *a: jnp.sum(jnp.sin(dense(*a, config))), argnums=(0, 1, 2)), *args)
    assert_trees_close(got, want, 2e-5)


@every_backend
def test_gradients_match_finite_differences(backend: str) -> None:
    with bench.served(backend, 7, "float64"), jax.enable_x64(True):
        config, weights = layer(4, 2, 6, 5, dtype=jnp.float64, biases=True, shared=4, shared_gate=True)
        x, r = normal(1, (7, 6), jnp.float64), routing(random_ids(2, 7, 2, 4, sentinels=True))
        check_grads(lambda x, w: grouped_moe(x, r, w, config, backend=backend), (x, weights), 1, ["rev"], rtol=1e-6)


@every_backend
def test_gradients_keep_the_dtype(backend: str) -> None:
    config, weights = layer(4, 2, 16, 12, dtype=jnp.bfloat16, biases=True, shared=8)
    x, r = normal(1, (40, 16), jnp.bfloat16), routing(random_ids(2, 40, 2, 4))
    got = quick(jax.grad(loss(config, backend), argnums=(0, 2)), x, r, weights)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (x, weights))
    want = quick(jax.grad(loss(config, backend), argnums=(0, 2)), wide[0], r, wide[1])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == jnp.bfloat16
        assert_close(a, b, 3e-2)


SIZES = {
    "one to seventeen": list(range(1, 18)),
    "first and last empty": [0, 20, 13, *[10] * 12, 0, 0],
    "one holds all": [0] * 8 + [153] + [0] * 8,
    "the last holds all": [0] * 16 + [153],
    "adjacent empty": [50, 0, 0, 0, 50, 0, 0, 53, *[0] * 9],
}


@every_backend
def test_C07_empty_experts_get_exactly_zero_gradients(backend: str) -> None:
    config, weights = layer(17, 1, 8, 4, biases=True)
    step = jax.jit(jax.grad(loss(config, backend), argnums=2))
    x = normal(1, (153, 8))
    with bench.served(backend, 153):
        for sizes in SIZES.values():
            ids = np.random.default_rng(2).permutation(np.repeat(np.arange(17), sizes))[:, None]
            empty = np.array(sizes) == 0
            # NaN in the weights of empty experts must not leak anywhere.
            poisoned = jax.tree.map(
                lambda w, empty=empty: jnp.where(empty.reshape(-1, *[1] * (w.ndim - 1)), jnp.nan, w), weights
            )
            got, want = step(x, routing(ids), poisoned), step(x, routing(ids), weights)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert (np.asarray(a)[empty] == 0).all()
                assert (np.abs(np.asarray(a)[~empty]).reshape((~empty).sum(), -1).max(axis=1) > 0).all()
                np.testing.assert_array_equal(a, b)


@every_backend
def test_C07_the_reported_sizes_scaled_down(backend: str) -> None:
    config, weights = layer(6, 1, 64, 24, dtype=jnp.bfloat16)
    sizes = [16, 0, 258, 45, 0, 8]
    ids = np.repeat(np.arange(6), sizes)[:, None]
    with bench.served(backend, 327):
        got = quick(
            jax.grad(loss(config, backend), argnums=2), normal(1, (327, 64), jnp.bfloat16), routing(ids), weights
        )
        for leaf in jax.tree.leaves(got):
            nonzero = [bool((np.asarray(expert) != 0).any()) for expert in leaf]
            assert nonzero == [size > 0 for size in sizes]


@every_backend
def test_C03_gradients_of_sentinels_are_exactly_zero(backend: str) -> None:
    config, weights = layer(4, 2, 8, 6, biases=True)
    poisoned = jax.tree.map(lambda w: w.at[0].set(jnp.nan).at[3].set(jnp.nan), weights)
    r = routing([[-1, 1], [2, 4], [4, -1], [1, 2]])

    def f(x: jax.Array, rw: jax.Array, w: ExpertWeights) -> jax.Array:
        return loss(config, backend)(x, Routing(rw, r.ids), w)

    dx, dr, dw = quick(jax.grad(f, argnums=(0, 1, 2)), normal(1, (4, 8)), r.weights, poisoned)
    assert (np.asarray(dx)[2] == 0).all()
    np.testing.assert_array_equal(np.asarray(dr) == 0, (np.asarray(r.ids) < 0) | (np.asarray(r.ids) > 3))
    for leaf in jax.tree.leaves((dx, dr, dw)):
        assert np.isfinite(leaf).all()
    for leaf in jax.tree.leaves(dw):
        assert (np.asarray(leaf)[[0, 3]] == 0).all()


def test_C37_gradients_of_zero_rows_are_finite() -> None:
    config, weights = layer(4, 2, 8, 6, activation=RELU2)
    x = normal(1, (5, 8)).at[jnp.array([0, 3])].set(0.0)
    got = quick(jax.grad(loss(config, "reference"), argnums=(0, 2)), x, routing([[0, 1]] * 5), weights)
    for leaf in jax.tree.leaves(got):
        assert np.isfinite(leaf).all()


BATCH = 3
VMAP_CONFIG, VMAP_WEIGHTS = layer(4, 2, 8, 6, biases=True)
VMAP_X, VMAP_IDS = (
    normal(1, (BATCH, 5, 8)),
    routing(random_ids(2, BATCH * 5, 2, 4, sentinels=True).reshape(BATCH, 5, 2)),
)
VMAP_BATCHED = jax.tree.map(lambda w: jnp.stack([w * (i + 1) for i in range(BATCH)]), VMAP_WEIGHTS)


def vmap_args(axes: tuple[int | None, ...]) -> tuple[Any, ...]:
    full = VMAP_X, VMAP_IDS, VMAP_BATCHED
    return tuple(a if axis == 0 else jax.tree.map(lambda v: v[0], a) for a, axis in zip(full, axes, strict=True))


def one_by_one(f: Any, args: tuple[Any, ...], axes: tuple[int | None, ...]) -> Any:
    pick = [
        [a if axis is None else jax.tree.map(lambda v, i=i: v[i], a) for a, axis in zip(args, axes, strict=True)]
        for i in range(BATCH)
    ]
    compiled = jax.jit(f).lower(*pick[0]).compile()
    return jax.tree.map(lambda *rows: jnp.stack(rows), *(compiled(*row) for row in pick))


EVERY_AXES = [axes for axes in itertools.product((0, None), repeat=3) if any(a == 0 for a in axes)]


@every_backend
@pytest.mark.parametrize(
    ("mode", "axes"), [*(("jit", axes) for axes in EVERY_AXES), ("eager", (0, 0, None)), ("eager", (0, None, 0))]
)
def test_vmap_over_any_arguments(mode: str, axes: tuple[int | None, ...], backend: str) -> None:
    def f(x: jax.Array, r: Routing, w: ExpertWeights) -> jax.Array:
        return grouped_moe(x, r, w, VMAP_CONFIG, backend=backend)

    args = vmap_args(axes)
    assert_close(run(mode, jax.vmap(f, in_axes=axes), *args), one_by_one(f, args, axes), 1e-6)


@every_backend
def test_vmap_over_nothing(backend: str) -> None:
    def f(x: jax.Array, r: Routing) -> jax.Array:
        return grouped_moe(x, r, VMAP_WEIGHTS, VMAP_CONFIG, backend=backend)

    x, r, _ = jax.tree.map(lambda a: a[:0], vmap_args((0, 0, None)))
    assert jax.vmap(f)(x, r).shape == x.shape


@every_backend
def test_vmap_over_one_of_the_weights_and_other_axes(backend: str) -> None:
    config, weights, batched = VMAP_CONFIG, VMAP_WEIGHTS, VMAP_BATCHED
    mixed = ExpertWeights(
        gate_up=batched.gate_up, down=weights.down, gate_up_bias=weights.gate_up_bias, down_bias=batched.down_bias
    )
    axes = ExpertWeights(gate_up=0, down=None, gate_up_bias=None, down_bias=0)  # pyrefly: ignore
    r = jax.tree.map(lambda v: v[0], VMAP_IDS)

    def f(x: jax.Array, w: ExpertWeights) -> jax.Array:
        return grouped_moe(x, r, w, config, backend=backend)

    got = quick(jax.vmap(f, in_axes=(1, axes), out_axes=2), VMAP_X.swapaxes(0, 1), mixed)
    for i in range(BATCH):
        each = ExpertWeights(
            gate_up=batched.gate_up[i],
            down=weights.down,
            gate_up_bias=weights.gate_up_bias,
            down_bias=None if batched.down_bias is None else batched.down_bias[i],
        )
        assert_close(got[:, :, i], f(VMAP_X[i], each), 1e-6)


@every_backend
def test_vmap_of_vmap(backend: str) -> None:
    def f(x: jax.Array, r: Routing, w: ExpertWeights) -> jax.Array:
        return grouped_moe(x, r, w, VMAP_CONFIG, backend=backend)

    x = VMAP_X[:, :, None, :]
    r = jax.tree.map(lambda v: v[:, :, None, :], VMAP_IDS)
    got = quick(jax.vmap(jax.vmap(f, in_axes=(0, 0, None)), in_axes=(0, 0, 0)), x, r, VMAP_BATCHED)
    assert_close(got[:, :, 0], one_by_one(f, (VMAP_X, VMAP_IDS, VMAP_BATCHED), (0, 0, 0)), 1e-6)


@every_backend
@pytest.mark.parametrize("axes", [(0, 0, None), (0, 0, 0), (None, None, 0)])
def test_vmap_of_grad_and_grad_of_vmap(axes: tuple[int | None, ...], backend: str) -> None:
    f, args = loss(VMAP_CONFIG, backend), vmap_args(axes)

    def by_weights(x: jax.Array, rw: jax.Array, ids: jax.Array, w: ExpertWeights) -> jax.Array:
        return f(x, Routing(rw, ids), w)

    flat = args[0], args[1].weights, args[1].ids, args[2]
    flat_axes = axes[0], axes[1], axes[1], axes[2]
    grad = jax.grad(by_weights, argnums=(0, 1, 3))
    want = one_by_one(grad, flat, flat_axes)
    assert_trees_close(quick(jax.vmap(grad, in_axes=flat_axes), *flat), want)

    def total(*flat: Any) -> jax.Array:
        return jax.vmap(by_weights, in_axes=flat_axes)(*flat).sum()

    summed = [g if axis == 0 else jax.tree.map(lambda v: v.sum(axis=0), g) for g, axis in zip(want, axes, strict=True)]
    assert_trees_close(quick(jax.grad(total, argnums=(0, 1, 3)), *flat), tuple(summed))


@every_backend
def test_second_use_under_checkpoint(backend: str) -> None:
    config, weights = layer(4, 2, 8, 6)
    x, r = normal(1, (5, 8)), routing(random_ids(2, 5, 2, 4))

    def block(x: jax.Array, w: ExpertWeights) -> jax.Array:
        return x + grouped_moe(x, r, w, config, backend=backend)

    def run_twice(block: Any):
        return quick(jax.grad(lambda x, w: jnp.sum(block(block(x, w), w) ** 2), argnums=(0, 1)), x, weights)

    assert_trees_close(run_twice(jax.checkpoint(block)), run_twice(block), 1e-6)


@every_backend
def test_under_scan_over_layers(backend: str) -> None:
    x, r = normal(1, (5, 8)), jax.tree.map(lambda v: v[0], VMAP_IDS)

    def block(x: jax.Array, w: ExpertWeights) -> tuple[jax.Array, None]:
        return x + grouped_moe(x, r, w, VMAP_CONFIG, backend=backend), None

    def scanned(w: ExpertWeights) -> jax.Array:
        return jnp.sum(jax.lax.scan(block, x, w)[0] ** 2)

    def unrolled(w: ExpertWeights) -> jax.Array:
        y = x
        for i in range(BATCH):
            y = block(y, jax.tree.map(lambda v, i=i: v[i], w))[0]
        return jnp.sum(y**2)

    assert_trees_close(quick(jax.grad(scanned), VMAP_BATCHED), quick(jax.grad(unrolled), VMAP_BATCHED))


@every_backend
def test_donated_rows(backend: str) -> None:
    config, weights = layer(4, 2, 8, 6)
    r = routing(random_ids(2, 5, 2, 4))
    step = jax.jit(lambda x, w: grouped_moe(x, r, w, config, backend=backend), donate_argnums=0)
    x = normal(1, (5, 8))
    want = grouped_moe(normal(1, (5, 8)), r, weights, config, backend=backend)
    assert_close(step(x, weights), want, 1e-6)
    assert x.is_deleted()


@every_backend
def test_forward_mode_is_refused_and_reverse_mode_repeats(backend: str) -> None:
    """What the docstring of `grouped_moe` says about second derivatives."""
    config, weights = layer(3, 2, 4, 3)
    logits = normal(2, (2, 3))

    def f(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(grouped_moe(x, logits, weights, config, backend=backend)))

    x = normal(1, (2, 4))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(f, (x,), (x,))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.hessian(f)(x)
    got = quick(jax.jacrev(jax.jacrev(f)), x)
    want = quick(jax.hessian(lambda x: jnp.sum(jnp.sin(dense(x, logits, weights, config)))), x)
    assert_close(got, want, 1e-5)
