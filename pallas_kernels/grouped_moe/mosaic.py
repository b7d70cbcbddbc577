"""The expert block by Mosaic GPU kernels, for more rows than a decode step has, on sm_90."""

from __future__ import annotations

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
    from ..prefill import mosaic

    device = device_of(x)
    machine = triton_refusal(device)  # grouping and the last sum are Triton's
    if machine is not None:
        return machine
    capability = getattr(device, "compute_capability", None)
    if capability != "9.0":
        return OutOfScope(f"{device.device_kind} has compute capability {capability}: the kernels are made for 9.0")
    copies = copy_refusal(**{"weights.gate_up": weights.gate_up, "weights.down": weights.down})
    return copies or mosaic.refusal(x, routing, weights, config)


def slower(x: Float[Array, "T H"], routing: Routing, weights: ExpertWeights, config: MoEConfig) -> str | None:
    """Why another back end is the better choice for a call that these kernels could serve, or None."""
    mean = routing.ids.size / weights.down.shape[0]
    if mean >= ROWS_OF_AN_EXPERT:
        return None
    return OutOfScope(f"{mean:.0f} rows an expert on average: Triton is faster below {ROWS_OF_AN_EXPERT}")


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
