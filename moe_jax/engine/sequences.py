"""Sequences, their places in the block table and their pages: the host's books."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from moe_jax.sampling import Sampling


@dataclass(kw_only=True)
class Sequence:
    """A sequence that has a place. Of its tokens the host keeps the last alone; those before it are keys and values.

    Attributes:
        number: given once in an engine.
        place: its row of the block table.
        pages: its own until it is released, enough for all its tokens.
        length: tokens that it has, prompt and new ones.
        newest: the last of them, which the next step reads.
        limit: tokens at most.
        sampling, top_k: parameters; ``top_k`` 0 keeps all.
        draw: what its noise is keyed by besides the seed and the position.
        inner: of a call of `Engine.generate`, which alone steps it.
        ended: an end token came, or the limit is reached.
    """

    number: int
    place: int
    pages: tuple[int, ...]
    length: int
    newest: int
    limit: int
    sampling: Sampling
    top_k: int
    draw: int
    inner: bool
    ended: bool = False


class Batch:
    """Sequences that take steps together until one ends.

    A step touches none of them, however many they are: what they have come to is kept here until `settle`.

    Attributes:
        numbers: of the sequences, in the order of their rows.
        taken: how many steps, and the newest token of each sequence. To put back an earlier value undoes steps.
        ended: some of them have, by the last step.
    """

    def __init__(self, sequences: Items[Sequence], stops: frozenset[int]):
        self._sequences, self._stops = sequences, stops
        self.numbers = tuple(sequence.number for sequence in sequences)
        self._lengths = tuple(sequence.length for sequence in sequences)
        self._least = min(sequence.limit - sequence.length for sequence in sequences)
        self.taken: tuple[int, list[int]] = 0, [sequence.newest for sequence in sequences]
        self.ended = False

    @property
    def left(self) -> int:
        """Steps until the first sequence reaches its limit."""
        return self._least - self.taken[0]

    def take(self, tokens: list[int]) -> bool:
        """A token for each, in their order; whether some have ended."""
        steps = self.taken[0] + 1
        self.taken = steps, tokens
        self.ended = steps >= self._least or not self._stops.isdisjoint(tokens)
        return self.ended

    def settle(self) -> None:
        """Let the sequences be what they have come to; again, if it was interrupted or steps were undone."""
        steps, tokens = self.taken
        for sequence, held, token in zip(self._sequences, self._lengths, tokens, strict=True):
            sequence.length, sequence.newest = held + steps, token
            # The last token of a prompt ends nothing.
            sequence.ended = steps > 0 and (token in self._stops or sequence.length >= sequence.limit)


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
