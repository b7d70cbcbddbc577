"""One mixture-of-experts layer as named arrays and plain functions: what the NNX and Linen modules share.

Names, shapes and roles, with E experts, H features, I hidden features and S shared features. Every matrix is
``[out, in]``, as checkpoints hold it:

====================  =================  ====================================================================
``router``            ``[E, H]``         router weight
``router_bias``       ``[E]``            optional
``selection_bias``    ``[E]`` f32        optional; added to the scores for choosing only, has no gradient
``gate_up``           ``[E, 2I, H]``     ``[E, I, H]`` without gate; gate and up rows as the activation says
``gate_up_bias``      ``[E, 2I]``        optional
``down``              ``[E, H, I]``
``down_bias``         ``[E, H]``         optional
``shared_gate_up``    ``[2S, H]``        optional shared expert
``shared_down``       ``[H, S]``
``shared_gate``       ``[1, H]``         optional sigmoid gate of the shared expert (Qwen2-MoE)
====================  =================  ====================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32

from moe_jax.pallas_kernels.checks import (
    check_array,
    check_float,
    check_function,
    check_integer,
    check_kind,
    check_switch,
)
from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.grouped_moe import ExpertWeights, MoEConfig, SharedExpert, grouped_moe
from moe_jax.pallas_kernels.route import router_logits

NAMES = (
    "router",
    "router_bias",
    "selection_bias",
    "gate_up",
    "gate_up_bias",
    "down",
    "down_bias",
    "shared_gate_up",
    "shared_down",
    "shared_gate",
)
Initializer = Callable[..., Array]
Arrays = Mapping[str, Array]

default_kernel_init: Initializer = jax.nn.initializers.lecun_normal()


def parameter_shapes(
    where: str,
    features: int,
    hidden_features: int,
    config: MoEConfig,
    *,
    use_bias: bool,
    use_router_bias: bool,
    use_selection_bias: bool,
    shared_features: int | None,
    shared_gate: bool,
) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays that a layer with these options has, in the table's order.

    Raises:
        InvalidArgument: a value of another kind, a size below 1, or a gate for a shared expert that is not there.
    """
    check_kind(where, "config", config, MoEConfig)
    features = check_integer(where, "features", features, 1)
    hidden_features = check_integer(where, "hidden_features", hidden_features, 1)
    if shared_features is not None:
        shared_features = check_integer(where, "shared_features", shared_features, 1)
    switches = {"use_bias": use_bias, "use_router_bias": use_router_bias, "use_selection_bias": use_selection_bias}
    for name, value in (switches | {"shared_gate": shared_gate}).items():
        check_switch(where, name, value)
    if shared_gate and shared_features is None:
        raise InvalidArgument(
            "shared_gate without a shared expert", where=where, got="shared_features=None", wanted="shared_features"
        )
    experts, rows = config.router.experts, config.activation.rows
    shared = shared_features or 0
    present: dict[str, tuple[tuple[int, ...], bool]] = {
        "router": ((experts, features), True),
        "router_bias": ((experts,), use_router_bias),
        "selection_bias": ((experts,), use_selection_bias),
        "gate_up": ((experts, rows(hidden_features), features), True),
        "gate_up_bias": ((experts, rows(hidden_features)), use_bias),
        "down": ((experts, features, hidden_features), True),
        "down_bias": ((experts, features), use_bias),
        "shared_gate_up": ((rows(shared), features), shared > 0),
        "shared_down": ((features, shared), shared > 0),
        "shared_gate": ((1, features), shared_gate),
    }
    return {name: shape for name, (shape, there) in present.items() if there}


def initial(name: str, key: Callable[[], Array], shape: tuple[int, ...], dtype: Any, kernel_init: Initializer) -> Array:
    """First value of an array: zeros for biases, ``kernel_init`` for matrices.

    ``kernel_init`` is called as Flax's own layers call theirs, once per expert, with the two-dimensional shape
    ``(in, out)``, so its variance follows one expert's fan-in and never the number of experts.

    Args:
        name: a name of the table above.
        key: gives the key; called for matrices only.
    """
    if name == "selection_bias":
        return jnp.zeros(shape, jnp.float32)
    if name.endswith("bias"):
        return jnp.zeros(shape, dtype)

    def matrix(key: Array) -> Array:
        value = kernel_init(key, (shape[-1], shape[-2]), dtype)
        if not isinstance(value, jax.Array):
            raise InvalidArgument(
                "kernel_init",
                where="MoE",
                got=type(value).__name__,
                wanted="an array (name mesh axes in `partitioning`)",
            )
        return value.T

    return matrix(key()) if len(shape) == 2 else jax.vmap(matrix)(jax.random.split(key(), shape[0]))


