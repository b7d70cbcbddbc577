"""Find tuned data.

A file ``data/<device>.json`` holds what was tuned on one kind of device::

    {"format": 1, "device": "NVIDIA H200",
     "operations": {"expert_ffn": {"source_hash": "…", "builder": "triton 3.9.0", "date": "…", "entries": [
         {"shape": [2048, 768, 128, 8], "dtype": "bfloat16", "tokens": 16, "tile": {"block_m": 64, …}, "us": 181.2}]}}}

An entry serves calls of its shape and dtype with at most ``tokens`` rows: of several, the least that is enough.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InvalidArgument

FORMAT = 1
DATA = Path(__file__).parent / "data"
# Fields that fix the order of a sum, see `arithmetic_of`; all are powers of two. One (H, I, dtype) has one arithmetic,
# whatever the rows: a row's bits must not depend on its company.
ARITHMETIC = {"expert_ffn": ("block_m", "block_k", "num_warps")}


def arithmetic_of(op: str, tile: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of an operation's tile fixes the order of its sums: tiles that are equal in this give equal bits.

    That is the fields of `ARITHMETIC`, or only how many elements a step has where a warp has 16 rows: of 4 and of 8
    such warps, tests on a GPU have shown that they run the same sums.
    """
    fixed = fixing(op, tile)
    if op == "expert_ffn" and fixed["block_m"] == 16 * fixed["num_warps"]:
        return (fixed["block_k"],)
    return tuple(fixed.values())


