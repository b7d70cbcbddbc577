"""The small-row matmul in plain `jax.numpy`."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def linear(
    x: Float[Array, "T K"],
    w: Float[Array, "N K"],
    gain: Float[Array, " K"] | None = None,
    bias: Float[Array, " N"] | None = None,
    residual: Float[Array, "T N"] | None = None,
    *,
    eps: float,
    out_dtype: str,
) -> Float[Array, "T N"]:
    """``norm(x) @ w.T + bias + residual``, summed in f32 (f64 for f64 inputs) and rounded once.

    RMSNorm (arXiv:1910.07467) is taken as ``(x * gain) @ w.T / rms(x)``: ``x * gain`` is rounded to the dtype of
    ``x``, the division comes after the product and is not rounded.
    """
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    x = jnp.asarray(x)
    scaled = x if gain is None else (x.astype(wide) * jnp.asarray(gain).astype(wide)).astype(x.dtype)
    y = lax.dot_general(
        scaled, jnp.asarray(w), (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=wide
    )
    if gain is not None:
        y = y * lax.rsqrt(jnp.mean(jnp.square(x.astype(wide)), axis=-1, keepdims=True) + eps)
    if bias is not None:
        y = y + jnp.asarray(bias).astype(wide)
    if residual is not None:
        y = y + jnp.asarray(residual).astype(wide)
    return y.astype(out_dtype)
