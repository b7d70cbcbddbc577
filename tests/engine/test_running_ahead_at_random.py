"""Sequences that are stepped in all ways, ahead or not, while others come and go and calls fail: tokens stay right."""

from __future__ import annotations

import functools
import random

import pytest
from engines import MAIN, OPTIONS, PROMPTS, ending_with

from moe_jax.engine import Engine
from moe_jax.pallas_kernels.errors import CudaError
from tiny_models import tiny_model

LENGTH = 16


@functools.cache
def endless() -> list[list[int]]:
    """As `expected`, and longer."""
    return tiny_model(MAIN).generate(PROMPTS, max_new_tokens=LENGTH, graphs="jit").tolist()


class Traffic:
    """Groups of sequences that are stepped in all ways while others come and go."""

    def __init__(self, engine: Engine, end: int, seed: int):
        self.engine, self.end, self.rng = engine, end, random.Random(seed)
        self.given: dict[int, list[int]] = {}
        self.wanted: dict[int, list[int]] = {}
        self.prompts: dict[int, int] = {}
        self.kept: tuple[int, ...] = ()

    def event(self) -> None:
        engine, rng = self.engine, self.rng
        ways = [self.group, self.again, self.again, self.public, self.join, self.leave, self.void]
        (way,) = rng.choices(ways, [4, 3, 3, 2, 3, 1, 0.3])
        fault = rng.random() < 0.15 and rng.choice(["read", "queue_read", "finish_read", "launch_graph", "write"])
        if fault:
            engine.runtime.fail(fault, after=rng.randrange(2))
        try:
            way()
        except CudaError:
            assert fault
        engine.runtime.heal()
        self.check()

    def group(self) -> None:
        live = self.engine.live
        self.kept = tuple(self.rng.sample(live, self.rng.randint(1, len(live)))) if live else ()
        self.again()

    def again(self) -> None:
        """The same ones, but for those that have ended."""
        live = self.engine.live
        self.kept = tuple(number for number in self.kept if number in live)
        self.take(self.engine._step(self.kept, more=self.rng.random() < 0.7))

    def public(self) -> None:
        found = self.engine.live
        tokens = self.engine.step()
        assert tuple(tokens) == found
        self.take(tokens)

    def join(self) -> None:
        if not self.engine.stats()["free_sequences"]:
            return
        index, count = self.rng.randrange(len(PROMPTS)), self.rng.randint(1, LENGTH)
        (number,) = self.engine.prefill(PROMPTS[index : index + 1], max_new_tokens=count)
        row = endless()[index][:count]
        self.wanted[number] = row[: row.index(self.end) + 1] if self.end in row else row
        self.given[number], self.prompts[number] = [], len(PROMPTS[index])

    def leave(self) -> None:
        ended = [number for number in self.given if number not in self.engine.live]
        if self.given:
            number = self.rng.choice(ended or [*self.given])
            self.engine.release(number)
            del self.given[number]

    def void(self) -> None:
        self.engine.update_weights(tiny_model(MAIN).module)

    def take(self, tokens: dict[int, int]) -> None:
        for number, token in tokens.items():
            self.given[number].append(token)

    def check(self) -> None:
        stepper = self.engine._stepper
        if stepper.batch is not None:
            stepper.batch.settle()
        held = self.engine._sequences
        assert held.keys() == self.given.keys()
        for number, tokens in self.given.items():
            assert tokens == self.wanted[number][: len(tokens)]
            assert held[number].length == self.prompts[number] + len(tokens)
            assert held[number].ended == (len(tokens) == len(self.wanted[number]))
        assert self.engine.live == tuple(number for number, one in held.items() if not one.ended)
        assert stepper._drawn.keys() <= set(self.engine.live) and stepper._doubtful <= held.keys()
        assert stepper.batch is not None or stepper._ahead is None
        if stepper.batch is not None:
            assert not stepper._drawn.keys() & set(stepper.batch.numbers)


@pytest.mark.parametrize("weights", ["held", "owned"])
def test_whatever_is_stepped_how_tokens_are_those_of_the_sequence_alone(engine_for, weights):
    end = endless()[0][6]
    engine = engine_for(ending_with(end), **OPTIONS, weights=weights)
    engine.warmup()
    for seed in range(10):
        traffic = Traffic(engine, end, seed)
        for _ in range(60):
            traffic.event()
        for number in list(traffic.given):
            engine.release(number)
        assert not engine._stepper._drawn and not engine._stepper._doubtful
    assert engine.runtime.calls["queue_read"] > 50
