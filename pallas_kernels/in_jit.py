"""A spec as an operation inside ``jax.jit``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array

from . import jax_triton_call, xla_call
from .checks import check_dtype, check_shape
from .errors import InvalidArgument
from .spec import Argument, KernelSpec


def call(spec: KernelSpec, inputs: Sequence[Array | jax.Ref]) -> tuple[Array, ...]:
    """Call the kernel on arrays of one CUDA device.

    Args:
        inputs: an array for each ``"in"`` argument and a `jax.Ref` for each ``"inout"`` one, in the spec's order.
            What the Refs hold is changed in place.

    Returns:
        the ``"out"`` arguments, in order.

    Raises:
        InvalidArgument: another number, kind, shape or dtype of inputs than the spec's.
    """
    where = f"call({spec.name!r})"
    if len(inputs) != len(spec.inputs):
        raise InvalidArgument("number of inputs", where=where, got=len(inputs), wanted=len(spec.inputs))
    for argument, given in zip(spec.inputs, inputs, strict=True):
        _check(where, argument, given)
    return (xla_call if xla_call.known() else jax_triton_call).call(spec, inputs)


def _check(where: str, argument: Argument, given: Any) -> None:
    if argument.role != "inout":
        check_dtype(where, argument.name, given, (argument.dtype,))
        check_shape(where, argument.name, given, argument.shape)
        return
    got, wanted = type(given).__name__, f"a jax.Ref of {argument.dtype}{list(argument.shape)}"
    if isinstance(given, jax.Ref):
        got = f"a jax.Ref of {given.dtype.name}{list(given.shape)}"
    if got != wanted:
        raise InvalidArgument(argument.name, where=where, got=got, wanted=wanted)
