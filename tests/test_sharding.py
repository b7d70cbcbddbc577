"""Sharded arguments: right under `jax.shard_map`, refused with `CannotServe` elsewhere, on four host devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from backends import assert_close, assert_same_bits, both_modes, layer, normal, quick, run
from moe_jax.pallas_kernels.errors import CannotServe
from moe_jax.pallas_kernels.grouped_moe import ExpertWeights, MoEConfig, explain, grouped_moe
from moe_jax.pallas_kernels.mesh_axes import vary_together, zeros_varying
from moe_jax.pallas_kernels.route import RouterConfig, Routing, route

EXPERTS, TOKENS, HIDDEN = 8, 8, 16
CONFIG, WEIGHTS = layer(EXPERTS, 2, HIDDEN, 12, biases=True, renormalize=True)
X, LOGITS = normal(1, (TOKENS, HIDDEN)), normal(2, (TOKENS, EXPERTS))

both_axis_types = pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=lambda kind: kind.name)
needs_devices = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices (conftest.py sets XLA_FLAGS)")
pytestmark = needs_devices


def make_mesh(kind: AxisType, size: int = 4) -> jax.sharding.Mesh:
    return jax.make_mesh((size,), ("x",), axis_types=(kind,), devices=jax.devices()[:size])


def place(tree: Any, mesh: jax.sharding.Mesh, spec: P) -> Any:
    return jax.device_put(tree, NamedSharding(mesh, spec))


def plain(x: jax.Array, logits: jax.Array, weights: ExpertWeights) -> jax.Array:
    return grouped_moe(x, logits, weights, CONFIG)


def loss(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda *args: jnp.sum(function(*args) ** 2)


@functools.cache
def wanted_grads() -> Any:
    return quick(jax.grad(loss(plain), argnums=(0, 1, 2)), X, LOGITS, WEIGHTS)


def expert_parallel(x: jax.Array, logits: jax.Array, weights: ExpertWeights) -> jax.Array:
    """Each device holds two experts; the others' ids become the sentinel -1 and the parts are summed."""
    local = MoEConfig(router=RouterConfig(experts=2, top_k=2), activation=CONFIG.activation)
    chosen = route(logits, CONFIG.router)
    ids = chosen.ids - 2 * jax.lax.axis_index("x")
    ids = jnp.where((ids >= 0) & (ids < 2), ids, -1)
    return jax.lax.psum(grouped_moe(x, Routing(chosen.weights, ids), weights, local), "x")


@pytest.mark.parametrize(
    ("kind", "check_vma"), [(AxisType.Explicit, True), (AxisType.Auto, True), (AxisType.Explicit, False)]
)
def test_tokens_sharded_under_shard_map(kind: AxisType, check_vma: bool) -> None:
    mesh = make_mesh(kind)
    specs = (P("x"), P("x"), P())
    sharded = jax.shard_map(plain, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=check_vma)
    args = tuple(place(a, mesh, spec) for a, spec in zip((X, LOGITS, WEIGHTS), specs, strict=True))
    assert_close(quick(sharded, *args), plain(X, LOGITS, WEIGHTS), 1e-6)
    # Replicated weights meet varying rows: their gradient is the sum over devices.
    got = quick(jax.grad(loss(sharded), argnums=(0, 1, 2)), *args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted_grads()), strict=True):
        assert_close(a, b, 1e-5)


def test_experts_sharded_under_shard_map() -> None:
    mesh = make_mesh(AxisType.Explicit)
    specs = (P(), P(), P("x"))
    sharded = jax.shard_map(expert_parallel, mesh=mesh, in_specs=specs, out_specs=P())
    args = tuple(place(a, mesh, spec) for a, spec in zip((X, LOGITS, WEIGHTS), specs, strict=True))
    assert_close(quick(sharded, *args), plain(X, LOGITS, WEIGHTS), 1e-6)
    got = quick(jax.grad(loss(sharded), argnums=(0, 1, 2)), *args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted_grads()), strict=True):
        assert_close(a, b, 1e-5)


def test_vmap_under_shard_map() -> None:
    mesh = make_mesh(AxisType.Explicit)
    args = place((X.reshape(4, 2, HIDDEN), LOGITS.reshape(4, 2, EXPERTS)), mesh, P("x"))
    batched = jax.vmap(plain, in_axes=(0, 0, None))
    sharded = jax.shard_map(batched, mesh=mesh, in_specs=(P("x"), P("x"), P()), out_specs=P("x"))
    got = quick(sharded, *args, place(WEIGHTS, mesh, P()))
    assert_close(got.reshape(TOKENS, HIDDEN), plain(X, LOGITS, WEIGHTS), 1e-6)


SPLITS = {
    "x": (P("x"), P(), P()),
    "x features": (P(None, "x"), P(), P()),
    "logits": (P(), P("x"), P()),
    "weights": (P(), P(), P("x")),
}


