"""Sequences, their places in the block table and their pages: the host's books."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
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


class Batch:
    """Sequences that take steps together, for as long as none ends and nothing else adds to their tokens.

    Attributes:
        numbers: of the sequences, in the order of their rows.
        steps: taken.
    """

    def __init__(self, sequences: Iterable[Sequence], stops: frozenset[int]):
        self._sequences, self._stops = tuple(sequences), stops
        self.numbers = tuple(sequence.number for sequence in self._sequences)
        self._appends = tuple(sequence.tokens.append for sequence in self._sequences)
        self._held = tuple(len(sequence.tokens) for sequence in self._sequences)
        self._least = min(sequence.limit - len(sequence.tokens) for sequence in self._sequences)
        self.steps = 0

    def take(self, tokens: list[int]) -> bool:
        """A token for each, in their order; whether some have ended.

        They are looked at one by one only where some may have ended.
        """
        for append, token in zip(self._appends, tokens, strict=True):
            append(token)
        self.steps += 1
        if self.steps < self._least and self._stops.isdisjoint(tokens):
            return False
        for sequence, token in zip(self._sequences, tokens, strict=True):
            sequence.ended = token in self._stops or len(sequence.tokens) >= sequence.limit
        return any(sequence.ended for sequence in self._sequences)

    def return_to(self, steps: int) -> None:
        """Be as after so many steps, also where a later one was taken only in part."""
        self.steps = steps
        for sequence, held in zip(self._sequences, self._held, strict=True):
            if len(sequence.tokens) > held + steps:
                del sequence.tokens[held + steps :]
                sequence.ended = False


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
