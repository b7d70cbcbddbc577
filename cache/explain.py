"""Why two keys differ: the content they were made of, compared field by field."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from moe_jax.pallas_kernels.spec import KernelSpec


class Difference(NamedTuple):
    """One field in which two values differ."""

    path: str
    a: Any
    b: Any


def explain(a: Any, b: Any, limit: int = 16) -> tuple[Difference, ...]:
    """Which fields differ, by path: of plans, keys, launch lists, manifests, certificates or anything made of these.

    Empty for values of equal content, however they were built.
    """
    found = _differences(a, b, "")
    return tuple(difference for difference, _ in zip(found, range(limit), strict=False))


def _differences(a: Any, b: Any, path: str) -> Iterator[Difference]:
    fields_a, fields_b = _fields(a), _fields(b)
    if fields_a is None or fields_b is None or type(a) is not type(b):
        if not (a is b or a == b):
            yield Difference(path or "value", a, b)
        return
    for name in dict.fromkeys([*fields_a, *fields_b]):
        inner = f"{path}{name}" if name.startswith("[") or not path else f"{path}.{name}"
        if name not in fields_a or name not in fields_b:
            yield Difference(inner, fields_a.get(name, "absent"), fields_b.get(name, "absent"))
        else:
            yield from _differences(fields_a[name], fields_b[name], inner)


def _fields(value: Any) -> dict[str, Any] | None:
    """Named parts, or None for a value without any."""
    if isinstance(value, KernelSpec):
        # Two specs of equal content may hold two functions; a reference is no part of what is launched.
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.name != "reference"}
        return parts | {"function": value.source_hash}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.compare}
    names = getattr(type(value), "_fields", None)
    if isinstance(value, tuple) and names is not None:
        return dict(zip(names, value, strict=True))
    if isinstance(value, (tuple, list)):
        return {f"[{index}]": item for index, item in enumerate(value)}
    if isinstance(value, Mapping):
        return {f"[{key!r}]": item for key, item in value.items()}
    return None
