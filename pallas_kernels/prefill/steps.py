"""The launches that every kernel of the throughput path shares, inside ``jax.jit``: grouping before, the sum after."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from ..in_jit import call
from .reference import Plan
from .specs import combine_spec, plan_specs

_plan_specs = functools.cache(plan_specs)
_combine_spec = functools.cache(combine_spec)


def plan(
    ids: Int32[Array, "T k"],
    experts: int,
    block: int,
    *,
    weight_row: Int32[Array, " E"] | None = None,
    slots: int | None = None,
) -> Plan:
    """Group pairs by expert in blocks of ``block`` places, on the device. No id is read on the host.

    Args:
        ids: -1 or ``experts``: the pair has no expert.
        weight_row: where each expert stands in weight stacks of ``slots`` rows; None: expert e is row e.

    Raises:
        InvalidArgument: see `plan_specs`.
    """
    *before, place = _plan_specs(*ids.shape, experts, block, slots=None if weight_row is None else slots)
    nothing = jnp.zeros(1, jnp.int32)
    counted = (nothing, nothing)
    if before:
        count, scan = before
        counted = call(scan, call(count, (ids,)))
    return Plan(*call(place, (ids, nothing if weight_row is None else weight_row, *counted)))


def combine(
    pair: Float[Array, "places H"],
    place: Int32[Array, "T k"],
    scale: Float32[Array, "T k"],
    residual: Float[Array, "T H"] | None = None,
) -> Float[Array, "T H"]:
    """Each token's pair vectors by its weights, added in rank order in f32; then the residual; rounded once."""
    spec = _combine_spec(*place.shape, *pair.shape, dtype=pair.dtype.name, residual=residual is not None)
    (out,) = call(spec, (pair, place, scale, jnp.zeros(1, pair.dtype) if residual is None else residual))
    return out
