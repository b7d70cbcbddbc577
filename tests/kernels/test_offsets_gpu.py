"""Activations and weight stacks of more than 2**31 elements. The interpreter's part is in interpreted_edges.py."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ACTIVATIONS
from test_grid_gpu import NAMES, Case, call_of, compiled

import backends as bench
from backends import assert_same_bits
from moe_jax.pallas_kernels.grouped_moe import ExpertWeights
from moe_jax.pallas_kernels.route import Routing

pytestmark = pytest.mark.gpu
# The reference's addresses are XLA's, and its f32 blocks of rows would be 30 GB here. Kernels need 12.
KERNELS = [name for name in NAMES if name != "reference"]


@jax.jit
def largest_row_error(got: jax.Array, want: jax.Array) -> jax.Array:
    """Of all rows, the largest norm of the difference relative to the norm of what is wanted."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.max(jnp.linalg.norm(got - want, axis=1) / jnp.linalg.norm(want, axis=1))


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("hidden", "inner"), [(7168, 64), (64, 7168)], ids=["wide rows", "wide intermediate"])
def test_C08_rows_beyond_2_to_the_31_equal_those_of_a_small_batch(hidden: int, inner: int, backend: str) -> None:
    """37,600 rows of 8 pairs with 7168 elements each are 2.16e9; every row is compared with its own part alone."""
    case = Case(tokens=37600, experts=16, top_k=8, hidden=hidden, inner=inner)
    part = replace(case, tokens=case.tokens // 10)
    assert case.tokens * 8 * 7168 > 2**31
    with bench.served(backend, part.tokens, case.dtype, case.sizes):
        x, r, weights = call_of(case, 1)
        got = compiled(case, backend, (x, r, weights))(x, r, weights)
        alone = None
        for first in range(0, case.tokens, part.tokens):
            rows = slice(first, first + part.tokens)
            args = x[rows], Routing(r.weights[rows], r.ids[rows]), weights
            alone = alone or compiled(part, backend, args)
            assert largest_row_error(got[rows], alone(*args)) < 2e-2, f"rows from {first} on"


EXPERTS, HIDDEN, INNER = 260, 4096, 2048
RELU2 = ACTIVATIONS[6]  # no gate: both stacks have the same size, and pass 2**31 elements with expert 256
CHOSEN = np.array([1, 128, 254, 255, 256, 259], np.int32)


@jax.jit
def large_stack(key: jax.Array) -> ExpertWeights:
    """Experts that are multiples of one another, so that nothing but the stack itself takes memory."""
    one, two = jax.random.split(key)
    size = 0.5 + jax.random.permutation(two, jnp.arange(EXPERTS)) / EXPERTS

    def stack(key: jax.Array, rows: int, columns: int) -> jax.Array:
        base = jax.random.normal(key, (rows, columns), jnp.float32) * columns**-0.5
        return (size.astype(jnp.float32)[:, None, None] * base).astype(jnp.bfloat16)

    return ExpertWeights(gate_up=stack(one, INNER, HIDDEN), down=stack(two, HIDDEN, INNER))


@pytest.mark.parametrize("backend", KERNELS)
def test_C10_experts_beyond_2_to_the_31_equal_the_same_weights_in_a_small_stack(backend: str) -> None:
    weights = large_stack(jax.random.key(3))
    assert weights.gate_up.size == weights.down.size > 2**31
    few = jax.block_until_ready(jax.jit(lambda w: jax.tree.map(lambda a: a[CHOSEN], w))(weights))
    rng = np.random.default_rng(4)
    for tokens in (1, 4, 64, 300):
        case = Case(tokens=tokens, experts=EXPERTS, top_k=2, hidden=HIDDEN, inner=INNER, activation=RELU2)
        with bench.served(backend, tokens, case.dtype, case.sizes):
            x = jnp.asarray(rng.standard_normal((tokens, HIDDEN)), jnp.bfloat16)
            scale = jnp.asarray(rng.random((tokens, 2)) + 0.1, jnp.float32)
            ids = np.argsort(rng.random((tokens, len(CHOSEN))), axis=1)[:, :2].astype(np.int32)
            if tokens == 1:
                ids[0] = [4, 5]
            here, there = Routing(scale, jnp.asarray(ids)), Routing(scale, jnp.asarray(CHOSEN[ids]))
            small = replace(case, experts=len(CHOSEN))
            want = compiled(small, backend, (x, here, few))(x, here, few)
            program = compiled(case, backend, (x, there, weights))
            got = program(x, there, weights)
            if backend == "triton" and tokens <= 64:
                assert_same_bits(got, want)  # whatever the slots that experts live in
            assert largest_row_error(got, want) < 2e-2
            # The comparison would see another expert.
            other = Routing(scale, there.ids - 1)
            assert largest_row_error(program(x, other, weights), want) > 2e-2
