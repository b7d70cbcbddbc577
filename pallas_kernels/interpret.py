"""A spec run by Triton's interpreter on NumPy arrays: shows a program's structure without a GPU, not its bits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .errors import CannotServe, InvalidArgument
from .spec import KernelSpec


def interpret(spec: KernelSpec, buffers: Mapping[str, np.ndarray]) -> None:
    """Run every program of a launch in order, writing into the buffers.

    Args:
        buffers: an array for each argument name.

    Raises:
        CannotServe: Triton was imported without ``TRITON_INTERPRET=1``, or the spec uses bfloat16, whose products
            the interpreter takes of the raw bits.
        InvalidArgument: a buffer of another shape or dtype.
    """
    from triton.runtime.interpreter import InterpretedFunction

    where = f"interpret({spec.name!r})"
    if not isinstance(spec.function, InterpretedFunction):
        raise CannotServe("interpreter is off", where=where, got="compiled kernels", wanted="TRITON_INTERPRET=1")
    for argument in spec.arguments:
        if argument.dtype == "bfloat16":
            raise CannotServe("dtype", where=where, got="bfloat16", wanted="float16 or float32")
        array = buffers[argument.name]
        if array.dtype.name != argument.dtype or array.shape != argument.shape:
            got = f"{argument.name}: {array.dtype.name}{list(array.shape)}"
            raise InvalidArgument("buffer", where=where, got=got, wanted=f"{argument.dtype}{list(argument.shape)}")
    pointers = {a.name: _Pointer(buffers[a.name]) for a in spec.arguments}
    spec.function[spec.grid](**pointers, **dict(spec.constexprs))


class _Pointer:
    """The part of a torch tensor that the interpreter asks for, over a NumPy array that it writes in place."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = array.dtype.name

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides

    def storage_offset(self) -> int:
        return 0

    def untyped_storage(self) -> _Pointer:
        return self

    cpu = untyped_storage

    def new_empty(self, *_: object, **__: object) -> _Pointer:
        return _Pointer(self.array)

    def set_(self, *_: object) -> None: ...

    def copy_(self, *_: object) -> None: ...
