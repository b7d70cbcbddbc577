"""A kernel inside ``jax.jit`` through jax-triton, for a JAX whose XLA has no call of PTX that we know.

Costs the host some microseconds for every kernel at every run of the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .spec import KernelSpec


def call(spec: KernelSpec, inputs: Sequence[Array | jax.Ref]) -> tuple[Array, ...]:
    """As `in_jit.call`, which has checked the inputs."""
    import jax_triton

    operands: dict[str, Any] = {a.name: given for a, given in zip(spec.inputs, inputs, strict=True)}
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
        backend_options={"enable_fp_fusion": spec.enable_fp_fusion, "maxnreg": spec.max_registers},
        **operands,
        **dict(spec.constexprs),
    )
    return tuple(value for argument, value in zip(written, results, strict=True) if argument.role == "out")
