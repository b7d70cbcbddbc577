"""Arrays that lie in one allocation full of NaN: what a kernel reads or writes beside its arrays shows."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_jax.pallas_kernels.spec import KernelSpec

ALIGNMENT = 256  # as JAX and CUDA align
GAP = 1 << 16  # bytes before each array and after the last
FILL = 0xFF  # as every byte: NaN in bf16, f16 and f32, -1 in int32


def starts(sizes: list[int]) -> tuple[list[int], int]:
    """Offsets of arrays of these sizes in bytes, with a gap before each, and the size of the whole."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(-(-(end + GAP) // ALIGNMENT) * ALIGNMENT)
        end = offsets[-1] + size
    return offsets, end + GAP


# -- One launch -------------------------------------------------------------------------------------------------------


def fill(spec: KernelSpec, given: Mapping[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The allocation as bytes, and the launch's arrays as views of it: inputs as given, state 0, the rest NaN."""
    sizes = [int(np.prod(a.shape)) * np.dtype(a.dtype).itemsize for a in spec.arguments]
    offsets, total = starts(sizes)
    image = np.full(total, FILL, np.uint8)
    views = {}
    for a, offset, size in zip(spec.arguments, offsets, sizes, strict=True):
        views[a.name] = image[offset : offset + size].view(a.dtype).reshape(a.shape)
        if a.name in given:
            views[a.name][...] = given[a.name]
        elif a.role in ("in", "inout", "state"):
            views[a.name][...] = 0
    return image, views


def check(spec: KernelSpec, before: np.ndarray, after: np.ndarray) -> None:
    """Nothing was written but what the launch may write, and state is zero again."""
    sizes = [int(np.prod(a.shape)) * np.dtype(a.dtype).itemsize for a in spec.arguments]
    offsets, total = starts(sizes)
    ends = [0, *(offset + size for offset, size in zip(offsets, sizes, strict=True))]
    for end, start, name in zip(ends, [*offsets, total], [*(a.name for a in spec.arguments), "the end"], strict=True):
        assert (after[end:start] == FILL).all(), f"{spec.name} wrote before {name}"
    for a, offset, size in zip(spec.arguments, offsets, sizes, strict=True):
        if a.role in ("in", "state"):
            np.testing.assert_array_equal(after[offset : offset + size], before[offset : offset + size], a.name)


def interpreted(spec: KernelSpec, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every array after a launch in Triton's interpreter."""
    from moe_jax.pallas_kernels.interpret import interpret

    image, views = fill(spec, given)
    before = image.copy()
    interpret(spec, views)
    check(spec, before, image)
    return views


def launched(spec: KernelSpec, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every array after a launch on the GPU."""
    from cuda.core import Device

    from moe_jax.pallas_kernels.launcher import load_kernel

    device = Device(0)
    device.set_current()
    major, minor = device.compute_capability
    kernel = load_kernel(spec, _compiled(spec, 10 * major + minor))
    image, views = fill(spec, given)
    memory = jnp.asarray(image)
    spare = [jnp.zeros(max(1, size), jnp.uint8) for size in kernel.scratch_bytes]
    jax.block_until_ready([memory, spare])
    base = image.__array_interface__["data"][0]
    place = {name: view.__array_interface__["data"][0] - base for name, view in views.items()}
    stream = device.create_stream()
    kernel.launch(
        stream,
        [memory.unsafe_buffer_pointer() + place[a.name] for a in spec.arguments],
        (spare[0].unsafe_buffer_pointer(), spare[1].unsafe_buffer_pointer()),
    )
    stream.sync()
    after = np.asarray(memory.copy())
    check(spec, image, after)
    size = {name: view.nbytes for name, view in views.items()}
    return {
        name: after[place[name] : place[name] + size[name]].view(view.dtype).reshape(view.shape)
        for name, view in views.items()
    }


_made: dict[tuple[str, int], Any] = {}


def _compiled(spec: KernelSpec, capability: int) -> Any:
    """Equal specs, made again, are compiled once."""
    from moe_jax.pallas_kernels.compiled import compile_spec

    if (spec.key, capability) not in _made:
        _made[spec.key, capability] = compile_spec(spec, capability)
    return _made[spec.key, capability]


# -- Arrays for a call inside jit -------------------------------------------------------------------------------------


class Surrounded:
    """Copies of a tree's arrays inside one allocation full of NaN, on the device where they are.

    Attributes:
        tree: the copies. They share the allocation's memory and must not outlive this object.
    """

    def __init__(self, tree: Any):
        leaves, structure = jax.tree.flatten(tree)
        offsets, total = starts([leaf.nbytes for leaf in leaves])
        self.memory = jax.block_until_ready(_joined(leaves, tuple(offsets), total))
        views = [_View(self.memory, offset, leaf) for offset, leaf in zip(offsets, leaves, strict=True)]
        arrays = [jax.dlpack.from_dlpack(view) for view in views]
        assert [a.unsafe_buffer_pointer() for a in arrays] == [view.address for view in views], "JAX made copies"
        self.tree = structure.unflatten(arrays)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _joined(leaves: list[jax.Array], offsets: tuple[int, ...], total: int) -> jax.Array:
    parts, end = [], 0
    for leaf, offset in zip(leaves, offsets, strict=True):
        parts += [jnp.full(offset - end, FILL, jnp.uint8), lax.bitcast_convert_type(leaf, jnp.uint8).reshape(-1)]
        end = offset + leaf.nbytes
    return jnp.concatenate([*parts, jnp.full(total - end, FILL, jnp.uint8)])


class _Tensor(ctypes.Structure):
    """``DLTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """``DLManagedTensor``."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


# JAX insists on a function to call when an array goes. Nothing is to be done then, and no Python may be needed, as it
# may be the end of the process: so a C function that does nothing with a number.
_NOTHING = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p).value
# JAX reads these when an array goes, whenever that is.
_handed_out: list[tuple[_Managed, Any]] = []


class _View:
    """A part of a byte array as an array of another shape and dtype, for `jax.dlpack.from_dlpack`."""

    def __init__(self, memory: jax.Array, offset: int, like: jax.Array):
        self.address, self.like = memory.unsafe_buffer_pointer() + offset, like
        (device,) = memory.devices()
        self.device = (2 if device.platform == "gpu" else 1, device.local_hardware_id or 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **_: Any) -> Any:
        name, shape = self.like.dtype.name, self.like.shape
        code = 4 if name == "bfloat16" else 2 if name.startswith("float") else 0
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        tensor = _Tensor(self.address, *self.device, len(shape), code, 8 * self.like.dtype.itemsize, 1, sizes, None, 0)
        managed = _Managed(tensor, None, _NOTHING)
        _handed_out.append((managed, sizes))
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(managed), b"dltensor", None)