def check_making(
    where: str,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: Any,
    param_dtype: Any,
    kernel_init: Initializer,
    partitioning: Mapping[str, Any],
) -> None:
    """Refuse dtypes, an initialiser or axis names that the arrays of these shapes cannot have.

    Raises:
        InvalidArgument: naming the option, and the array that axes are for.
    """
    if dtype is not None:
        check_float(where, "dtype", dtype)
    check_float(where, "param_dtype", param_dtype, None)
    check_function(where, "kernel_init", kernel_init)
    check_kind(where, "partitioning", partitioning, Mapping)
    for name, axes in partitioning.items():
        if name not in shapes:
            raise InvalidArgument("partitioning", where=where, got=repr(name), wanted=" or ".join(shapes))
        several = isinstance(axes, (tuple, list, PartitionSpec)) and len(axes) <= len(shapes[name])
        if not several or any(isinstance(axis, (int, float)) for axis in axes):
            raise InvalidArgument(
                f"partitioning of {name}", where=where, got=repr(axes), wanted=f"at most {len(shapes[name])} axis names"
            )


def expert_weights(arrays: Arrays) -> ExpertWeights:
    """The arrays as the op's weights, in the dtypes they have."""
    shared = None
    if arrays.get("shared_down") is not None:
        shared = SharedExpert(
            gate_up=arrays["shared_gate_up"], down=arrays["shared_down"], gate=arrays.get("shared_gate")
        )
    return ExpertWeights(
        gate_up=arrays["gate_up"],
        down=arrays["down"],
        gate_up_bias=arrays.get("gate_up_bias"),
        down_bias=arrays.get("down_bias"),
        shared=shared,
    )


def features_of(x: Float[Array, "*n H"]) -> int:
    """Size of the last axis.

    Raises:
        InvalidArgument: no array, or one without axes.
    """
    check_array("MoE", "x", x)
    if x.ndim < 1:
        raise InvalidArgument("shape of x", where="MoE", got=[], wanted="[..., H]")
    return x.shape[-1]


def rows_of(x: Float[Array, "*n H"], features: int, arrays: Arrays, dtype: Any) -> Float[Array, "T H"]:
    """Leading axes flattened, in the dtype that the layer computes in.

    That is ``dtype``, or, when None, the common type of the input and the expert weights, as in Flax's layers. The
    casts are explicit and work under strict dtype promotion too.

    Raises:
        InvalidArgument: last axis of another size, or not a floating point array.
    """
    if features_of(x) != features:
        raise InvalidArgument("shape of x", where="MoE", got=list(x.shape), wanted=f"[..., {features}]")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise InvalidArgument("dtype of x", where="MoE", got=x.dtype.name, wanted="a floating point dtype")
    if dtype is None:
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.promote_types(x.dtype, arrays["down"].dtype)
    return x.astype(dtype).reshape(math.prod(x.shape[:-1]), features)


def layer_logits(rows: Float[Array, "T H"], arrays: Arrays) -> Float32[Array, "T E"]:
    """Router logits, accumulated in f32.

    A router kept in f32 is not rounded to the compute dtype: the rows are widened to it instead (exact), because a
    rounded router flips experts.
    """
    router = arrays["router"]
    if router.dtype != rows.dtype:
        rows, router = rows.astype(jnp.float32), router.astype(jnp.float32)
    return router_logits(rows, router, arrays.get("router_bias"))


def layer_output(
    rows: Float[Array, "T H"], logits: Float32[Array, "T E"], arrays: Arrays, config: MoEConfig
) -> Float[Array, "T H"]:
    """The layer on flattened rows, in their dtype."""
    weights = jax.tree.map(lambda w: w.astype(rows.dtype), expert_weights(arrays))
    return grouped_moe(rows, logits, weights, config, selection_bias=arrays.get("selection_bias"))
