"""Sequences, their places in the block table and their pages: the host's books."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from moe_jax.sampling import Sampling


@dataclass(kw_only=True)
class Sequence:
    """A sequence that has a place.

    Attributes:
        number: given once in an engine.
        place: its row of the block table.
        pages: its own until it is released, enough for all its tokens.
        tokens: prompt and new ones.
        limit: tokens at most.
        sampling, top_k: parameters; ``top_k`` 0 keeps all.
        draw: what its noise is keyed by besides the seed and the position.
        inner: of a call of `Engine.generate`, which alone steps it.
        ended: an end token came, or the limit is reached.
    """

    number: int
    place: int
    pages: tuple[int, ...]
    tokens: list[int]
    limit: int
    sampling: Sampling
    top_k: int
    draw: int
    inner: bool
    ended: bool = False


@dataclass
class Places:
    """Free rows of the block table and free pages; the lowest are given first."""

    sequences: int
    pages: int
    rows: list[int] = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.rows, self.free = list(range(self.sequences)), list(range(self.pages))

    def take(self, pages: int) -> tuple[int, tuple[int, ...]]:
        """A place and as many pages; there must be."""
        return heapq.heappop(self.rows), tuple(heapq.heappop(self.free) for _ in range(pages))

    def give_back(self, place: int, pages: tuple[int, ...]) -> None:
        """Of a released sequence."""
        heapq.heappush(self.rows, place)
        for page in pages:
            heapq.heappush(self.free, page)
