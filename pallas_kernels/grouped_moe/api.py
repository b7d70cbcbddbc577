"""Public grouped mixture-of-experts op: checks the arguments and picks the back end."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from ..checks import FLOATS, check_array, check_dtype, check_kind, check_shape
from ..dispatch import Backend, Choice, Operation, sharding_refusal
from ..errors import InvalidArgument
from ..route import Routing, route
from . import mosaic, reference, triton
from .weights import ExpertWeights, MoEConfig, check_weights

# Best first. The modules of kernels import Triton and Mosaic only when they serve a call.
GROUPED_MOE = Operation(
    "grouped_moe",
    (
        Backend("mosaic", mosaic.grouped_moe, mosaic.refusal, mosaic.slower, mosaic.detail),
        Backend("triton", triton.grouped_moe, triton.refusal, detail=triton.detail),
        Backend("reference", reference.grouped_moe, lambda *_: None),
    ),
)


def grouped_moe(
    x: Float[Array, "T H"],
    routing: Float32[Array, "T E"] | Routing,
    weights: ExpertWeights,
    config: MoEConfig,
    *,
    selection_bias: Float32[Array, " E"] | None = None,
    backend: str = "auto",
) -> Float[Array, "T H"]:
    """Mixture-of-experts feed-forward block: each row through its ``k`` experts, weighted and summed.

    ``y[t] = sum_r weight[t, r] * down[e] @ act(gate_up[e] @ x[t])`` with ``e = ids[t, r]``, ranks added
    in order, plus the shared expert if the weights have one. Accumulation is f32 (f64 for f64 inputs);
    the intermediate is rounded once to the dtype of ``x``. No token is ever dropped.

    Works under ``jit``, ``grad``, ``vmap`` and ``jax.checkpoint``, and inside ``jax.shard_map``.

    Differentiation is reverse mode only, of any order: ``jvp``, ``jacfwd`` and so `jax.hessian` raise
    ``TypeError``; ``jax.jacrev(jax.jacrev(f))`` works. ``grad`` of a ``vmap`` makes one gradient of shared
    weights per batch element before it sums them, so put batch dimensions into rows where memory matters.

    Args:
        x: ``[T, H]``, bf16, f16, f32 or f64; T may be 0.
        routing: router logits, f32 ``[T, E]``, or a finished `Routing` (f32 weights and int32 ids
            ``[T, k']``, any k' ≥ 1; ids are rows of ``weights``, and -1 or E, their number, adds exactly 0).
        weights: experts in the dtype of ``x``. With router logits E is ``config.router.experts``; with a finished
            routing it may be another number, e.g. the experts that live on this device.
        config: routing and activation.
        selection_bias: f32 ``[E]`` for choosing experts from logits; refused with a finished routing.
        backend: ``"auto"`` or a back end's name; `explain` says what ``"auto"`` takes.

    Returns:
        ``[T, H]`` in the dtype of ``x``.

    Raises:
        InvalidArgument: a wrong shape, dtype or value, with what was got and wanted.
        CannotServe: the back end asked for declined, or arguments are sharded outside ``shard_map``.
    """
    _check(x, routing, weights, config, selection_bias)
    if not isinstance(routing, Routing):
        routing = route(routing, config.router, selection_bias=selection_bias)
    return GROUPED_MOE(x, routing, weights, config, backend=backend)


def explain(
    x: Float[Array, "T H"],
    routing: Float32[Array, "T E"] | Routing,
    weights: ExpertWeights,
    config: MoEConfig,
    *,
    selection_bias: Float32[Array, " E"] | None = None,
    backend: str = "auto",
) -> Choice:
    """Which back end `grouped_moe` takes for these arguments, where its tile comes from (tuned data or the heuristic),
    and why better ones decline. Runs nothing.

    Takes what `grouped_moe` takes, inside ``jit`` too, and raises what it raises.
    """
    _check(x, routing, weights, config, selection_bias)
    if not isinstance(routing, Routing):
        run = functools.partial(route, config=config.router)
        routing = jax.eval_shape(run, routing, selection_bias=selection_bias)
    return GROUPED_MOE.explain(x, routing, weights, config, backend=backend)


def _check(x, routing, weights, config, selection_bias) -> None:
    where = "grouped_moe"
    check_kind(where, "config", config, MoEConfig)
    check_dtype(where, "x", x, FLOATS)
    check_weights(where, weights, config, x.dtype, like="x", hidden=x.shape[1] if x.ndim == 2 else None)
    hidden = weights.down.shape[1]
    check_shape(where, "x", x, ("T", hidden))
    sharding_refusal(where, {"x": x, "routing": routing, "weights": weights})
    if not isinstance(routing, Routing):
        check_shape(where, "router logits", routing, (x.shape[0], config.router.experts))
        if selection_bias is not None:  # the rest is for `route` to check
            check_array(where, "selection_bias", selection_bias)
        if weights.down.shape[0] != config.router.experts:
            raise InvalidArgument(
                "experts in weights, with router logits",
                where=where,
                got=weights.down.shape[0],
                wanted=f"router.experts={config.router.experts}, or a finished Routing with ids of these weights",
            )
        return
    if selection_bias is not None:
        raise InvalidArgument(
            "selection_bias with a finished routing", where=where, got="an array", wanted="None, or router logits"
        )
    check_dtype(where, "routing.ids", routing.ids, (jnp.int32,))
    check_shape(where, "routing.ids", routing.ids, (x.shape[0], "k"))
    if routing.ids.shape[1] == 0:
        raise InvalidArgument("experts per row", where=where, got=0, wanted="at least 1")
    check_dtype(where, "routing.weights", routing.weights, (jnp.float32,))
    check_shape(where, "routing.weights", routing.weights, routing.ids.shape)
