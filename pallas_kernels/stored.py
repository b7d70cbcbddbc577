"""Files of kernels, of tuned data and of reports: published whole, and checked when they are read."""

from __future__ import annotations

import dataclasses
import os
import reprlib
import tempfile
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import InvalidArgument


def publish(path: Path, content: bytes, check: Callable[[Path], object] | None = None) -> None:
    """Put a file into its place, in place of one that is there.

    It appears whole or not at all: a reader sees the old content or the new, whoever else writes.

    Args:
        path: its folder is there.
        check: is called with a file of the new content before that is in its place; an error of it keeps the old one.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    fresh = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        if check is not None:
            check(fresh)
        fresh.chmod(0o644)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def rebuild[T](kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """A dataclass from what ``dataclasses.asdict`` and JSON made of it: nested ones again, lists as tuples.

    Args:
        kind: a dataclass whose fields are plain types, ``tuple[…, ...]`` of one type, or dataclasses of these.
        where: what the values are of, for errors.

    Raises:
        InvalidArgument: other fields than the dataclass has, a value of another type or below 0, or what the dataclass
            itself refuses.
    """
    names = {field.name for field in dataclasses.fields(typing.cast(Any, kind))}
    if set(values) != names:
        raise InvalidArgument("fields", where=where, got=sorted(values), wanted=sorted(names))
    hints = typing.get_type_hints(kind)
    return kind(**{name: _checked(hints[name], values[name], where, name) for name in sorted(names)})


def _checked(hint: Any, value: Any, where: str, name: str) -> Any:
    """A value as its field has it."""
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return rebuild(typing.cast(Any, hint), value, f"{where}: {name}")
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        item = typing.get_args(hint)[0]
        return tuple(_checked(item, each, where, f"{name}[{index}]") for index, each in enumerate(value))
    # A bool is an int too, but no number of rows.
    if type(value) is not hint or (hint is int and value < 0):
        wanted = "an int of at least 0" if hint is int else getattr(hint, "__name__", str(hint))
        raise InvalidArgument(name, where=where, got=reprlib.repr(value), wanted=wanted)
    return value
