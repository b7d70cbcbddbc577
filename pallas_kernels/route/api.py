"""Public routing: checks the arguments and picks the back end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from ..as_operation import as_operation, copy_refusal, kernel_refusal
from ..checks import FLOATS, check_dtype, check_kind, check_number, check_shape
from ..dispatch import Backend, Operation, sharding_refusal
from . import reference
from .config import RouterConfig, Routing
from .fused import normed_route
from .heuristics import MAX_ROWS
from .specs import route_logits_spec, route_spec


def route(
    logits: Float32[Array, "T E"],
    config: RouterConfig,
    *,
    selection_bias: Float32[Array, " E"] | None = None,
    backend: str = "auto",
) -> Routing:
    """Choose ``top_k`` experts for each row.

    Works under ``jit``, ``grad`` (reverse mode; through the weights), ``vmap`` and inside ``jax.shard_map``. On a CUDA
    device one launch, and a row's bits depend on that row alone.

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
        InvalidArgument: wrong type, shape or dtype, or an unknown back end.
        CannotServe: sharded arguments outside ``shard_map``.
    """
    where = "route"
    check_kind(where, "config", config, RouterConfig)
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


def route_rows(
    x: Float[Array, "T H"],
    router_weight: Float[Array, "E H"],
    config: RouterConfig,
    *,
    norm_weight: Float[Array, " H"] | None = None,
    eps: float = 1e-6,
    router_bias: Float[Array, " E"] | None = None,
    selection_bias: Float32[Array, " E"] | None = None,
    backend: str = "auto",
) -> tuple[Routing, Float[Array, "T H"]]:
    """RMSNorm of the rows, if its weight is given, their router logits, and `route` of these.

    On a CUDA device one launch for 1 to 256 rows. There a row's bits depend on that row alone, not on the number of
    rows or its place. Works under ``jit``, ``grad`` (reverse mode), ``vmap`` (a batch of rows with shared weights is
    one set of rows) and inside ``jax.shard_map``.

    Args:
        x: ``[T, H]`` activations: bf16, f16, f32 or f64; T may be 0.
        router_weight: ``[E, H]`` in the dtype of ``x``, as checkpoints hold it.
        config: scoring, selection and weighting.
        norm_weight: ``[H]`` in the dtype of ``x``, the weight of RMSNorm (arXiv:1910.07467): computed in f32, rounded
            after the division and after the weight; None: no norm.
        eps: added to the mean square.
        router_bias: ``[E]`` in the dtype of ``x`` or f32, added to the logits.
        selection_bias: f32 ``[E]``, for choosing only, as in `route`.
        backend: ``"auto"`` or a back end's name.

    Returns:
        `Routing` as `route` gives it, from logits in f32; and the normed rows ``[T, H]``, which the experts take
        (``x`` itself without a norm).

    Raises:
        InvalidArgument: a wrong shape, dtype or value, with what was got and wanted.
        CannotServe: the back end asked for declined, or arguments are sharded outside ``shard_map``.
    """
    where = "route_rows"
    check_kind(where, "config", config, RouterConfig)
    check_dtype(where, "x", x, FLOATS)
    check_shape(where, "x", x, ("T", "H"))
    hidden, experts = x.shape[1], config.experts
    eps = check_number(where, "eps", eps, over=0)
    check_dtype(where, "router_weight", router_weight, (x.dtype,))
    check_shape(where, "router_weight", router_weight, (experts, hidden))
    for name, array, size, dtypes in (
        ("norm_weight", norm_weight, hidden, (x.dtype,)),
        ("router_bias", router_bias, experts, (x.dtype, jnp.float32)),
        ("selection_bias", selection_bias, experts, (jnp.float32,)),
    ):
        if array is not None:
            check_dtype(where, name, array, dtypes)
            check_shape(where, name, array, (size,))
    given = {"x": x, "router_weight": router_weight, "norm_weight": norm_weight, "router_bias": router_bias}
    sharding_refusal(where, given | {"selection_bias": selection_bias})
    args = x, norm_weight, router_weight, router_bias, selection_bias
    routing, normed = ROUTE_ROWS(*args, config, eps, backend=backend)
    return routing, x if normed is None else normed


# -- from logits ------------------------------------------------------------------------------------------------------


def _route_spec(logits, config: RouterConfig, selection_bias):
    return route_logits_spec(logits.shape[0], config, selection_bias=selection_bias is not None)


def _route_refusal(logits, config: RouterConfig, selection_bias) -> str | None:
    def spec():  # no rows are no launch
        return route_logits_spec(max(logits.shape[0], 1), config, selection_bias=selection_bias is not None)

    return kernel_refusal(logits, spec, "route_logits_spec")


def _launch_route(config: RouterConfig, logits, selection_bias) -> Routing:
    from ..in_jit import call

    bias = jnp.zeros(1, jnp.float32) if selection_bias is None else selection_bias
    return Routing(*call(_route_spec(logits, config, selection_bias), (logits, bias)))


@functools.cache
def _route_operation(config: RouterConfig) -> Callable[..., Any]:
    def plain(logits, selection_bias):
        return reference.route(logits, config, selection_bias)

    return as_operation(functools.partial(_launch_route, config), plain, rows={0: 0})


@functools.partial(jax.jit, static_argnums=1)
def _route_triton(logits, config: RouterConfig, selection_bias) -> Routing:
    return _route_operation(config)(logits, selection_bias)


# -- from rows --------------------------------------------------------------------------------------------------------


def _rows_spec(x, norm_weight, router_weight, router_bias, selection_bias, config: RouterConfig, eps: float):
    rows, hidden = x.shape
    return route_spec(
        rows,
        hidden,
        config,
        dtype=x.dtype.name,
        norm_eps=None if norm_weight is None else eps,
        bias=None if router_bias is None else router_bias.dtype.name,
        selection_bias=selection_bias is not None,
    )


def _rows_refusal(x, norm_weight, router_weight, *others) -> str | None:
    refused = kernel_refusal(x, lambda: _rows_spec(x, norm_weight, router_weight, *others), "route_spec")
    return refused or copy_refusal(router_weight=router_weight)


def _launch_rows(config: RouterConfig, eps: float, x, norm_weight, router_weight, router_bias, selection_bias):
    from ..in_jit import call

    def or_absent(array, dtype):
        return jnp.zeros(1, dtype) if array is None else array

    scale, ids, normed = call(
        _rows_spec(x, norm_weight, router_weight, router_bias, selection_bias, config, eps),
        (
            *(x, or_absent(norm_weight, x.dtype), router_weight, or_absent(router_bias, jnp.float32)),
            *(or_absent(selection_bias, jnp.float32), jnp.zeros(1, jnp.int32)),
        ),
    )
    return Routing(scale, ids), None if norm_weight is None else normed


def _plain_rows(config: RouterConfig, eps: float, x, norm_weight, router_weight, router_bias, selection_bias):
    scale, ids, normed = normed_route(
        *(x, norm_weight, router_weight, router_bias, selection_bias, None),
        config=config,
        eps=None if norm_weight is None else eps,
        has_bias=router_bias is not None,
        has_selection_bias=selection_bias is not None,
        masked=False,
    )
    return Routing(scale, ids), None if norm_weight is None else normed


@functools.cache
def _rows_operation(config: RouterConfig, eps: float) -> Callable[..., Any]:
    launch, plain = (functools.partial(f, config, eps) for f in (_launch_rows, _plain_rows))
    return as_operation(launch, plain, rows={0: 0}, most=MAX_ROWS)


@functools.partial(jax.jit, static_argnums=(5, 6))
def _rows_triton(x, norm_weight, router_weight, router_bias, selection_bias, config: RouterConfig, eps: float):
    return _rows_operation(config, eps)(x, norm_weight, router_weight, router_bias, selection_bias)


@functools.partial(jax.jit, static_argnums=(5, 6))
def _rows_reference(x, norm_weight, router_weight, router_bias, selection_bias, config: RouterConfig, eps: float):
    return _plain_rows(config, eps, x, norm_weight, router_weight, router_bias, selection_bias)


# Best first. Triton itself is imported only when it serves a call.
ROUTE = Operation(
    "route", (Backend("triton", _route_triton, _route_refusal), Backend("reference", reference.route, lambda *_: None))
)
ROUTER_LOGITS = Operation("router_logits", (Backend("reference", reference.router_logits, lambda *_: None),))
ROUTE_ROWS = Operation(
    "route_rows",
    (Backend("triton", _rows_triton, _rows_refusal), Backend("reference", _rows_reference, lambda *_: None)),
)
