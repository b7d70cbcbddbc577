"""Causal self-attention with grouped key/value heads, as one NNX module for all model families."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from .config import ModelConfig
from .kv import KV, write
from .rope import Rotation, rotate

_QUERY_BLOCK = 512


def linear(x: Float[Array, "*n in"], w: Float[Array, "out in"], b: Float[Array, " out"] | None = None) -> Array:
    """``x @ w.T + b``, accumulated in f32 (no tf32), rounded once to the dtype of ``x``."""
    y = linear_f32(x, w)
    return (y if b is None else y + b.astype(y.dtype)).astype(x.dtype)


def linear_f32(x: Float[Array, "*n in"], w: Float[Array, "out in"]) -> Array:
    """``x @ w.T`` left in f32 (f64 for f64 inputs)."""
    return lax.dot_general(
        x,
        w,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float64 if x.dtype == jnp.float64 else jnp.float32,
    )


def rms_norm(x: Float[Array, "*n D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "*n D"]:
    """RMSNorm (arXiv:1910.07467): normalised in f32, rounded to the dtype of ``x``, then multiplied by ``scale``."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return scale * wide.astype(x.dtype)


def visible(positions: Int32[Array, "B T"], keys: int, window: int | None) -> Bool[Array, "B 1 T S"]:
    """Which of the ``keys`` first positions each query may see: itself and the past, the last ``window`` of them.

    With padding on the right this is the whole mask: no live query stands after a padding place.
    """
    key = jnp.arange(keys, dtype=jnp.int32)
    query = positions[:, None, :, None]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


def attend(
    query: Float[Array, "B T N D"], kv: KV, positions: Int32[Array, "B T"], window: int | None
) -> Float[Array, "B T N D"]:
    """Softmax attention (f32) over keys at their own index; long prompts go by blocks of queries to bound memory."""

    # XLA for the CPU refuses its f16 product with f32 sums, so f16 is attended in f32.
    dtype = jnp.dtype(jnp.float32) if query.dtype == jnp.float16 else query.dtype
    keys, values = kv.keys.astype(dtype), kv.values.astype(dtype)

    def some(query: Array, positions: Array) -> Array:
        mask = visible(positions, keys.shape[1], window)
        # It mixes dtypes inside, and takes f32 products at the default precision (tf32 on a GPU).
        with jax.numpy_dtype_promotion("standard"), jax.default_matmul_precision("highest"):
            mixed = jax.nn.dot_product_attention(query.astype(dtype), keys, values, mask=mask)
        return mixed.astype(query.dtype)

    rows, length = positions.shape
    if length <= 2 * _QUERY_BLOCK:
        return some(query, positions)

    def by_block(x: Array) -> Array:
        # Queries that fill the last block stand at position 0, so they see one key; their results are cut off.
        x = jnp.pad(x, ((0, 0), (0, -length % _QUERY_BLOCK), *((0, 0),) * (x.ndim - 2)))
        return jnp.swapaxes(x.reshape(rows, -1, _QUERY_BLOCK, *x.shape[2:]), 0, 1)

    out = lax.map(lambda block: some(*block), (by_block(query), by_block(positions)))
    return jnp.swapaxes(out, 0, 1).reshape(rows, -1, *query.shape[2:])[:, :length]


class Attention(nnx.Module):
    """Projections, optional norms of queries and keys, rotation, attention, output projection.

    Attributes:
        qkv: ``[(heads + 2 * kv_heads) * head_dim, H]``: query rows, then key rows, then value rows.
        qkv_bias: the same rows, or None.
        out: ``[H, heads * head_dim]``.
        out_bias: ``[H]`` or None.
        q_norm, k_norm: ``[head_dim]`` each, or ``[heads * head_dim]`` and ``[kv_heads * head_dim]``, or None.
    """

    def __init__(self, config: ModelConfig, layer: int, *, param_dtype: Any, rngs: nnx.Rngs):
        self.config = config
        self.window = config.windows[layer] if config.windows else None
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        init = jax.nn.initializers.normal(config.hidden_size**-0.5)

        def vector(size: int, there: bool, value: float = 0.0) -> nnx.Param | None:
            return nnx.Param(jnp.full(size, value, param_dtype)) if there else None

        self.qkv = nnx.Param(init(rngs.params(), (q + 2 * kv, config.hidden_size), param_dtype))
        self.qkv_bias = nnx.data(vector(q + 2 * kv, config.qkv_bias))
        self.out = nnx.Param(init(rngs.params(), (config.hidden_size, q), param_dtype))
        self.out_bias = nnx.data(vector(config.hidden_size, config.out_bias))
        by_head = config.qk_norm == "head"
        self.q_norm = nnx.data(vector(config.head_dim if by_head else q, config.qk_norm is not None, 1.0))
        self.k_norm = nnx.data(vector(config.head_dim if by_head else kv, config.qk_norm is not None, 1.0))

    def __call__(
        self, x: Float[Array, "B T H"], positions: Int32[Array, "B T"], rotation: Rotation, past: KV | None = None
    ) -> tuple[Float[Array, "B T H"], KV]:
        """Attention of ``x`` to itself, or to ``past`` with ``x`` written into it.

        Returns:
            The output and the keys and values: of ``x`` alone ``[B, T, kv_heads, D]``, or the updated storage.
        """
        query, new = self._project(x)
        new = KV(rotate(new.keys, rotation), new.values)
        kv = new if past is None else write(past, new, positions)
        mixed = attend(rotate(query, rotation), kv, positions, self.window)
        return linear(mixed.reshape(*x.shape[:2], -1), self.out[...], _value(self.out_bias)), kv

    def _project(self, x: Float[Array, "B T H"]) -> tuple[Float[Array, "B T N D"], KV]:
        c = self.config
        rows, length = x.shape[:2]
        split = [c.heads * c.head_dim, (c.heads + c.kv_heads) * c.head_dim]
        q, k, v = jnp.split(linear(x, self.qkv[...], _value(self.qkv_bias)), split, axis=-1)
        if c.qk_norm == "projection":
            q, k = self._norms(q, k)
        if c.clip_qkv is not None:
            q, k, v = (jnp.clip(y, -c.clip_qkv, c.clip_qkv) for y in (q, k, v))
        q = q.reshape(rows, length, c.heads, c.head_dim)
        k, v = (y.reshape(rows, length, c.kv_heads, c.head_dim) for y in (k, v))
        if c.qk_norm == "head":
            q, k = self._norms(q, k)
        return q, KV(k, v)

    def _norms(self, q: Array, k: Array) -> tuple[Array, Array]:
        assert self.q_norm is not None and self.k_norm is not None
        return rms_norm(q, self.q_norm[...], self.config.norm_eps), rms_norm(k, self.k_norm[...], self.config.norm_eps)


def _value(variable: nnx.Variable | None) -> Array | None:
    return None if variable is None else variable[...]
