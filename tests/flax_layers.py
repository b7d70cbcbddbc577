"""Small Flax layers of every option, which the suites of the layers and of the Hugging Face names share."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moe_jax
from moe_jax.pallas_kernels.grouped_moe import Activation, MoEConfig
from moe_jax.pallas_kernels.route import RouterConfig

H, I, E, K, S = 8, 12, 4, 2, 6  # noqa: E741 (the field's own letters)
SWIGLU = Activation(name="swiglu", layout="halves")
CONFIG = MoEConfig(router=RouterConfig(experts=E, top_k=K, renormalize=True), activation=SWIGLU)
GPT_OSS = MoEConfig(
    router=RouterConfig(experts=E, top_k=K, score="topk_softmax"),
    activation=Activation(name="gpt_oss_swiglu", layout="interleaved", limit=7.0, alpha=1.702),
)
RELU2 = MoEConfig(
    router=RouterConfig(experts=E, top_k=K, score="sigmoid", renormalize=True, scaling_factor=2.5),
    activation=Activation(name="relu2", layout=None),
)
OPTIONS = {
    "plain": (CONFIG, {}),
    "qwen2": (CONFIG, {"shared_features": S, "shared_gate": True}),
    "gpt_oss": (GPT_OSS, {"use_bias": True, "use_router_bias": True}),
    "deepseek": (RELU2, {"use_selection_bias": True, "shared_features": S}),
}


def build(name: str = "plain", **more) -> moe_jax.nnx.MoE:
    config, options = OPTIONS[name]
    return moe_jax.nnx.MoE(H, I, config, **options, **more, rngs=nnx.Rngs(0))


def make(name: str = "plain", seed: int = 0, **more) -> moe_jax.nnx.MoE:
    """A layer with every array random, biases too. Filled by NumPy, because each draw by JAX compiles."""
    graph, state = nnx.split(nnx.eval_shape(lambda: build(name, **more)))
    random = np.random.default_rng(seed)
    return nnx.merge(
        graph,
        jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, leaf.shape[-1] ** -0.5, leaf.shape), leaf.dtype), state),
    )


def inputs(*shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(7).normal(size=(*shape, H)), dtype)


@functools.cache
def stacked(layers: int, axis: int = 0) -> moe_jax.nnx.MoE:
    """Layers made by scanning: every array with a layer axis. Shared between tests: do not change it."""

    @nnx.split_rngs(splits=layers)
    @nnx.vmap(in_axes=(0,), out_axes=axis)
    def scanned(rngs):
        return moe_jax.nnx.MoE(H, I, CONFIG, rngs=rngs)

    return scanned(nnx.Rngs(0))


def unstacked(moe: moe_jax.nnx.MoE, number: int, axis: int) -> moe_jax.nnx.MoE:
    one = make()
    nnx.update(one, {name: jnp.take(value, number, axis) for name, value in moe.arrays().items()})
    return one
