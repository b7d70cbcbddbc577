"""Sequences, their places in the block table and their pages: the host's books."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from moe_jax.sampling import Sampling

# Free pages that are handed out from one list: a sequence takes few of all that are free.
SOME = 256


class Generation:
    """Has the sequences of one call of `Engine.generate`, which hold it weakly: they are no more when it is gone."""


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
        owner: the call of `Engine.generate` which alone steps it; None: the user's.
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
    owner: weakref.ref[Generation] | None = None
    ended: bool = False

    @functools.cached_property
    def bits(self) -> int:
        """Its pages as a set, bit ``p`` for page ``p``: looked through once, however often others join beside it."""
        marks = np.zeros(max(self.pages, default=0) + 1, bool)
        marks[list(self.pages)] = True
        return int.from_bytes(np.packbits(marks, bitorder="little").tobytes(), "little")

    def belongs_to(self, generation: Generation | None) -> bool:
        """Whether it is one of a call's; None: of a call's that is gone."""
        return self.owner is not None and self.owner() is generation


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


@dataclass(frozen=True)
class Places:
    """Rows of the block table and pages. Those are free that no sequence has; no other book of them is kept."""

    sequences: int
    pages: int

    def counts(self, held: Items[Sequence]) -> tuple[int, int]:
        """How many places and how many pages are free beside these sequences."""
        return self.sequences - len(held), self.pages - sum(len(sequence.pages) for sequence in held)

    def free(self, held: Items[Sequence]) -> tuple[Iterator[int], Iterator[int]]:
        """Free places and free pages, the lowest first.

        Some 50 µs beside 64 sequences with 8000 pages, and what is taken.
        """
        taken = {sequence.place for sequence in held}
        places = (place for place in range(self.sequences) if place not in taken)
        return places, zeros(functools.reduce(operator.or_, (sequence.bits for sequence in held), 0), self.pages)


def zeros(bits: int, count: int) -> Iterator[int]:
    """Those of the first ``count`` bits that are not set, the lowest first."""
    packed = np.frombuffer(bits.to_bytes(-(-count // 8), "little"), np.uint8)
    (found,) = np.nonzero(np.unpackbits(packed, count=count, bitorder="little") == 0)
    for start in range(0, len(found), SOME):
        yield from found[start : start + SOME].tolist()
