"""Decode steps of an engine: the device's rows, and what they have come to on the host.

A step may run ahead: it is queued before the tokens of the one before it are read, so the device does not wait for the
host. A row's bits depend on no other row, so its tokens are those of any later moment: they are given when its
sequences are stepped again, whoever has used the device's rows meanwhile. Only new weights make them void.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from moe_jax.cache import Graphs, Outcome, StickyError
from moe_jax.cache.runtime import Reading
from moe_jax.pallas_kernels.advance.specs import RUNNING
from moe_jax.pallas_kernels.errors import MoeJaxError

from .calls import Call, Calls
from .memory import Memory
from .rows import row_block
from .sequences import Batch, Sequence
from .step import Geometry

Run = tuple[Outcome, Call]


class Stepper:
    """Makes the decode steps of an engine. Not thread-safe: its owner locks.

    Args:
        sequences: of the engine, by number; they are the owner's, and changed here.
        stops: tokens that end a sequence.

    Attributes:
        graphs: what steps run through.
        batch: what the device's rows are, and bring forward by themselves; None where that is not known.
        last: how the last step whose tokens were given ran, or words.
    """

    def __init__(
        self,
        geometry: Geometry,
        memory: Memory,
        graphs: Graphs,
        calls: Calls,
        sequences: Mapping[int, Sequence],
        stops: frozenset[int],
    ):
        self._geometry, self._memory, self.graphs, self._calls = geometry, memory, graphs, calls
        self._sequences, self._stops = sequences, stops
        self.batch: Batch | None = None
        self.last: str | Run = "no step was made"
        # The next step of the batch, where it is queued.
        self._ahead: Run | None = None
        # Tokens of such a step whose rows have become others', by sequence, and how it ran.
        self._drawn: dict[int, tuple[int, Run]] = {}
        # Sequences that the device may have brought further than the host.
        self._doubtful: set[int] = set()
        # Its memory is made here, and lives as long as steps do.
        self._reading: Reading | None = memory.queue_read("token", 1)
        memory.finish_read(self._reading)

    def step(self, numbers: tuple[int, ...], *, more: bool = False) -> dict[int, int]:
        """A token for each of these sequences.

        Args:
            more: the caller will step the same ones again, but for those that end, and reads no logits in between: the
                next step is queued as well, if this one was a replay.

        Raises:
            CudaError: the step has not counted: no sequence has changed, and the call may be made again.
            NotReplayed: ``graphs="strict"`` and no graph could be replayed.
        """
        if not numbers:
            return {}
        if not self.holds(numbers):
            if not self._drawn.keys() >= set(numbers):
                self.settle()
            # Now also what was drawn for a batch of which some have gone.
            if self._drawn.keys() >= set(numbers):
                return self._give(numbers)
        batch = self._lay_out(numbers)
        before = batch.taken
        try:
            run, self._ahead = self._ahead or self._queued(numbers), None
            outcome, call = run
            if more and outcome.kind == "replay" and batch.left > 1:
                tokens = self._read_with_next(numbers, call.rows)
            else:
                tokens = self._memory.read("token", call.rows).tolist()
            ended = batch.take(tokens)
            if self.batch is not batch:
                batch.settle()
            elif ended:
                # What the others have drawn already is looked at when it is asked for: these tokens need not wait.
                batch.settle()
                self.batch = batch if self._ahead else None
            self.last = run
            return dict(zip(numbers, tokens))  # noqa: B905 (as many as were asked for)
        except BaseException as error:
            # What the device has made of them is not known: the next step writes them anew, from before this one.
            self.batch = self._ahead = None
            self._undo(batch, before, error)
            raise

    def holds(self, numbers: tuple[int, ...]) -> bool:
        """Whether the device's rows are these sequences, of which none has ended."""
        batch = self.batch
        return batch is not None and not batch.ended and batch.numbers == numbers

    def settle(self) -> None:
        """Before the device's rows become others: what they have come to is not lost."""
        batch, ahead = self.batch, self._ahead
        # Before tokens are read: where that fails, the device's rows are not what the host takes them for.
        running = self._let_go()
        if batch is not None and ahead is not None and running:
            tokens = dict(zip(batch.numbers, self._memory.read("token", ahead[1].rows).tolist(), strict=True))
            # A stream that is collected meanwhile gives up its own.
            self._drawn |= {n: (tokens[n], ahead) for n in running if n in self._sequences}
            self._doubtful.difference_update(running)

    def void(self) -> None:
        """No token that was drawn already is given: the next steps draw anew, from where the host is."""
        if self._ahead is not None:  # else the device's rows are where the host is
            self._let_go()
        self._doubt(list(self._drawn))

    def close(self) -> None:
        """Let go of everything; the stream's work is done."""
        self.batch = self._ahead = self._reading = None
        self._drawn.clear()
        self._doubtful.clear()

    def forget(self, number: int) -> None:
        """A sequence that is no more."""
        self._doubtful.discard(number)
        self._drawn.pop(number, None)

    def _let_go(self) -> list[int]:
        """Take the device's rows for unknown. Who has tokens coming from a step ahead, in doubt until they are here."""
        batch = self.batch
        if batch is None:
            return []
        batch.settle()
        running: list[int] = []
        if self._ahead is not None:
            held = {n: self._sequences.get(n) for n in batch.numbers}
            running = [n for n, sequence in held.items() if sequence is not None and not sequence.ended]
            self._doubt(running)
        self.batch = self._ahead = None
        return running

    def _give(self, numbers: tuple[int, ...]) -> dict[int, int]:
        """What was drawn for these sequences."""
        found = [self._drawn[number] for number in numbers]
        tokens = [token for token, _ in found]
        batch = Batch([self._sequences[number] for number in numbers], self._stops)
        before = batch.taken
        try:
            batch.take(tokens)
            batch.settle()
            for number in numbers:
                del self._drawn[number]
            self.last = found[0][1]
            return dict(zip(numbers, tokens, strict=True))
        except BaseException as error:
            self._undo(batch, before, error)
            raise

    def _undo(self, batch: Batch, before: tuple[int, list[int]], error: BaseException) -> None:
        """Let sequences be what they were before a step that failed."""
        batch.taken = before
        batch.settle()
        self._doubt(batch.numbers)
        self.last = f"failed: {error}"

    def _lay_out(self, numbers: tuple[int, ...]) -> Batch:
        """Let the device's rows be these sequences, as they are; rows that it has brought there itself stay."""
        batch = self.batch
        if batch is None:
            self._doubt(self._drawn.keys() & set(numbers))  # not of all of them: none is given
            # Of streams that were collected while they were written here.
            for number in (self._drawn.keys() | self._doubtful) - self._sequences.keys():
                self.forget(number)
            for number in self._doubtful.intersection(numbers):
                place = self._sequences[number].place
                self._memory.write("finished", np.asarray([RUNNING], np.int32), 4 * place)
            self._doubtful.difference_update(numbers)
            sequences = [self._sequences[number] for number in numbers]
            self._memory.write("rows", row_block(self._geometry, sequences))
            batch = self.batch = Batch(sequences, self._stops)
        return batch

    def _doubt(self, numbers: Iterable[int]) -> None:
        numbers = list(numbers)
        self._doubtful.update(numbers)
        for number in numbers:
            self._drawn.pop(number, None)

    def _queued(self, numbers: tuple[int, ...]) -> Run:
        call = self._calls.decode(len(numbers))
        return self.graphs.step(call.launches, call.certificate, self._memory.table), call

    def _read_with_next(self, numbers: tuple[int, ...], rows: int) -> list[int]:
        """The tokens of the step that was queued last, while the next one runs."""
        self._reading = self._memory.queue_read("token", rows, self._reading)
        try:
            self._ahead = self._queued(numbers)
        except StickyError:
            raise
        except MoeJaxError:
            # It is made again when it is asked for. Some of its launches may run, so it is not known what rows are.
            self.batch = None
            self._doubtful.update(numbers)
        return self._memory.finish_read(self._reading).tolist()
