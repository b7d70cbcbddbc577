"""A kernel inside ``jax.jit`` through XLA's own call of PTX: its launch is one of XLA's program like any other, so it
costs the host nothing more when the program runs again.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from .device import capability_of, capability_of_device, device_of
from .errors import CannotServe
from .spec import Argument, KernelSpec

TARGET = "__gpu$xla.gpu.ptx"
# Versions of JAX whose XLA has that call, with the fields that `_lower` writes.
KNOWN_JAX = ((0, 11, 2), (0, 12, 0))

# Operands are the contents of the spec's "in", "inout" and "state" arguments; results are its "out" and "scratch" ones,
# and then the new contents of the "inout" and "state" ones.
kernel_call = Primitive("kernel_call")
kernel_call.multiple_results = True
kernel_call.def_impl(functools.partial(xla.apply_primitive, kernel_call))


def known() -> bool:
    """Whether the installed JAX has the call, and the driver is not forbidden to compile."""
    low, high = KNOWN_JAX
    return low <= jax.__version_info__ < high and os.environ.get("CUDA_DISABLE_PTX_JIT", "0") == "0"


def call(spec: KernelSpec, inputs: Sequence[Array | jax.Ref]) -> tuple[Array, ...]:
    """As `in_jit.call`, which has checked the inputs."""
    given = iter(inputs)
    operands, refs = [], []
    for argument in spec.arguments:
        if argument.role == "in":
            operands.append(next(given))
        elif argument.role == "inout":
            refs.append(next(given))
            operands.append(refs[-1][...])
        elif argument.role == "state":
            operands.append(jnp.zeros(argument.shape, argument.dtype))
    results = kernel_call.bind(*operands, spec=spec)
    written, changed = _written(spec), _changed(spec)
    left = results[len(written) :]
    values = [value for argument, value in zip(changed, left, strict=True) if argument.role == "inout"]
    for ref, value in zip(refs, values, strict=True):
        ref[...] = value
    return tuple(value for argument, value in zip(written, results, strict=False) if argument.role == "out")


def _written(spec: KernelSpec) -> list[Argument]:
    return [a for a in spec.arguments if a.role in ("out", "scratch")]


def _changed(spec: KernelSpec) -> list[Argument]:
    return [a for a in spec.arguments if a.role in ("inout", "state")]


@kernel_call.def_abstract_eval
def _abstract_eval(*operands: ShapedArray, spec: KernelSpec) -> list[ShapedArray]:
    # Under shard_map each device calls the kernel by itself: results vary over whatever any operand varies over.
    varying = frozenset[str]().union(*(operand.manual_axis_type.varying for operand in operands))
    sharding = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
    return [
        ShapedArray(a.shape, np.dtype(a.dtype), sharding=sharding, manual_axis_type=ManualAxisType(varying=varying))
        for a in [*_written(spec), *_changed(spec)]
    ]


def _capability() -> int:
    """Of JAX's default device, or of the first CUDA device where that is another: a lowering is not told its device."""
    if device_of(None).platform == "gpu":
        return capability_of(None)
    with contextlib.suppress(RuntimeError):  # there is none, as when a program is lowered for another machine
        return capability_of_device(jax.local_devices(backend="cuda")[0])
    return capability_of(None)


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, spec: KernelSpec) -> Sequence[Any]:
    from .compiled import ptx_of

    capability = _capability()
    ptx = ptx_of(spec, capability)
    if ptx.global_scratch or ptx.profile_scratch:
        got = f"{ptx.global_scratch} and {ptx.profile_scratch} bytes a program for sm_{capability}"
        raise CannotServe("scratch of Triton's", where=f"call({spec.name!r})", got=got, wanted="none")
    # XLA hands a kernel one pointer for each operand and each result. Results that share an operand's memory come last,
    # where Triton's own two pointers stand, which the kernel does not read.
    changed = [i for i, argument in enumerate(spec.arguments) if argument.role in ("inout", "state")]
    pointers = len(spec.arguments) + len(changed)
    first = pointers - len(ctx.avals_out)
    aliases = {place: len(_written(spec)) + i for i, place in enumerate(changed)}
    rule = jax.ffi.ffi_lowering(TARGET, operand_output_aliases=aliases)
    launch = dict(zip(("grid_x", "grid_y", "grid_z"), spec.grid, strict=True))
    launch |= {"block_x": ptx.threads, "block_y": 1, "block_z": 1, "shared_mem_bytes": ptx.shared}
    return rule(
        ctx,
        *operands,
        name=ptx.symbol,
        kernel_type="ptx",
        kernel_data=with_parameters(ptx.text, pointers),
        **{name: np.int32(value) for name, value in launch.items()},
        output_indices=tuple(range(first, pointers)),  # an array of attributes: XLA ignores a dense one
    )


mlir.register_lowering(kernel_call, _lower, platform="cuda")


def with_parameters(ptx: str, count: int) -> str:
    """A kernel's text with ``count`` parameters: without the last ones, or with more of them that it does not read."""
    start = ptx.index("(", ptx.index(".visible .entry ")) + 1
    end = ptx.index(")", start)
    own = [line.strip().rstrip(",") for line in ptx[start:end].strip().splitlines()]
    own += [f".param .u64 unread_{i}" for i in range(len(own), count)]
    return f"{ptx[:start]}\n\t{',\n\t'.join(own[:count])}\n{ptx[end:]}"
