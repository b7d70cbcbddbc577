"""Write tuned data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..stored import publish
from .lookup import FORMAT, file_name, load


def write(
    folder: Path,
    device_kind: str,
    op: str,
    source_hash: str,
    builder: str,
    date: str,
    entries: Sequence[dict[str, Any]],
) -> Path:
    """Put an operation's entries into a device's file, in place of its older ones of the same shapes.

    Entries of other shapes stay if they are of the same source and compiler. The file appears whole or not at all, and
    only if `load` accepts it: a reader never sees half of it, whoever else writes.

    Raises:
        InvalidArgument: `load` would refuse the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(device_kind)
    content: dict[str, Any] = {"format": FORMAT, "device": device_kind, "operations": {}}
    if path.exists():
        content = load(path)
    old = content["operations"].get(op)
    kept = []
    if old and (old["source_hash"], old["builder"]) == (source_hash, builder):
        new = {(*e["shape"], e["dtype"]) for e in entries}
        kept = [e for e in old["entries"] if (*e["shape"], e["dtype"]) not in new]
    ordered = sorted([*kept, *entries], key=lambda e: (e["shape"], e["dtype"], e["tokens"]))
    content["operations"][op] = {"source_hash": source_hash, "builder": builder, "date": date, "entries": ordered}
    publish(path, _text(content).encode(), load)
    return path


def _text(content: dict[str, Any]) -> str:
    """JSON with one entry a line."""
    parts = {name: value for name, value in content.items() if name != "operations"}
    lines = [json.dumps(parts)[:-1] + ', "operations": {']
    operations = []
    for op, operation in sorted(content["operations"].items()):
        head = {name: value for name, value in operation.items() if name != "entries"}
        entries = ",\n".join(f"  {json.dumps(entry)}" for entry in operation["entries"])
        operations.append(f' {json.dumps(op)}: {json.dumps(head)[:-1]}, "entries": [\n{entries}\n ]}}')
    return "\n".join([*lines, ",\n".join(operations), "}}"]) + "\n"
