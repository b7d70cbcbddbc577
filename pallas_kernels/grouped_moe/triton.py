"""The routed expert block by the kernels of `experts` and `plan`: 1 to 64 rows on a CUDA device.

Weights go to the kernels as they are given. The shared expert is the reference's and enters as the residual.
Reverse mode runs the reference backwards. Under ``vmap`` batch elements become rows, in launches of at most
`MAX_ROWS`: a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float, Float32, Int32

from ..device import device_of, triton_refusal
from ..dispatch import OutOfScope
from ..experts.heuristics import MAX_ROWS, tile_for
from ..mesh_axes import vary_together
from ..plan.specs import plan_spec
from ..route.config import Routing
from ..spec import KernelSpec
from . import reference
from .activation import Activation
from .weights import ExpertWeights, MoEConfig

DTYPES = ("bfloat16", "float16", "float32")


def refusal(
    x: Float[Array, "T H"], routing: Routing, weights: ExpertWeights, config: MoEConfig
) -> str | OutOfScope | None:
    """Why the kernels cannot serve a call, or None."""
    rows, dtype = x.shape[0], x.dtype.name
    machine = triton_refusal(device_of(x))
    if machine is not None:
        return machine
    if dtype not in DTYPES:
        return OutOfScope(f"{dtype} rows: the kernels take {', '.join(DTYPES)} and add up in float32")
    if not 1 <= rows <= MAX_ROWS:
        return OutOfScope(f"{rows} rows: the kernels take 1 to {MAX_ROWS}; others are the reference's in this version")
    for name, array in (("gate_up", weights.gate_up), ("down", weights.down)):
        order = _order(array)
        if order != tuple(range(array.ndim)):
            return (
                f"weights.{name} lies in memory in the order of axes {order} and would be copied at every call: once "
                f"put it in order, jax.device_put(w, Format(Layout({tuple(range(array.ndim))}), w.sharding))"
            )
    return None


def _order(array: Any) -> tuple[int, ...]:
    """Axes from the slowest to the fastest, as a concrete array lies in memory. Traced arrays are dense."""
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return tuple(range(array.ndim))
    layout = array.format.layout  # pyrefly: ignore[missing-attribute]
    return tuple(range(array.ndim)) if layout is None else tuple(layout.major_to_minor)


@functools.partial(jax.jit, static_argnums=3)
def grouped_moe(
    x: Float[Array, "T H"], routing: Routing, weights: ExpertWeights, config: MoEConfig
) -> Float[Array, "T H"]:
    """Weighted sum over a row's experts in rank order, plus the shared expert rounded once to the dtype of ``x``.

    Compiled for another platform than JAX's default device, which only XLA sees, it is the reference.
    """
    routed = ExpertWeights(
        gate_up=weights.gate_up,
        down=weights.down,
        gate_up_bias=weights.gate_up_bias,
        down_bias=weights.down_bias,
    )
    residual = None
    if weights.shared is not None:
        residual = reference.shared_expert(x, weights.shared, config, jnp.dtype(jnp.float32)).astype(x.dtype)
    return _routed(config, x, routing.weights, routing.ids, residual, routed)


type _Rows = tuple[Float[Array, "T H"], Float32[Array, "T k"], Int32[Array, "T k"], Float[Array, "T H"] | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _routed(config: MoEConfig, x, scale, ids, residual, weights: ExpertWeights) -> Float[Array, "T H"]:
    """The routed sum plus the residual."""
    return _batched(config)((x, scale, ids, residual), weights)


def _forward(config, x, scale, ids, residual, weights):
    return _routed(config, x, scale, ids, residual, weights), (x, scale, ids, residual, weights)


def _backward(config, saved, grad):
    x, scale, ids, residual, weights = saved

    def plain(x, scale, weights):
        return reference.grouped_moe(x, Routing(scale, ids), weights, config)

    _, pull = jax.vjp(plain, x, scale, weights)
    dx, dscale, dweights = pull(grad)
    return dx, dscale, np.zeros(ids.shape, jax.dtypes.float0), None if residual is None else grad, dweights


_routed.defvjp(_forward, _backward)


def _batched(config: MoEConfig):
    """The forward function whose ``vmap`` flattens the batch into rows, or goes by elements if they have own weights.

    Being one opaque operation also keeps the kernels' counters inside it when a gradient cuts a program in two.
    """

    @custom_vmap
    def forward(rows: _Rows, weights: ExpertWeights):
        kernels = functools.partial(_in_launches, config)
        return lax.platform_dependent(rows, weights, cuda=kernels, default=functools.partial(_elsewhere, config))

    @forward.def_vmap
    def rule(size, batched, rows, weights):
        if any(jax.tree.leaves(batched[1])):
            leaves, tree = jax.tree.flatten((rows, weights))
            flags = jax.tree.leaves(batched)

            def one(i):
                return forward(*tree.unflatten([a[i] if b else a for a, b in zip(leaves, flags, strict=True)]))

            return lax.map(one, jnp.arange(size)), True

        def flat(array, is_batched):
            array = array if is_batched else jnp.broadcast_to(array, (size, *array.shape))
            return array.reshape(-1, array.shape[-1])

        out = forward(jax.tree.map(flat, rows, batched[0]), weights)
        return out.reshape(size, rows[0].shape[-2], out.shape[-1]), True

    return forward


def _elsewhere(config: MoEConfig, rows: _Rows, weights: ExpertWeights) -> Float[Array, "T H"]:
    x, scale, ids, residual = rows
    out = reference.grouped_moe(x, Routing(scale, ids), weights, config)
    return out if residual is None else out + residual


def _in_launches(config: MoEConfig, rows: _Rows, weights: ExpertWeights) -> Float[Array, "T H"]:
    tokens = rows[0].shape[0]
    if tokens == 0:  # a vmap over nothing
        return jnp.zeros_like(rows[0])
    if tokens <= MAX_ROWS:
        return _launch(config, rows, weights)
    count = -(-tokens // MAX_ROWS)

    def cut(array, fill):
        whole = jnp.pad(array, ((0, count * MAX_ROWS - tokens), (0, 0)), constant_values=fill)
        return whole.reshape(count, MAX_ROWS, -1)

    x, scale, ids, residual = rows
    pieces = cut(x, 0), cut(scale, 0), cut(ids, -1), None if residual is None else cut(residual, 0)
    out = lax.map(lambda piece: _launch(config, piece, weights), pieces)
    return out.reshape(-1, out.shape[-1])[:tokens]


def _launch(config: MoEConfig, rows: _Rows, weights: ExpertWeights) -> Float[Array, "T H"]:
    from ..in_jit import call

    x, scale, ids, residual = rows
    plan, ffn = _specs(
        *ids.shape,
        *weights.down.shape,
        x.dtype.name,
        config.activation,
        weights.gate_up_bias is not None,
        weights.down_bias is not None,
        residual is not None,
    )
    nothing = jnp.zeros(1, jnp.int32)

    def or_absent(array):
        return jnp.zeros(1, x.dtype) if array is None else array

    used, block_row, block_pair = (nothing,) * 3 if plan is None else call(plan, (ids, nothing))
    (out,) = call(
        ffn,
        (
            *(x, ids, scale, nothing, used, block_row, block_pair),
            *(weights.gate_up, or_absent(weights.gate_up_bias), weights.down, or_absent(weights.down_bias)),
            or_absent(residual),
        ),
    )
    # The kernels' outputs come without the manual axes of their inputs.
    return vary_together(out, like=(rows, weights))


@functools.cache
def _specs(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    inner: int,
    dtype: str,
    activation: Activation,
    gate_up_bias: bool,
    down_bias: bool,
    residual: bool,
) -> tuple[KernelSpec | None, KernelSpec]:
    """Grouping (none for one row) and experts, for one set of static shapes."""
    from ..experts.specs import expert_ffn_spec  # which imports this package's activations

    tile = tile_for(tokens, top_k, experts, hidden, inner, dtype)
    plan = None if tokens == 1 else plan_spec(tokens, top_k, experts, tile.block_n)
    ffn = expert_ffn_spec(
        tokens,
        top_k,
        experts,
        hidden,
        inner,
        dtype=dtype,
        activation=activation,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        residual=residual,
        tile=tile,
    )
    return plan, ffn
