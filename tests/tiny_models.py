"""Tiny random models of every family, for the tests of decoder and generation."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.model import Model
from moe_jax.models.config import ModelConfig, RopeConfig
from moe_jax.models.decoder import Decoder, abstract_decoder
from moe_jax.pallas_kernels.grouped_moe import Activation, MoEConfig
from moe_jax.pallas_kernels.route import RouterConfig

FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "qwen2_moe")


def tiny_config(family: str, **changes: Any) -> ModelConfig:
    """What is particular about each family, at a size that compiles in seconds."""
    own: dict[str, dict[str, Any]] = {
        "mixtral": {"layers": 1, "moe_layers": (True,), "windows": (5,), "rope": RopeConfig(theta=1e6)},
        "qwen3_moe": {"qk_norm": "head", "head_dim": 16, "moe_layers": (False, True), "dense_intermediate": 48},
        "olmoe": {"layers": 1, "moe_layers": (True,), "qk_norm": "projection", "clip_qkv": 1.5, "kv_heads": 4},
        "qwen2_moe": {"qkv_bias": True, "shared_intermediate": 40, "windows": (None, 6), "tie_embeddings": True},
    }
    router = RouterConfig(experts=6, top_k=2, renormalize=family in ("mixtral", "qwen3_moe"))
    moe = MoEConfig(router=router, activation=Activation(name="swiglu", layout="halves"))
    values: dict[str, Any] = {
        "family": family,
        "vocab_size": 258,
        "hidden_size": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "moe": moe,
        "moe_intermediate": 24,
        "moe_layers": (True, True),
        "max_positions": 512,
        "dtype": "float32",
    }
    return ModelConfig(**{**values, **own[family], **changes})


@functools.cache
def tiny_module(config: ModelConfig) -> Decoder:
    """A random module, shared between tests: do not change it. Filled by NumPy, because each draw by JAX compiles."""
    graphdef, state = nnx.split(abstract_decoder(config))
    random = np.random.default_rng(7)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        # Norms and biases are random too, so that one left out shows.
        scale, shift = (leaf.shape[-1] ** -0.5, 0) if len(leaf.shape) > 1 else (0.3, 0.5)
        return jnp.asarray(random.normal(shift, scale, leaf.shape), leaf.dtype)

    return nnx.merge(graphdef, jax.tree.map(fill, state))


@functools.cache
def tiny_model(family: str) -> Model:
    """A model without tokenizer, shared between tests: do not change it."""
    config = tiny_config(family)
    return Model(config, tiny_module(config))
