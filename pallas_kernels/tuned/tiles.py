"""The tile that a call takes: tuned where there is data for it, by the heuristic elsewhere; and which of the two."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InvalidArgument
from ..experts.heuristics import PAIRS, ROW_DEPTH, ROW_OUTPUTS, Tile, of_device, of_one_arithmetic, tile_for
from ..experts.specs import expert_ffn_spec
from ..grouped_moe.activation import Activation
from .lookup import DATA, Found, lookup, same_arithmetic

# Files under pallas_kernels/ whose text makes data of these operations stale when it changes.
_SOURCES: dict[str, tuple[str, ...]] = {
    "prefill_triton": (
        "prefill/matmul_triton.py",
        "prefill/plan_triton.py",
        "prefill/combine_triton.py",
        "experts/triton.py",  # its product and activations
    ),
    "prefill_mosaic": ("prefill/mosaic_kernel.py", "prefill/mosaic_rows_triton.py"),
}
_SOURCES["prefill"] = (*_SOURCES["prefill_triton"], *_SOURCES["prefill_mosaic"])


class Chosen[T](NamedTuple):
    """A tile and where it comes from, e.g. ``"tuned data for NVIDIA H200, 16 rows"`` or ``"heuristic: no tuned …"``."""

    tile: T
    source: str


def choose[T](
    op: str,
    base: T,
    shape: Sequence[int],
    tokens: int,
    dtype: str,
    device_kind: str,
    *,
    source: str | None = None,
    folder: Path = DATA,
) -> Chosen[T]:
    """The tuned tile of a call, else ``base``, which the heuristic gives.

    Where tuned data ends, ``base`` takes over in everything but the fields that fix the arithmetic.

    Args:
        base: a frozen dataclass, whose kind the tuned tile has too.
        source: hash of the kernel; None: `source_hash` of the one installed.
    """
    kernel = source or functools.partial(source_hash, op)
    found = lookup(op, shape, tokens, dtype, device_kind, kernel, folder=folder)
    if isinstance(found, Found):
        try:
            return Chosen(rebuild(type(base), found.tile), found.note)
        except InvalidArgument as error:
            return Chosen(base, f"heuristic: {error}")
    if found.fixed and not same_arithmetic(dataclasses.asdict(base), found.fixed):  # pyrefly: ignore[bad-argument-type]
        fixed: Any = dataclasses.replace(base, **found.fixed)  # pyrefly: ignore[bad-specialization]
        return Chosen(fixed, f"heuristic: {found.reason}; {found.fixed} as tuned for other calls")
    return Chosen(base, f"heuristic: {found.reason}")


def tuned_tile_for(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    inner: int,
    dtype: str,
    device_kind: str,
    *,
    capability: int = 90,
    source: str | None = None,
    folder: Path = DATA,
) -> Chosen[Tile]:
    """`experts.tile_for` where there is no tuned data for the kind of device, as JAX names it."""
    base = tile_for(tokens, top_k, experts, hidden, inner, dtype, capability=capability)
    shape = (hidden, inner, experts, top_k)
    found = choose("expert_ffn", base, shape, tokens, dtype, device_kind, source=source, folder=folder)
    return found._replace(tile=of_device(of_one_arithmetic(found.tile), device_kind))


@functools.cache
def source_hash(op: str) -> str:
    """What data of an operation is filed under; another kernel source has another.

    Raises:
        InvalidArgument: no such operation.
    """
    if op == "expert_ffn":
        # Of both kernels: the tile says which of them one row takes. That of one row is not imported for it: Gluon is
        # experimental, and data of other row counts is good without it.
        swiglu = Activation(name="swiglu", layout="halves")
        rows = expert_ffn_spec(1, 1, 1, 64, 64, dtype="bfloat16", activation=swiglu)
        parts = [rows.source_hash, _text("experts/row_gluon.py"), repr((PAIRS, ROW_DEPTH, ROW_OUTPUTS))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
    if op not in _SOURCES:
        wanted = ", ".join(["expert_ffn", *_SOURCES])
        raise InvalidArgument("operation", where="source_hash", got=repr(op), wanted=wanted)
    return hashlib.sha256("\n".join(_text(name) for name in _SOURCES[op]).encode()).hexdigest()


def _text(name: str) -> str:
    return (Path(__file__).parents[1] / name).read_text()


def rebuild[T](kind: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass from what ``dataclasses.asdict`` and JSON made of it: nested ones again, lists as tuples.

    Raises:
        InvalidArgument: other fields than the dataclass has.
    """
    names = {f.name for f in dataclasses.fields(typing.cast(Any, kind))}
    if set(values) != names:
        where = f"tuned {kind.__name__}"
        raise InvalidArgument("fields", where=where, got=sorted(values), wanted=sorted(names))
    hints = typing.get_type_hints(kind)

    def value(name: str) -> Any:
        given = values[name]
        if isinstance(given, Mapping):
            return rebuild(hints[name], given)
        return tuple(given) if isinstance(given, list) else given

    return kind(**{name: value(name) for name in names})
