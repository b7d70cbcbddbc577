"""Decoder-only MoE language models (Mixtral, Qwen3-MoE, OLMoE, Qwen2-MoE) as one set of NNX modules.

What the families differ in is data in `ModelConfig`; there is no module per family.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int, Int32

from moe_jax.nnx import MoE
from moe_jax.pallas_kernels.checks import check_float, check_kind, check_shape
from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.grouped_moe import Activation, activate

from .attention import Attention, linear, linear_f32, rms_norm
from .config import ModelConfig
from .kv import KV, Cache, to_capacity
from .rope import Rotation, rotation


class DenseMLP(nnx.Module):
    """Gated feed-forward block of the layers that are no mixture.

    Attributes:
        gate_up: ``[2 * I, H]``: gate rows, then up rows.
        down: ``[H, I]``.
    """

    def __init__(self, hidden: int, inner: int, activation: Activation, *, param_dtype: Any, rngs: nnx.Rngs):
        self.activation = activation
        self.gate_up = nnx.Param(_normal(rngs, (activation.rows(inner), hidden), hidden, param_dtype))
        self.down = nnx.Param(_normal(rngs, (hidden, inner), inner, param_dtype))

    def __call__(self, x: Float[Array, "*n H"]) -> Float[Array, "*n H"]:
        """The intermediate is f32 through the activation, rounded once."""
        h = activate(linear_f32(x, self.gate_up[...]), self.activation)
        return linear(h.astype(x.dtype), self.down[...])


class Block(nnx.Module):
    """One layer: attention and feed-forward block, each behind a norm and added to its input."""

    def __init__(self, config: ModelConfig, layer: int, *, param_dtype: Any, rngs: nnx.Rngs):
        self.eps = config.norm_eps
        self.attention_norm = nnx.Param(jnp.ones(config.hidden_size, param_dtype))
        self.attention = Attention(config, layer, param_dtype=param_dtype, rngs=rngs)
        self.mlp_norm = nnx.Param(jnp.ones(config.hidden_size, param_dtype))
        self.mlp = _feed_forward(config, layer, param_dtype, rngs)

    def __call__(
        self, x: Float[Array, "B T H"], positions: Int32[Array, "B T"], angles: Rotation, past: KV | None = None
    ) -> tuple[Float[Array, "B T H"], KV]:
        """Output and the layer's keys and values; see `Attention`."""
        normed = rms_norm(x, self.attention_norm[...], self.eps)
        mixed, kv = self.attention(normed, positions, angles, past)
        x = x + mixed
        return x + self.mlp(rms_norm(x, self.mlp_norm[...], self.eps)), kv


