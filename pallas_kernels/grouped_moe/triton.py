"""The expert block by Triton kernels on a CUDA device: `experts` for 1 to 64 rows, `prefill` for more."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..as_operation import copy_refusal
from ..device import capability_of, device_of, triton_refusal
from ..dispatch import OutOfScope
from ..experts.heuristics import MAX_ROWS
from ..plan.specs import plan_spec
from ..route.config import Routing
from ..spec import FLOATS, KernelSpec
from .activation import Activation
from .routed import by_kernels
from .weights import ExpertWeights, MoEConfig


def refusal(x: Float[Array, "T H"], routing: Routing, weights: ExpertWeights, config: MoEConfig) -> str | None:
    """Why the kernels cannot serve a call, or None."""
    machine = triton_refusal(device_of(x))
    if machine is not None:
        return machine
    from ..prefill.specs import MAX_PAIRS  # which imports this package's activations

    if x.dtype.name not in FLOATS:
        return OutOfScope(f"{x.dtype.name} rows: the kernels take {', '.join(FLOATS)} and add up in float32")
    if x.shape[0] == 0:
        return OutOfScope("0 rows: there is nothing to launch")
    if routing.ids.size > MAX_PAIRS:
        return OutOfScope(f"{routing.ids.size} pairs of row and expert: the kernels take {MAX_PAIRS} at most")
    return copy_refusal(**{"weights.gate_up": weights.gate_up, "weights.down": weights.down})


def detail(x: Float[Array, "T H"], routing: Routing, weights: ExpertWeights, config: MoEConfig) -> str:
    """Where the tile of a call comes from."""
    from ..prefill.triton import chosen_tile
    from ..tuned import tuned_tile_for

    if x.shape[0] > MAX_ROWS:
        return f"tile: {chosen_tile(x, routing, weights.down.shape).source}"
    (tokens, top_k), (experts, hidden, inner) = routing.ids.shape, weights.down.shape
    sizes = (tokens, top_k, experts, hidden, inner)
    tile = tuned_tile_for(*sizes, x.dtype.name, device_of(x).device_kind, capability=capability_of(x))
    return f"tile: {tile.source}"


def _ffn(
    x: Float[Array, "T H"],
    routing: Routing,
    weights: ExpertWeights,
    config: MoEConfig,
    residual: Float[Array, "T H"] | None,
) -> Float[Array, "T H"]:
    if x.shape[0] <= MAX_ROWS:
        return _few_rows(x, routing, weights, config, residual)
    from ..prefill.triton import ffn

    return ffn(x, routing, weights, config, residual)


grouped_moe = by_kernels(_ffn)


def _few_rows(
    x: Float[Array, "T H"],
    routing: Routing,
    weights: ExpertWeights,
    config: MoEConfig,
    residual: Float[Array, "T H"] | None,
) -> Float[Array, "T H"]:
    """Grouping (none for one row) and everything else in one launch: a row's bits do not depend on its company."""
    from ..in_jit import call

    plan, ffn = _specs(
        *routing.ids.shape,
        *weights.down.shape,
        x.dtype.name,
        device_of(x).device_kind,
        capability_of(x),
        config.activation,
        weights.gate_up_bias is not None,
        weights.down_bias is not None,
        residual is not None,
    )
    nothing = jnp.zeros(1, jnp.int32)

    def or_absent(array):
        return jnp.zeros(1, x.dtype) if array is None else array

    used, block_row, block_pair = (nothing,) * 3 if plan is None else call(plan, (routing.ids, nothing))
    (out,) = call(
        ffn,
        (
            *(x, routing.ids, routing.weights, nothing, used, block_row, block_pair),
            *(weights.gate_up, or_absent(weights.gate_up_bias), weights.down, or_absent(weights.down_bias)),
            or_absent(residual),
        ),
    )
    return out


@functools.cache
def _specs(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    inner: int,
    dtype: str,
    device_kind: str,
    capability: int,
    activation: Activation,
    gate_up_bias: bool,
    down_bias: bool,
    residual: bool,
) -> tuple[KernelSpec | None, KernelSpec]:
    """Grouping and experts, for one set of static shapes on one kind of device."""
    from ..experts.specs import expert_ffn_spec  # which imports this package's activations, as tuned tiles do
    from ..tuned import tuned_tile_for

    tile = tuned_tile_for(tokens, top_k, experts, hidden, inner, dtype, device_kind, capability=capability).tile
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
