"""RMSNorm, router matmul and routing in plain `jax.numpy`, with the kernel's argument list."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from .config import RouterConfig
from .reference import route, router_logits


def normed_route(
    x: Float[Array, "T H"],
    gain: Float[Array, " H"] | None,
    w: Float[Array, "E H"],
    bias: Float[Array, " E"] | None,
    selection_bias: Float32[Array, " E"] | None,
    position: Int32[Array, " T"] | None,
    *,
    config: RouterConfig,
    eps: float | None,
    has_bias: bool,
    has_selection_bias: bool,
    masked: bool,
) -> tuple[Float32[Array, "T k"], Int32[Array, "T k"], Float[Array, "T H"] | Float[Array, " 1"]]:
    """Weights and ids of `route`, and the normed rows (zeros ``[1]`` without a norm).

    RMSNorm (arXiv:1910.07467) as the models compute it: in f32 (f64 for f64), rounded to the dtype of ``x`` after the
    division and again after the gain.
    """
    normed = x
    if eps is not None and gain is not None:
        wide = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
        normed = gain * wide.astype(x.dtype)
    logits = router_logits(normed, w, bias if has_bias else None)
    weights, ids = route(logits, config, selection_bias if has_selection_bias else None)
    if masked and position is not None:
        there = position[:, None] >= 0
        ids, weights = jnp.where(there, ids, -1), jnp.where(there, weights, 0)
    return weights, ids, normed if eps is not None else jnp.zeros(1, x.dtype)