def fixing(op: str, tile: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a tile that are in `ARITHMETIC`; None for one that it does not have."""
    return {name: tile.get(name) for name in ARITHMETIC.get(op, ())}


@dataclass(frozen=True)
class Found:
    """A tile that was tuned for the call, and where it comes from."""

    tile: dict[str, Any]
    note: str


@dataclass(frozen=True)
class Refused:
    """Why there is no tuned tile for the call.

    Attributes:
        reason: in one sentence.
        fixed: fields that the data fixes for the call's (H, I, dtype) all the same, up to `arithmetic_of`, because
            other row counts or numbers of experts were tuned with them.
    """

    reason: str
    fixed: dict[str, Any] = field(default_factory=dict)


def file_name(device_kind: str) -> str:
    """``"NVIDIA H200"`` as ``"nvidia-h200.json"``."""
    return re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-") + ".json"


def lookup(
    op: str,
    shape: Sequence[int],
    tokens: int,
    dtype: str,
    device_kind: str,
    source_hash: str | Callable[[], str],
    *,
    builder: str | None = None,
    folder: Path = DATA,
) -> Found | Refused:
    """The tuned tile for a call, or the reason why there is none. Never raises for what stands in a file.

    Args:
        op: name of the tuned operation, e.g. ``"expert_ffn"``.
        shape: its static sizes; (H, I, E, k) for ``expert_ffn``.
        tokens: rows of the call.
        dtype: numpy name.
        device_kind: as JAX gives it, e.g. ``"NVIDIA H200"``.
        source_hash: of the kernel that will run; data of another source is refused. A function is asked only where
            there is data: some hashes need Triton.
        builder: compiler that builds the kernel, by default the installed Triton. Data made with another one is used
            and the note says so.
    """
    path = folder / file_name(device_kind)
    if not path.exists():
        return Refused(f"no tuned data for {device_kind}")
    content = _content(path)
    if isinstance(content, str):
        return Refused(content)
    if content["device"] != device_kind:
        return Refused(f"{path.name} was tuned on {content['device']}, this is {device_kind}")
    operation = content["operations"].get(op)
    if operation is None:
        return Refused(f"no tuned data for {op} on {device_kind}")
    here = source_hash if isinstance(source_hash, str) else source_hash()
    if operation["source_hash"] != here:
        found, wanted = operation["source_hash"][:12], here[:12]
        return Refused(f"tuned data of another source: {found}…, the kernel here is {wanted}…")
    alike = [e for e in operation["entries"] if (e["shape"][:2], e["dtype"]) == (list(shape[:2]), dtype)]
    fixed = fixing(op, alike[0]["tile"]) if alike else {}
    mine = [e for e in alike if e["shape"] == list(shape)]
    if not mine:
        return Refused(f"no tuned data for {op} at {tuple(shape)} {dtype} on {device_kind}", fixed)
    enough = [e for e in mine if e["tokens"] >= tokens]
    if not enough:
        most = max(e["tokens"] for e in mine)
        return Refused(f"tuned data for {op} at {tuple(shape)} {dtype} ends at {most} rows, got {tokens}", fixed)
    entry = min(enough, key=lambda e: e["tokens"])
    runs = builder or _installed_builder()
    other = "" if operation["builder"] == runs else f", tuned with {operation['builder']} where {runs} runs"
    return Found(entry["tile"], f"tuned data for {device_kind}, {entry['tokens']} rows{other}")


def load(path: Path) -> dict[str, Any]:
    """The content of a data file, checked whole.

    Raises:
        InvalidArgument: no valid data; or entries of one (H, I, dtype) that differ in `arithmetic_of`: then nothing of
            the file counts.
    """

    def refuse(problem: str, got: object, wanted: object) -> InvalidArgument:
        return InvalidArgument(problem, where=f"tuned data {path.name}", got=got, wanted=wanted)

    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise refuse("content", error, "JSON") from error
    shaped = isinstance(content, dict) and isinstance(content.get("device"), str)
    if not shaped or content.get("format") != FORMAT or not isinstance(content.get("operations"), dict):
        wanted = f"an object with format {FORMAT}, device and operations"
        raise refuse("content", sorted(content) if isinstance(content, dict) else type(content).__name__, wanted)
    for op, operation in content["operations"].items():
        problem = _malformed(operation)
        if problem:
            raise refuse(op, problem, "source_hash, builder and entries with shape, dtype, tokens and tile")
        seen: set[tuple[Any, ...]] = set()
        first: dict[tuple[Any, ...], dict[str, Any]] = {}
        for entry in operation["entries"]:
            shape, dtype, tokens = entry["shape"], entry["dtype"], entry["tokens"]
            if (*shape, dtype, tokens) in seen:
                raise refuse(op, f"{shape} {dtype} {tokens} rows twice", "each once")
            seen.add((*shape, dtype, tokens))
            fixed, where = fixing(op, entry["tile"]), f"{op} at {shape} {dtype}, {tokens} rows"
            if not all(type(value) is int and value > 0 and value.bit_count() == 1 for value in fixed.values()):
                raise refuse(f"fields that fix the arithmetic, {where}", fixed, "powers of two")
            common = first.setdefault((*shape[:2], dtype), fixed)
            if arithmetic_of(op, fixed) != arithmetic_of(op, common):
                raise refuse(f"fields that fix the arithmetic, {where}", fixed, f"{common}, as for every row count")
    return content


def _malformed(operation: Any) -> str | None:
    """What is wrong with the form of one operation's part."""
    if not isinstance(operation, dict):
        return type(operation).__name__
    if not all(isinstance(operation.get(name), str) for name in ("source_hash", "builder")):
        return "no source_hash or builder"
    if not isinstance(operation.get("entries"), list):
        return "no entries"
    for entry in operation["entries"]:
        right = (
            isinstance(entry, dict)
            and isinstance(entry.get("shape"), list)
            and all(type(n) is int and n > 0 for n in entry["shape"])
            and len(entry["shape"]) >= 2
            and isinstance(entry.get("dtype"), str)
            and type(entry.get("tokens")) is int
            and entry["tokens"] > 0
            and isinstance(entry.get("tile"), dict)
        )
        if not right:
            return f"entry {entry}"
    return None


@functools.cache
def _content(path: Path) -> dict[str, Any] | str:
    """Content of a file or what is wrong with it; read once, so that one process chooses one way."""
    try:
        return load(path)
    except InvalidArgument as error:
        return str(error)


@functools.cache
def _installed_builder() -> str:
    try:
        return f"triton {importlib.metadata.version('triton')}"
    except importlib.metadata.PackageNotFoundError:
        return "no Triton"
