"""Models of published geometries with random weights, made on the device; and what a decode step must read at least."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from moe_jax.errors import CannotServe, InvalidArgument
from moe_jax.model import Model
from moe_jax.models.config import ModelConfig
from moe_jax.models.decoder import abstract_decoder
from moe_jax.models.families import parse_config
from moe_jax.pallas_kernels.route import RouterConfig

# As their config.json has them. "tiny" is none of anybody's: it is for trying the bench out.
GEOMETRIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen3-30b-a3b": {
            **{"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "vocab_size": 151936},
            **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768},
            **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "rope_theta": 1e6},
            "max_position_embeddings": 40960,
        },
        "mixtral-8x7b": {
            **{"model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 32000},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336},
            **{"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6, "max_position_embeddings": 32768},
        },
        "olmoe-1b-7b": {
            **{"model_type": "olmoe", "num_hidden_layers": 16, "hidden_size": 2048, "vocab_size": 50304},
            **{"num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 1024},
            **{"num_experts": 64, "num_experts_per_tok": 8, "max_position_embeddings": 4096},
        },
        "tiny": {
            **{"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 128, "vocab_size": 512},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 64},
            **{"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "max_position_embeddings": 2048},
        },
    }
)
BYTES = 2  # of a bfloat16, the dtype of weights, keys and values
ROOM = 6 << 30  # for logits, scratch, and what XLA's program of a step needs besides


def config_of(name: str) -> ModelConfig:
    """A geometry as the project's config: bf16, and without end tokens, so that no sequence ends by chance.

    Raises:
        InvalidArgument: no such name.
    """
    if name not in GEOMETRIES:
        raise InvalidArgument("shape", where="--shape", got=repr(name), wanted=", ".join(GEOMETRIES))
    return parse_config({**GEOMETRIES[name], "torch_dtype": "bfloat16", "eos_token_id": None}, where=name)


def random_model(config: ModelConfig, seed: int, device: jax.Device) -> Model:
    """A model without tokenizer whose weights are drawn on the device, one array at a time.

    Norms are ones. The embedding has variance one, so that rows differ by their tokens more than by anything else, and
    choose different experts; other matrices have one over their fan-in, so that logits are of the order of one.
    """
    graphdef, state = nnx.split(abstract_decoder(config))
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    key = jax.device_put(jax.random.key(seed), device)
    arrays = [
        _initial(jax.random.fold_in(key, i), jax.tree_util.keystr(path), leaf) for i, (path, leaf) in enumerate(leaves)
    ]
    return Model(config, nnx.merge(graphdef, jax.block_until_ready(tree.unflatten(arrays))))


def _initial(key: Array, name: str, leaf: jax.ShapeDtypeStruct) -> Array:
    if len(leaf.shape) == 1:
        return _constant(key, leaf.shape, leaf.dtype.name, 0.0 if "bias" in name else 1.0)
    return _normal(key, leaf.shape, leaf.dtype.name, 1.0 if "'embed'" in name else leaf.shape[-1] ** -0.5)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _constant(key: Array, shape: tuple[int, ...], dtype: str, value: float) -> Array:
    """The key says on which device."""
    return jnp.full(shape, value, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: Array, shape: tuple[int, ...], dtype: str, scale: float) -> Array:
    return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)


def expected_experts(rows: int, router: RouterConfig) -> float:
    """Distinct experts of a layer that rows choose on average, each k of E uniformly: ``E (1 - (1 - k/E)^rows)``."""
    return router.experts * (1 - (1 - router.top_k / router.experts) ** rows)


def read_bytes(config: ModelConfig, rows: int, context: int, experts: float) -> float:
    """Least bytes that a decode step reads.

    All arrays once, but of the embedding the rows' own vectors (all of it where it is the head too) and of a layer's
    experts those that are chosen; and every row's keys and values.

    Args:
        context: tokens before each row's own.
        experts: distinct experts of a layer, on average.
    """
    total = 0.0
    for name, shape in _shapes(config):
        size = math.prod(shape) * BYTES
        if len(shape) == 3:
            size *= experts / config.moe.router.experts
        elif "'embed'" in name and not config.tie_embeddings:
            size = rows * config.hidden_size * BYTES
        total += size
    windows = config.windows or (None,) * config.layers
    seen = sum(context if window is None else min(context, window) for window in windows)
    return total + rows * seen * 2 * config.kv_heads * config.head_dim * BYTES


def fitting(config: ModelConfig, tokens: int, free: int) -> ModelConfig:
    """As many of the layers as fit.

    Args:
        tokens: that keys and values are kept of, all rows together.
        free: bytes of the device.

    Raises:
        CannotServe: not one layer fits.
    """
    kept = tokens * 2 * config.kv_heads * config.head_dim * BYTES
    one, two = (weight_bytes(cut(config, layers)) for layers in (1, 2))
    layers = (free - ROOM - (2 * one - two)) // (two - one + kept)
    if layers < 1:
        need = one + kept + ROOM
        wanted = f"{need / 1e9:.1f} GB for one layer at {tokens} tokens"
        raise CannotServe("device memory", where="bench decode", got=f"{free / 1e9:.1f} GB", wanted=wanted)
    return cut(config, min(layers, config.layers))


def cut(config: ModelConfig, layers: int) -> ModelConfig:
    """The same with the first layers only."""
    windows, mixtures = config.windows[:layers], config.moe_layers[:layers]
    return replace(config, layers=layers, moe_layers=mixtures, windows=windows)


def weight_bytes(config: ModelConfig) -> int:
    """Of all arrays."""
    return sum(math.prod(shape) * BYTES for _, shape in _shapes(config))


@functools.lru_cache(maxsize=16)
def _shapes(config: ModelConfig) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Path and shape of every array."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(abstract_decoder(config)))
    return tuple((jax.tree_util.keystr(path), leaf.shape) for path, leaf in leaves)
