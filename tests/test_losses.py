"""Load balancing loss against values computed by Hugging Face transformers 5.24."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax.losses import load_balancing_loss

EXPERTS, ROWS = 6, 12


def make_logits(layer: int) -> np.ndarray:
    """Router logits by a closed form, so that the literals below can be recomputed without a generator."""
    t, e = np.arange(ROWS)[:, None], np.arange(EXPERTS)[None]
    return (2 * np.sin(1.7 * t + 2.3 * e + 0.9 * layer) + 0.1 * e).astype(np.float32)


LAYERS = [jnp.asarray(make_logits(layer)) for layer in range(3)]
MASK = jnp.array([[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]], bool)


# transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func on the same logits:
# layer 0 alone, all three layers, all three with the mask.
@pytest.mark.parametrize(
    ("top_k", "one", "three", "masked"),
    [
        (1, 1.0299293994903564, 1.0403205156326294, 1.092053771018982),
        (2, 2.023225784301758, 2.002460479736328, 2.0194952487945557),
        (6, 6.0, 6.0, 6.0),
    ],
)
def test_loss_equals_transformers(top_k, one, three, masked):
    np.testing.assert_allclose(load_balancing_loss(LAYERS[0], top_k), one, rtol=1e-6)
    np.testing.assert_allclose(load_balancing_loss(LAYERS, top_k), three, rtol=1e-6)
    np.testing.assert_allclose(load_balancing_loss(LAYERS, top_k, mask=MASK), masked, rtol=1e-6)


def test_leading_axes_do_not_matter():
    by_batch = [layer.reshape(2, 6, EXPERTS) for layer in LAYERS]
    np.testing.assert_array_equal(
        load_balancing_loss(by_batch, 2, mask=MASK), load_balancing_loss(LAYERS, 2, mask=MASK.reshape(-1))
    )


def test_even_load_gives_top_k_and_collapse_gives_more():
    even = jnp.tile(10 * jnp.eye(EXPERTS, dtype=jnp.float32), (2, 1))
    collapsed = jnp.tile(10 * jnp.eye(1, EXPERTS, dtype=jnp.float32), (ROWS, 1))
    np.testing.assert_allclose(load_balancing_loss(even, 1), 1.0, rtol=1e-6)
    assert load_balancing_loss(collapsed, 1) > 5.9


def test_gradient_equals_transformers_and_skips_masked_rows():
    grad = jax.jit(jax.grad(lambda layers: load_balancing_loss(layers, 2, mask=MASK)))(LAYERS)
    # Sums of absolute gradients, by torch's backward through the same function.
    wanted = [0.04184236750006676, 0.041222233325242996, 0.04813486337661743]
    np.testing.assert_allclose([jnp.abs(g).sum() for g in grad], wanted, rtol=1e-5)
    assert not np.any(np.asarray(grad[0])[~np.asarray(MASK).reshape(-1)])


def test_rows_that_all_are_padding_give_zero_and_no_nan():
    value, grad = jax.value_and_grad(lambda x: load_balancing_loss(x, 2, mask=jnp.zeros(ROWS, bool)))(LAYERS[0])
    assert value == 0
    assert not np.any(np.asarray(grad))


def test_bf16_logits_are_widened():
    exact = load_balancing_loss(LAYERS[0].astype(jnp.bfloat16).astype(jnp.float32), 2)
    got = load_balancing_loss(LAYERS[0].astype(jnp.bfloat16), 2)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, exact)


@pytest.mark.parametrize(
    ("logits", "top_k", "mask", "problem"),
    [
        ([], 2, None, "router_logits"),
        (LAYERS[0], 0, None, "top_k"),
        (LAYERS[0], 7, None, "top_k"),
        ([LAYERS[0], LAYERS[1][:, :5]], 2, None, "experts of layer 1"),
        (LAYERS, 2, jnp.ones(5, bool), "entries of mask"),
        (None, 2, None, "type of router_logits"),
        ([[1.0] * 6], 2, None, "type of router_logits"),
        ([LAYERS[0], None], 2, None, "type of router_logits"),
        (jnp.float32(1), 2, None, "shape of router_logits"),
        (jnp.ones((3, 6), jnp.int32), 2, None, "dtype of router_logits"),
        *((LAYERS[0], top_k, None, "top_k") for top_k in (None, "2", 2.0, True)),
        *((LAYERS[0], 2, mask, "type of mask") for mask in (3, "x", [True] * 4)),
    ],
)
def test_refusals(logits, top_k, mask, problem):
    with pytest.raises(moe_jax.InvalidArgument) as caught:
        load_balancing_loss(logits, top_k, mask=mask)
    assert caught.value.problem == problem
