"""A mixture-of-experts feed-forward block for Flax NNX."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from moe_jax import layer
from moe_jax.pallas_kernels.checks import check_kind
from moe_jax.pallas_kernels.grouped_moe import ExpertWeights, MoEConfig
from moe_jax.pallas_kernels.route import Routing, route


class SelectionBias(nnx.Variable):
    """Bias of expert selection (DeepSeek-V3): moved by a balancing rule, not by gradients, so not a `nnx.Param`."""


class MoE(nnx.Module):
    """Mixture of experts in place of a feed-forward block: ``[..., H] -> [..., H]``, no token dropped.

    Arrays are named and laid out as in `moe_jax.layer`; those that an option leaves out are None. Two instances
    of the same options have equal, hashable graph definitions.

        moe = MoE(64, 128, MoEConfig(router=RouterConfig(experts=8, top_k=2),
                                     activation=Activation(name="swiglu", layout="halves")), rngs=nnx.Rngs(0))
        y = moe(x)

    Attributes:
        router: ``[E, H]``.
        router_bias: ``[E]`` or None.
        selection_bias: f32 ``[E]`` or None, a `SelectionBias`.
        gate_up: ``[E, 2I, H]``, rows laid out as the activation says.
        gate_up_bias: ``[E, 2I]`` or None.
        down: ``[E, H, I]``.
        down_bias: ``[E, H]`` or None.
        shared_gate_up: ``[2S, H]`` or None.
        shared_down: ``[H, S]`` or None.
        shared_gate: ``[1, H]`` or None.
    """

    router: nnx.Param[Array]
    router_bias: nnx.Param[Array] | None
    selection_bias: SelectionBias | None
    gate_up: nnx.Param[Array]
    gate_up_bias: nnx.Param[Array] | None
    down: nnx.Param[Array]
    down_bias: nnx.Param[Array] | None
    shared_gate_up: nnx.Param[Array] | None
    shared_down: nnx.Param[Array] | None
    shared_gate: nnx.Param[Array] | None

    def __init__(
        self,
        features: int,
        hidden_features: int,
        config: MoEConfig,
        *,
        use_bias: bool = False,
        use_router_bias: bool = False,
        use_selection_bias: bool = False,
        shared_features: int | None = None,
        shared_gate: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: layer.Initializer = layer.default_kernel_init,
        partitioning: Mapping[str, tuple[str | None, ...]] = MappingProxyType({}),
        rngs: nnx.Rngs,
    ):
        """Make the parameters.

        Args:
            features: H, size of the last axis of input and output.
            hidden_features: I, intermediate size of one expert.
            config: router and activation.
            use_bias: biases of both expert matmuls.
            use_router_bias: a bias added to the router logits.
            use_selection_bias: a bias for choosing experts only.
            shared_features: S, intermediate size of an expert that every row passes; None for none.
            shared_gate: multiply the shared expert's output by a sigmoid of the input.
            dtype: dtype to compute in and of the output; None takes the common type of input and parameters.
                Router logits are f32 whatever it is.
            param_dtype: dtype of the parameters.
            kernel_init: called per expert with the shape ``(in, out)``, like Flax's own.
            partitioning: mesh axis names by parameter name, kept as Flax's ``out_sharding`` metadata, e.g.
                ``{"gate_up": ("expert", None, None)}``. `nnx.get_partition_spec` reads them. By name, and not by
                wrapping ``kernel_init`` in `nnx.with_partitioning`, because one initialiser makes arrays of several
                shapes here and sees those of one expert, without the expert axis.
            rngs: its ``params`` stream gives the keys.

        Raises:
            InvalidArgument: an option of another kind, or options that do not fit together.
        """
        shapes = layer.parameter_shapes(
            "nnx.MoE",
            features,
            hidden_features,
            config,
            use_bias=use_bias,
            use_router_bias=use_router_bias,
            use_selection_bias=use_selection_bias,
            shared_features=shared_features,
            shared_gate=shared_gate,
        )
        layer.check_making(
            "nnx.MoE",
            shapes,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            partitioning=partitioning,
        )
        check_kind("nnx.MoE", "rngs", rngs, nnx.Rngs)
        self.features, self.hidden_features, self.config = features, hidden_features, config
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        for name in layer.NAMES:
            setattr(self, name, nnx.data(None))
        for name, shape in shapes.items():
            kind = SelectionBias if name == "selection_bias" else nnx.Param
            metadata: dict[str, Any] = {"out_sharding": partitioning[name]} if name in partitioning else {}
            value = layer.initial(name, rngs.params, shape, param_dtype, kernel_init)
            setattr(self, name, kind(value, **metadata))

    def __call__(self, x: Float[Array, "*n H"]) -> Float[Array, "*n H"]:
        """Each row through its experts.

        Args:
            x: ``[..., H]``; the leading axes may be any, or of size 0.

        Returns:
            ``[..., H]`` in ``dtype``, or in the common type of ``x`` and the parameters.

        Raises:
            InvalidArgument: last axis of another size, or not floating point.
        """
        arrays = self.arrays()
        rows = layer.rows_of(x, self.features, arrays, self.dtype)
        logits = layer.layer_logits(rows, arrays)
        return layer.layer_output(rows, logits, arrays, self.config).reshape(x.shape)

    def router_logits(self, x: Float[Array, "*n H"]) -> Float32[Array, "T E"]:
        """Router logits of the flattened rows, f32 ``[T, E]``: what `moe_jax.load_balancing_loss` takes."""
        arrays = self.arrays()
        return layer.layer_logits(layer.rows_of(x, self.features, arrays, self.dtype), arrays)

    def routing(self, x: Float[Array, "*n H"]) -> Routing:
        """Experts and weights of the flattened rows, both ``[T, k]``."""
        return route(self.router_logits(x), self.config.router, selection_bias=self.arrays().get("selection_bias"))

    def weights(self) -> ExpertWeights:
        """The expert arrays as `moe_jax.grouped_moe` takes them, in their own dtypes, without a copy."""
        return layer.expert_weights(self.arrays())

    def arrays(self) -> dict[str, Array]:
        """Every array that is there, by its name in `moe_jax.layer`."""
        named = {name: getattr(self, name) for name in layer.NAMES}
        return {name: variable[...] for name, variable in named.items() if variable is not None}
