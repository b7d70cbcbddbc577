"""The expert block by Mosaic GPU kernels, for more rows than a decode step has, on sm_90."""

from __future__ import annotations

import functools

from jaxtyping import Array, Float

from ..as_operation import copy_refusal
from ..device import device_of, triton_refusal
from ..dispatch import OutOfScope
from ..route.config import Routing
from .routed import by_kernels
from .weights import ExpertWeights, MoEConfig

# Measured: below about as many rows of an expert reading the weights is the limit, and Triton's tiles fit fewer rows.
ROWS_OF_AN_EXPERT = 96


def refusal(x: Float[Array, "T H"], routing: Routing, weights: ExpertWeights, config: MoEConfig) -> str | None:
    """Why the kernels cannot serve a call, or None."""
    device = device_of(x)
    machine = triton_refusal(device)  # grouping and the last sum are Triton's
    if machine is not None:
        return machine
    capability = getattr(device, "compute_capability", None)
    if capability != "9.0":
        return OutOfScope(f"{device.device_kind} has compute capability {capability}: the kernels are made for 9.0")
    from ..prefill import mosaic

    # First what nobody can put right: rows in another order would not make few of them many.
    refused = mosaic.refusal(x, routing, weights, config)
    return refused or copy_refusal(**{"weights.gate_up": weights.gate_up, "weights.down": weights.down})


def slower(x: Float[Array, "T H"], routing: Routing, weights: ExpertWeights, config: MoEConfig) -> str | None:
    """Why another back end is the better choice for a call that these kernels could serve, or None."""
    (tokens, top_k), (experts, hidden, inner) = routing.ids.shape, weights.down.shape
    measured = _measured(tokens, top_k, experts, hidden, inner, x.dtype.name, device_of(x).device_kind)
    if measured is not None:
        faster, note = measured
        return None if faster == "mosaic" else OutOfScope(f"Triton is faster here: {note}")
    mean = routing.ids.size / weights.down.shape[0]
    if mean >= ROWS_OF_AN_EXPERT:
        return None
    return OutOfScope(f"{mean:.0f} rows an expert on average: Triton is faster below {ROWS_OF_AN_EXPERT}")


@functools.cache
def _measured(
    tokens: int, top_k: int, experts: int, hidden: int, inner: int, dtype: str, device_kind: str
) -> tuple[str, str] | None:
    """The faster of the two back ends by tuned data and what data that is; None where there is none."""
    from ..tuned import Found, lookup, source_hash

    source = functools.partial(source_hash, "prefill")
    found = lookup("prefill", (hidden, inner, experts, top_k), tokens, dtype, device_kind, source)
    if isinstance(found, Found) and (name := found.tile.get("backend")) in ("triton", "mosaic"):
        return name, found.note
    return None


def detail(x: Float[Array, "T H"], routing: Routing, weights: ExpertWeights, config: MoEConfig) -> str:
    """Where the tile of a call comes from."""
    from ..prefill import mosaic

    return f"tile: {mosaic.chosen_tile(x, routing, weights.down.shape).source}"


def _ffn(
    x: Float[Array, "T H"],
    routing: Routing,
    weights: ExpertWeights,
    config: MoEConfig,
    residual: Float[Array, "T H"] | None,
) -> Float[Array, "T H"]:
    from ..prefill import mosaic

    return mosaic.ffn(x, routing, weights, config, residual)


grouped_moe = by_kernels(_ffn)
