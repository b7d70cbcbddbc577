"""A mixture-of-experts feed-forward block for Flax Linen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import linen
from flax.core import FrozenDict
from jaxtyping import Array, Float

from moe_jax import layer
from moe_jax.pallas_kernels.checks import check_kind
from moe_jax.pallas_kernels.grouped_moe import MoEConfig


class MoE(linen.Module):
    """Mixture of experts in place of a feed-forward block: ``[..., H] -> [..., H]``, no token dropped.

    H is the input's last axis. Parameters carry the names and shapes of `moe_jax.layer`, which are those of
    `moe_jax.nnx.MoE` too: ``variables["params"]["gate_up"]`` is ``[E, 2I, H]``. ``selection_bias`` is no
    parameter (it has no gradient): it lies in the collection ``"router_state"``.

    Router logits, f32 ``[T, E]`` over the flattened rows, are sown as ``router_logits`` in the collection
    ``"intermediates"``; `moe_jax.load_balancing_loss` takes them.

    Attributes:
        hidden_features: I, intermediate size of one expert.
        config: router and activation.
        use_bias: biases of both expert matmuls.
        use_router_bias: a bias added to the router logits.
        use_selection_bias: a bias for choosing experts only.
        shared_features: S, intermediate size of an expert that every row passes; None for none.
        shared_gate: multiply the shared expert's output by a sigmoid of the input.
        dtype: dtype to compute in and of the output; None takes the common type of input and parameters. Router
            logits are f32 whatever it is.
        param_dtype: dtype of the parameters.
        kernel_init: called per expert with the shape ``(in, out)``, like Flax's own.
        partitioning: mesh axis names by parameter name, boxed as `linen.Partitioned`, e.g.
            ``{"gate_up": ("expert", None, None)}``. By name, and not by wrapping ``kernel_init`` in
            `linen.with_partitioning`, because one initialiser makes arrays of several shapes here and sees those of
            one expert, without the expert axis.
    """

    hidden_features: int
    config: MoEConfig
    use_bias: bool = False
    use_router_bias: bool = False
    use_selection_bias: bool = False
    shared_features: int | None = None
    shared_gate: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: layer.Initializer = layer.default_kernel_init
    partitioning: Mapping[str, tuple[str | None, ...]] = FrozenDict()

    def __post_init__(self) -> None:
        # A Linen module is hashed when it is a static argument of jit; a plain dict would not be.
        check_kind("linen.MoE", "partitioning", self.partitioning, Mapping)
        self.partitioning = FrozenDict(self.partitioning)
        super().__post_init__()

    @linen.compact
    def __call__(self, x: Float[Array, "*n H"]) -> Float[Array, "*n H"]:
        """Each row through its experts.

        Args:
            x: ``[..., H]``; the leading axes may be any, or of size 0.

        Returns:
            ``[..., H]`` in ``dtype``, or in the common type of ``x`` and the parameters.

        Raises:
            InvalidArgument: an option of another kind, options that do not fit together, or ``x`` is no floating point
                array.
        """
        features = layer.features_of(x)
        arrays = self._declare(features)
        rows = layer.rows_of(x, features, arrays, self.dtype)
        logits = layer.layer_logits(rows, arrays)
        self.sow("intermediates", "router_logits", logits)
        return layer.layer_output(rows, logits, arrays, self.config).reshape(x.shape)

    def _declare(self, features: int) -> dict[str, Array]:
        shapes = layer.parameter_shapes(
            "linen.MoE",
            features,
            self.hidden_features,
            self.config,
            use_bias=self.use_bias,
            use_router_bias=self.use_router_bias,
            use_selection_bias=self.use_selection_bias,
            shared_features=self.shared_features,
            shared_gate=self.shared_gate,
        )
        layer.check_making(
            "linen.MoE",
            shapes,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            partitioning=self.partitioning,
        )
        return {name: self._array(name, shape) for name, shape in shapes.items()}

    def _array(self, name: str, shape: tuple[int, ...]) -> Array:
        def init(*key: Array) -> Array:
            return layer.initial(name, lambda: key[0], shape, self.param_dtype, self.kernel_init)

        boxed: Any = linen.with_partitioning(init, self.partitioning[name]) if name in self.partitioning else init
        if name == "selection_bias":
            return self.variable("router_state", name, boxed).value
        return self.param(name, boxed)
