"""Argument checks shared by the operations; each refusal gives what was got and what was wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .errors import InvalidArgument

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


def check_array(where: str, name: str, array: Any) -> None:
    """Require an array: nested lists and plain numbers have no dtype to trust."""
    if not isinstance(array, (jax.Array, np.ndarray)):
        raise InvalidArgument(f"type of {name}", where=where, got=type(array).__name__, wanted="an array")


def check_shape(where: str, name: str, array: Any, wanted: Sequence[int | str]) -> None:
    """Compare a shape with sizes (ints) and free dimensions (names)."""
    check_array(where, name, array)
    shape = tuple(array.shape)
    fits = len(shape) == len(wanted) and all(
        isinstance(want, str) or got == want for got, want in zip(shape, wanted, strict=True)
    )
    if not fits:
        text = "[" + ", ".join(str(dim) for dim in wanted) + "]"
        raise InvalidArgument(f"shape of {name}", where=where, got=list(shape), wanted=text)


def check_dtype(where: str, name: str, array: Any, wanted: Sequence[Any]) -> None:
    """Require one of the dtypes; there is no silent promotion."""
    check_array(where, name, array)
    names = [np.dtype(dtype).name for dtype in wanted]
    if array.dtype.name not in names:
        raise InvalidArgument(f"dtype of {name}", where=where, got=array.dtype.name, wanted=" or ".join(names))


def check_kind(where: str, name: str, value: Any, wanted: type) -> None:
    """Require an instance of a class of ours."""
    if not isinstance(value, wanted):
        raise InvalidArgument(f"type of {name}", where=where, got=type(value).__name__, wanted=wanted.__name__)
