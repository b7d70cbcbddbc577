"""Argument checks shared by everything public; each refusal gives what was got and what was wanted.

Numbers and switches of NumPy are as good as Python's, and a number may be an array of no axes. A bool is no number.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
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


def check_shape(where: str, name: str, array: Any, wanted: Sequence[int | str], note: str = "") -> None:
    """Compare a shape with sizes (ints) and free dimensions (names); ``note`` goes behind what was wanted."""
    check_array(where, name, array)
    shape = tuple(array.shape)
    fits = len(shape) == len(wanted) and all(
        isinstance(want, str) or got == want for got, want in zip(shape, wanted, strict=True)
    )
    if not fits:
        text = "[" + ", ".join(str(dim) for dim in wanted) + "]"
        raise InvalidArgument(f"shape of {name}", where=where, got=list(shape), wanted=text + note)


def check_dtype(where: str, name: str, array: Any, wanted: Sequence[Any], note: str = "") -> None:
    """Require one of the dtypes; there is no silent promotion. ``note`` goes behind what was wanted."""
    check_array(where, name, array)
    names = [np.dtype(dtype).name for dtype in wanted]
    if array.dtype.name not in names:
        raise InvalidArgument(f"dtype of {name}", where=where, got=array.dtype.name, wanted=" or ".join(names) + note)


def check_kind(where: str, name: str, value: Any, wanted: type) -> None:
    """Require an instance of a class."""
    if not isinstance(value, wanted):
        got, want = type(value).__name__, wanted.__name__
        if got == want:  # as of two libraries
            got, want = (f"{each.__module__}.{each.__name__}" for each in (type(value), wanted))
        raise InvalidArgument(f"type of {name}", where=where, got=got, wanted=want)


def shown(value: Any) -> str:
    """A value in words; Python does not print integers of any length."""
    long = isinstance(value, int) and value.bit_length() > 64
    return f"an integer of {value.bit_length()} bits" if long else repr(value)


def plain(value: Any) -> Any:
    """An array of NumPy or JAX as Python's numbers; what else there is, as it is."""
    if isinstance(value, (int, float, str)):  # by far most; the question after this one takes microseconds
        return value
    if isinstance(value, jax.core.Tracer) or not isinstance(value, (np.ndarray, jax.Array)):
        return value
    random_keys = jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    return value if random_keys else value.tolist()


def as_number(value: Any) -> float:
    """A number as Python's own; NaN for what is none, so that no comparison holds."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def check_number(where: str, name: str, value: Any, *, over: float = -math.inf, infinite: bool = False) -> float:
    """Require a number above a bound, and give it as Python's own."""
    number = as_number(value)
    if not over < number < math.inf and not (infinite and number == math.inf):
        wanted = f"a {'' if infinite else 'finite '}number{'' if over == -math.inf else f' over {over:g}'}"
        raise InvalidArgument(name, where=where, got=shown(value), wanted=wanted)
    return number


def check_integer(where: str, name: str, value: Any, least: int, most: int | None = None) -> int:
    """Require an integer in a range, and give it as Python's own."""
    number = plain(value)
    fits = isinstance(number, (int, np.integer)) and not isinstance(number, bool)
    if not fits or number < least or (most is not None and number > most):
        wanted = f"an integer, {least} or more" if most is None else f"an integer from {least} to {most}"
        raise InvalidArgument(name, where=where, got=shown(value), wanted=wanted)
    return int(number)


def check_switch(where: str, name: str, value: Any) -> bool:
    """Require True or False, and give it as Python's own."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(name, where=where, got=shown(value), wanted="True or False")
    return bool(value)


def check_choice(where: str, name: str, value: Any, choices: Iterable[str | None]) -> None:
    """Require one of some names."""
    known = tuple(choices)
    if not (value is None or isinstance(value, str)) or value not in known:
        raise InvalidArgument(name, where=where, got=shown(value), wanted=" or ".join(map(repr, known)))


def check_function(where: str, name: str, value: Any) -> None:
    """Require what can be called."""
    if not callable(value):
        raise InvalidArgument(name, where=where, got=shown(value), wanted="a function")


def check_float(where: str, name: str, dtype: Any, wanted: Sequence[Any] | None = FLOATS) -> np.dtype:
    """Require one of the dtypes, or with None any floating point one, in whatever form; give it as NumPy's."""
    try:
        found = None if dtype is None else jnp.dtype(dtype)
    except (TypeError, ValueError):
        found = None
    names = None if wanted is None else [np.dtype(each).name for each in wanted]
    if found is None or not (jnp.issubdtype(found, jnp.floating) if names is None else found.name in names):
        got = shown(dtype) if found is None else found.name
        text = "a floating point dtype" if names is None else " or ".join(names)
        raise InvalidArgument(name, where=where, got=got, wanted=text)
    return found


def check_path(where: str, path: Any) -> Path:
    """Require the path of a folder, or of nothing yet, and give it with its ``~`` expanded."""
    named = isinstance(path, (str, os.PathLike)) and os.fspath(path)
    if not isinstance(named, str) or not named or "\0" in named:
        raise InvalidArgument("path", where=where, got=repr(path), wanted="the path of a folder")
    folder = Path(os.path.expanduser(named))  # leaves the ~ of an unknown user, where Path.expanduser raises
    if os.path.lexists(folder) and not folder.is_dir():
        kind = "the file" if folder.exists() else "a link to nothing,"
        raise InvalidArgument("path", where=where, got=f"{kind} {folder}", wanted="a folder")
    return folder
