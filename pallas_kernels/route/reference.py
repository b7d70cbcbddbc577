"""Routing in plain jax.numpy: the definition every kernel is held against."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from .config import RouterConfig, Routing


def router_logits(
    x: Float[Array, "T H"], kernel: Float[Array, "E H"], bias: Float[Array, " E"] | None = None
) -> Float32[Array, "T E"]:
    """Router matmul, accumulated and kept in f32 (bf16 logits tie and flip experts)."""
    logits = lax.dot_general(
        x, kernel, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return logits if bias is None else logits + bias.astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=1)
def route(
    logits: Float32[Array, "T E"], config: RouterConfig, selection_bias: Float32[Array, " E"] | None = None
) -> Routing:
    """Experts and weights of each row; see `RouterConfig` for the formulas."""
    scores = _scores(logits, config)
    choice = scores if selection_bias is None else scores + selection_bias
    # NaN never wins a place: such a row falls back to the lowest ids, distinct and in range.
    choice = jnp.where(jnp.isnan(choice), -jnp.inf, choice)
    if config.groups_kept < config.groups:
        choice = jnp.where(_eligible(choice, config), choice, -jnp.inf)
    ids = top_k_ids(choice, config.top_k)
    # From the scores themselves: (score + bias) - bias loses small scores to rounding.
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if config.score == "topk_softmax":
        weights = jax.nn.softmax(weights, axis=-1)
    if config.renormalize:
        # 1e-20 as in DeepSeek-V3's code: k sigmoids may all underflow to 0, a softmax cannot.
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return Routing(weights * config.scaling_factor, ids)


def top_k_ids(values: Float32[Array, "T E"], k: int) -> Int32[Array, "T k"]:
    """Indices of the k largest, best first; equal values go to the lower index.

    A stable sort, because `lax.top_k` on GPUs does not promise the order of ties.
    """
    order = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    _, ids = lax.sort((-lax.stop_gradient(values), order), dimension=-1, is_stable=True, num_keys=1)
    return ids[..., :k]


def _scores(logits: Float32[Array, "T E"], config: RouterConfig) -> Float32[Array, "T E"]:
    if config.score == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    if config.score == "sigmoid":
        return jax.nn.sigmoid(logits)
    return logits


def _eligible(choice: Float32[Array, "T E"], config: RouterConfig) -> Array:
    """Which experts belong to one of the kept groups; bool ``[T, E]``."""
    tokens, experts = choice.shape
    size = experts // config.groups
    by_group = choice.reshape(tokens, config.groups, size)
    best_two = lax.sort(by_group, dimension=-1)[..., -2:]
    kept = top_k_ids(jnp.sum(best_two, axis=-1), config.groups_kept)
    mask = jnp.any(kept[:, :, None] == jnp.arange(config.groups, dtype=jnp.int32), axis=1)
    return jnp.repeat(mask, size, axis=1)
