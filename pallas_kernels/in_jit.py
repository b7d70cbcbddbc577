"""A spec as an operation inside ``jax.jit``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

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
    import jax_triton

    where = f"call({spec.name!r})"
    if len(inputs) != len(spec.inputs):
        raise InvalidArgument("number of inputs", where=where, got=len(inputs), wanted=len(spec.inputs))
    operands: dict[str, Any] = {}
    for argument, given in zip(spec.inputs, inputs, strict=True):
        _check(where, argument, given)
        operands[argument.name] = given
    for argument in spec.arguments:
        if argument.role == "state":
            operands[argument.name] = jax.new_ref(jnp.zeros(argument.shape, argument.dtype))
    written = [a for a in spec.arguments if a.role in ("out", "scratch")]
    results = jax_triton.triton_call(
        kernel=spec.function,
        out_type=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in written],
        grid=spec.grid,
        name=spec.name,
        num_warps=spec.num_warps,
        num_stages=spec.num_stages,
        backend_options={"enable_fp_fusion": spec.enable_fp_fusion},
        **operands,
        **dict(spec.constexprs),
    )
    return tuple(value for argument, value in zip(written, results, strict=True) if argument.role == "out")


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
