"""The tile that a call takes: tuned where there is data for it, by the heuristic elsewhere; and which of the two."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InvalidArgument
from ..experts.heuristics import PAIRS, ROW_DEPTH, ROW_OUTPUTS, Tile, of_device, of_one_arithmetic, tile_for
from ..experts.specs import expert_ffn_spec
from ..grouped_moe.activation import Activation
from ..stored import rebuild
from .lookup import DATA, Found, Refused, arithmetic_of, fixing, lookup

# Files under pallas_kernels/ whose text makes data of these operations stale when it changes.
_SOURCES: dict[str, tuple[str, ...]] = {
    "prefill_triton": (
        "prefill/matmul_triton.py",
        "prefill/plan_triton.py",
        "prefill/combine_triton.py",
        "experts/triton.py",  # its product and activations
    ),
    "prefill_mosaic": ("prefill/mosaic_kernel.py", "prefill/mosaic_rows.py", "prefill/mosaic_blocks_triton.py"),
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

    Where tuned data ends, or has a tile that is none, ``base`` takes over in everything but the fields that fix the
    arithmetic.

    Args:
        base: a frozen dataclass, whose kind the tuned tile has too.
        source: hash of the kernel; None: `source_hash` of the one installed.
    """
    kernel = source or functools.partial(source_hash, op)
    found = lookup(op, shape, tokens, dtype, device_kind, kernel, folder=folder)
    if isinstance(found, Found):
        try:
            return Chosen(rebuild(type(base), found.tile, f"tuned {type(base).__name__}"), found.note)
        except InvalidArgument as error:
            found = Refused(str(error), fixing(op, found.tile))
    usual = dataclasses.asdict(base)  # pyrefly: ignore[bad-argument-type]
    if found.fixed and arithmetic_of(op, usual) != arithmetic_of(op, found.fixed):
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
    # Where the heuristic has no ring, data cannot bring one: another capability, or a Triton that lacks its language.
    tile = found.tile if base.ring else dataclasses.replace(found.tile, ring=0, ahead=0)
    return found._replace(tile=of_device(of_one_arithmetic(tile), device_kind))


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