class Decoder(nnx.Module):
    """The language model: tokens to logits, with or without stored keys and values.

    Attributes:
        config: what it is.
        embed: ``[V, H]``.
        blocks: `nnx.List` of `Block`.
        norm: ``[H]``.
        head: ``[V, H]``, or None when the head is the embedding table.
    """

    def __init__(self, config: ModelConfig, *, param_dtype: Any = None, rngs: nnx.Rngs):
        """Make a model with random parameters.

        Args:
            config: shapes and options.
            param_dtype: dtype of the parameters, and of activations; None takes ``config.dtype``.
            rngs: its ``params`` stream gives the keys.

        Raises:
            InvalidArgument: a config whose parts do not fit together.
        """
        _check(config)
        dtype = check_float("Decoder", "param_dtype", config.dtype if param_dtype is None else param_dtype)
        check_kind("Decoder", "rngs", rngs, nnx.Rngs)
        table = (config.vocab_size, config.hidden_size)
        self.config = config
        self.embed = nnx.Param(_normal(rngs, table, config.hidden_size, dtype))
        self.blocks = nnx.List([Block(config, i, param_dtype=dtype, rngs=rngs) for i in range(config.layers)])
        self.norm = nnx.Param(jnp.ones(config.hidden_size, dtype))
        untied = not config.tie_embeddings
        self.head = nnx.data(nnx.Param(_normal(rngs, table, config.hidden_size, dtype)) if untied else None)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float32[Array, "B T V"]:
        """Next-token logits after every position; rows padded on the right are right up to their end.

        Raises:
            InvalidArgument: tokens that are not ``[B, T]``, or no integers.
        """
        check_shape("Decoder", "tokens", tokens, ("B", "T"))
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise InvalidArgument("dtype of tokens", where="Decoder", got=tokens.dtype.name, wanted="integers")
        return self.logits(self._forward(tokens)[0])

    def prefill(
        self, tokens: Int32[Array, "B T"], lengths: Int32[Array, " B"], capacity: int
    ) -> tuple[Float32[Array, "B V"], Cache]:
        """Read prompts padded on the right.

        Args:
            tokens: ``[B, T]``, row b valid up to ``lengths[b]``.
            lengths: ``[B]``, each at least 1.
            capacity: positions the returned storage has, at least T.

        Returns:
            Logits after each row's last token, and the storage.
        """
        x, kvs = self._forward(tokens)
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
        return self.logits(last)[:, 0], tuple(to_capacity(kv, lengths, capacity) for kv in kvs)

    def decode(
        self, tokens: Int32[Array, " B"], lengths: Int32[Array, " B"], past: Cache
    ) -> tuple[Float32[Array, "B V"], Cache]:
        """Read one more token of each row, at position ``lengths[b]``; logits after it, and the storage."""
        x, kvs = self._forward(tokens[:, None], lengths[:, None], past)
        return self.logits(x)[:, 0], kvs

    def logits(self, x: Float[Array, "*n H"]) -> Float32[Array, "*n V"]:
        """Final norm and output head, f32."""
        table = self.embed if self.head is None else self.head
        return linear_f32(rms_norm(x, self.norm[...], self.config.norm_eps), table[...]).astype(jnp.float32)

    def _forward(self, tokens, positions=None, past: Cache | None = None) -> tuple[Float[Array, "B T H"], Cache]:
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        angles = rotation(self.config.rope, self.config.head_dim, positions)
        x = jnp.take(self.embed[...], tokens, axis=0)
        kvs = []
        for layer, block in enumerate(self.blocks):
            x, kv = block(x, positions, angles, None if past is None else past[layer])
            kvs.append(kv)
        return x, tuple(kvs)


def abstract_decoder(config: ModelConfig) -> Decoder:
    """The decoder of a config with shapes in the place of arrays: nothing is computed."""
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, dtype: Any) -> Array:
    return jax.nn.initializers.normal(fan_in**-0.5)(rngs.params(), shape, dtype)


def _feed_forward(config: ModelConfig, layer: int, param_dtype: Any, rngs: nnx.Rngs) -> MoE | DenseMLP:
    if config.moe_layers[layer]:
        return MoE(
            config.hidden_size,
            config.moe_intermediate,
            config.moe,
            shared_features=config.shared_intermediate,
            shared_gate=config.shared_intermediate is not None,
            param_dtype=param_dtype,
            rngs=rngs,
        )
    assert config.dense_intermediate is not None
    return DenseMLP(
        config.hidden_size, config.dense_intermediate, config.moe.activation, param_dtype=param_dtype, rngs=rngs
    )


def _check(config: ModelConfig) -> None:
    check_kind("Decoder", "config", config, ModelConfig)

    def check(ok: bool, name: str, got: object, wanted: str) -> None:
        if not ok:
            raise InvalidArgument(name, where="Decoder(config)", got=got, wanted=wanted)

    layers, windows = config.layers, config.windows
    check(len(config.moe_layers) == layers, "moe_layers", len(config.moe_layers), f"one for each of {layers} layers")
    check(not windows or len(windows) == layers, "windows", len(windows), f"none, or one for each of {layers} layers")
    check(all(w is None or w >= 1 for w in windows), "windows", windows, "None or at least 1 token")
    check(config.kv_heads >= 1, "kv_heads", config.kv_heads, "at least 1")
    check(config.heads % config.kv_heads == 0, "heads", config.heads, f"a multiple of kv_heads={config.kv_heads}")
    dense = config.dense_intermediate
    check(all(config.moe_layers) or dense is not None, "dense_intermediate", dense, "a size, for the dense layers")
    check(config.moe.activation.layout == "halves", "activation layout", config.moe.activation.layout, "'halves'")
