"""RMSNorm, router matmul and routing in plain `jax.numpy`, with the kernel's argument list."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from .config import RouterConfig
from .reference import route, router_logits


def normed_route(
    x: Float[Array, "T H"],
    gain: Float[Array, " H"],
    w: Float[Array, "E H"],
    bias: Float[Array, " E"],
    selection_bias: Float32[Array, " E"],
    position: Int32[Array, " T"],
    *,
    config: RouterConfig,
    eps: float | None,
    has_bias: bool,
    has_selection_bias: bool,
    masked: bool,
) -> tuple[Float32[Array, "T k"], Int32[Array, "T k"], Float[Array, "..."]]:  # noqa: UP037
    """Weights and ids of `route`, and the normed rows (zeros ``[1]`` without a norm)."""
    normed = x = jnp.asarray(x)
    if eps is not None:
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
        normed = jnp.asarray(gain) * wide.astype(x.dtype)
    logits = router_logits(normed, jnp.asarray(w), jnp.asarray(bias) if has_bias else None)
    weights, ids = route(logits, config, jnp.asarray(selection_bias) if has_selection_bias else None)
    if masked:
        there = jnp.asarray(position)[:, None] >= 0
        ids, weights = jnp.where(there, ids, -1), jnp.where(there, weights, 0)
    return weights, ids, normed if eps is not None else jnp.zeros(1, x.dtype)
