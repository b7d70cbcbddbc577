"""Public routing: checks the arguments and picks the back end."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from ..checks import FLOATS, check_dtype, check_shape
from ..dispatch import Backend, Operation, sharding_refusal
from . import reference
from .config import RouterConfig, Routing

ROUTE = Operation("route", (Backend("reference", reference.route, lambda *_: None),))
ROUTER_LOGITS = Operation("router_logits", (Backend("reference", reference.router_logits, lambda *_: None),))


def route(
    logits: Float32[Array, "T E"],
    config: RouterConfig,
    *,
    selection_bias: Float32[Array, " E"] | None = None,
    backend: str = "auto",
) -> Routing:
    """Choose ``top_k`` experts for each row.

    Args:
        logits: f32 ``[T, E]``, T may be 0. Lower precision is refused: bf16 logits tie and flip experts
            (`router_logits` accumulates in f32 from bf16 inputs).
        config: scoring, selection and weighting.
        selection_bias: f32 ``[E]``, added to the scores for choosing only, never to the weights
            (DeepSeek-V3's ``e_score_correction_bias``).
        backend: ``"auto"`` or a back end's name.

    Returns:
        `Routing` with f32 weights and int32 ids, both ``[T, k]``, best expert first. Equal scores go
        to the lower id. A row of NaN gets distinct valid ids and NaN weights; other rows are untouched.

    Raises:
        InvalidArgument: wrong shape or dtype, or an unknown back end.
        CannotServe: sharded arguments outside ``shard_map``.
    """
    where = "route"
    check_dtype(where, "logits", logits, (jnp.float32,))
    check_shape(where, "logits", logits, ("T", config.experts))
    if selection_bias is not None:
        check_dtype(where, "selection_bias", selection_bias, (jnp.float32,))
        check_shape(where, "selection_bias", selection_bias, (config.experts,))
    sharding_refusal(where, {"logits": logits, "selection_bias": selection_bias})
    return ROUTE(logits, config, selection_bias, backend=backend)


def router_logits(
    x: Float[Array, "T H"], kernel: Float[Array, "E H"], bias: Float[Array, " E"] | None = None
) -> Float32[Array, "T E"]:
    """Router logits ``x @ kernel.T + bias`` in f32, whatever the inputs' dtype.

    Args:
        x: ``[T, H]`` activations: bf16, f16, f32 or f64.
        kernel: ``[E, H]`` router weight of the same dtype, as checkpoints hold it.
        bias: ``[E]`` in the dtype of ``x`` or f32, or None.

    Raises:
        InvalidArgument: wrong shape, or different dtypes.
        CannotServe: sharded arguments outside ``shard_map``.
    """
    where = "router_logits"
    check_shape(where, "x", x, ("T", "H"))
    check_dtype(where, "x", x, FLOATS)
    check_dtype(where, "kernel", kernel, (x.dtype,))
    check_shape(where, "kernel", kernel, ("E", x.shape[1]))
    if bias is not None:
        check_shape(where, "bias", bias, (kernel.shape[0],))
        check_dtype(where, "bias", bias, (x.dtype, jnp.float32))
    sharding_refusal(where, {"x": x, "kernel": kernel, "bias": bias})
    return ROUTER_LOGITS(x, kernel, bias)
