"""How the vocabulary is cut. It changes no token, but for the f32 sum that top-p is a share of: that goes by chunks."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan.specs import power_of_two

NUM_WARPS = 8
# Rows of a launch: their lists take 64 KiB each, and places in them are counted in 32 bits.
MAX_ROWS = 4096
# Programs that are launched for all rows together, before a row gets fewer than one for each chunk.
PROGRAMS = 1024


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Sizes in tokens, powers of two; ``unit`` divides ``chunk`` and ``part``.

    Attributes:
        chunk: what one program reads at a time, and ``chunk_warps`` of the first launch.
        unit: what one maximum is kept of.
        part: what one program gathers from.
        capacity: longest list of a row.
        parts: most programs of a row that draw.
    """

    chunk: int
    chunk_warps: int
    unit: int
    part: int
    capacity: int
    parts: int


def cut_for(rows: int, vocabulary: int) -> Cut:
    """The cut of a vocabulary; only ``parts`` looks at the rows."""
    whole = power_of_two(vocabulary)
    # No more than 2048 units, whose maxima one program looks through.
    unit = min(max(128, whole // 2048), max(16, whole // 2))
    chunk = max(unit, min(2048, max(256, whole)))
    return Cut(
        chunk=chunk,
        chunk_warps=4,
        unit=unit,
        part=max(unit, min(4096, max(256, whole))),
        capacity=16384,
        parts=max(1, min(-(-vocabulary // chunk), PROGRAMS // rows)),
    )