@both_axis_types
@both_modes
@pytest.mark.parametrize("split", SPLITS)
def test_sharded_arguments_are_refused(split: str, kind: AxisType, mode: str) -> None:
    mesh = make_mesh(kind)
    args = tuple(place(a, mesh, spec) for a, spec in zip((X, LOGITS, WEIGHTS), SPLITS[split], strict=True))
    with pytest.raises(CannotServe, match=r"jax\.shard_map") as caught:
        run(mode, plain, *args)
    if kind == AxisType.Explicit or mode == "eager":
        assert "'x'" in str(caught.value.got)
        assert {"weights": ".weights", "logits": "routing"}.get(split, "'x'").strip(".") in caught.value.where
    with pytest.raises(CannotServe):
        run(mode, lambda *a: explain(*a, CONFIG) and None, *args)


@both_axis_types
@both_modes
def test_sharded_router_arguments_are_refused(kind: AxisType, mode: str) -> None:
    mesh = make_mesh(kind)
    logits, bias = place(LOGITS, mesh, P()), place(jnp.zeros(EXPERTS), mesh, P("x"))
    with pytest.raises(CannotServe, match="selection_bias" if mode == "eager" else "automatic|selection_bias"):
        run(mode, lambda a, b: route(a, CONFIG.router, selection_bias=b), logits, bias)
    with pytest.raises(CannotServe, match="logits"):
        run(mode, lambda a: route(a, CONFIG.router), place(LOGITS, mesh, P("x")))


@both_modes
def test_replicated_arguments_pass(mode: str) -> None:
    mesh = make_mesh(AxisType.Explicit)
    args = place((X, LOGITS, WEIGHTS), mesh, P())
    assert_close(run(mode, plain, *args), plain(X, LOGITS, WEIGHTS), 1e-6)
    with jax.set_mesh(mesh):  # an eager gradient needs it in JAX itself
        got = run(mode, jax.grad(loss(plain)), *args)
    assert_close(got, wanted_grads()[0], 1e-5)


def test_automatic_axes_decide_too_late_to_know() -> None:
    args = place((X, LOGITS, WEIGHTS), make_mesh(AxisType.Auto), P())
    assert_close(plain(*args), plain(X, LOGITS, WEIGHTS), 1e-6)
    with pytest.raises(CannotServe, match="automatic axes"):
        jax.jit(plain)(*args)


@both_axis_types
@both_modes
def test_a_mesh_of_one_device_passes(kind: AxisType, mode: str) -> None:
    mesh = make_mesh(kind, 1)
    args = tuple(place(a, mesh, P("x")) for a in (X, LOGITS, WEIGHTS))
    assert_close(run(mode, plain, *args), plain(X, LOGITS, WEIGHTS), 1e-6)


@both_modes
def test_a_module_under_a_mesh_context(mode: str) -> None:
    """As an NNX model is used: parameters split off, everything replicated, a mesh set around the step."""
    mesh = make_mesh(AxisType.Explicit)
    leaves, tree = jax.tree.flatten(WEIGHTS)

    def step(state: list[jax.Array], x: jax.Array) -> jax.Array:
        weights = jax.tree.unflatten(tree, state)
        return plain(x, x @ jnp.ones((HIDDEN, EXPERTS), x.dtype), weights)

    want = step(leaves, X)
    with jax.set_mesh(mesh):
        state, x = jax.device_put((leaves, X), P())
        assert_close(run(mode, step, state, x), want, 1e-6)
        grads = run(mode, jax.grad(loss(step)), state, x)
        assert [g.shape for g in grads] == [leaf.shape for leaf in leaves]


@pytest.mark.parametrize("mode", ["jit"])
def test_tracers_without_sharding_pass(mode: str) -> None:
    x, logits = X[:, None], LOGITS[:, None]
    want = plain(X, LOGITS, WEIGHTS)
    got = run(mode, jax.vmap(plain, in_axes=(0, 0, None)), x, logits, WEIGHTS)
    assert_close(got[:, 0], want, 1e-6)

    def scanned(x: jax.Array, logits: jax.Array, weights: ExpertWeights) -> jax.Array:
        return jax.lax.scan(lambda c, row: (c, plain(*row, weights)), None, (x, logits))[1]

    assert_close(run(mode, scanned, x, logits, WEIGHTS)[:, 0], want, 1e-6)
    grad = run(mode, jax.grad(loss(scanned), argnums=2), x, logits, WEIGHTS)
    for a, b in zip(jax.tree.leaves(grad), jax.tree.leaves(wanted_grads()[2]), strict=True):
        assert_close(a, b, 1e-5)


def test_values_are_made_to_vary_together() -> None:
    a, b = jnp.ones(3), jnp.ones(4)
    assert_same_bits(vary_together((a, b)), (a, b))
    mesh = make_mesh(AxisType.Explicit)

    def body(a: jax.Array, b: jax.Array) -> jax.Array:
        wide, _ = vary_together((a, b))
        assert jax.typeof(a).manual_axis_type.varying == frozenset()
        assert jax.typeof(wide) == jax.typeof(zeros_varying((3,), jnp.float32, b))
        return wide

    got = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))(
        place(a, mesh, P()), place(b, mesh, P("x"))
    )
    np.testing.assert_array_equal(got, np.ones(12))
