"""Sequences that are sampled, each in a manner of its own, and what every one of them gets alone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import pytest
from engines import MAIN, OPTIONS, PROMPTS

from moe_jax.cache import SimulatedRuntime
from moe_jax.engine import Engine
from moe_jax.sampling import sampling
from tiny_models import tiny_model

LENGTH = 16
# Of one generation each. Two differ in the seed's high word alone, two in all but the seed; the last one is greedy.
MANNERS: list[dict[str, Any]] = [
    {"temperature": 0.3, "top_p": 0.9, "seed": 3},
    {"temperature": 0.3, "top_p": 0.9, "seed": 3 + (1 << 40)},
    {"temperature": 1.2, "seed": 4},
    {"temperature": 0.6, "top_p": 0.5, "seed": 4},
    {},
]
Alone = Callable[..., list[int]]


@contextlib.contextmanager
def opened(**options: Any) -> Generator[Engine]:
    """An engine, which is not closed at the end where a thread has kept its lock: later tests do not wait for it."""
    engine = Engine(tiny_model(MAIN), **OPTIONS, **options)
    yield engine
    if engine._lock.acquire(timeout=1):
        engine.close()
        engine._lock.release()


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    """Tokens of a prompt in one manner, as row ``draw`` of a call: stepped without graphs, and nothing beside it."""
    with opened(graphs="off", runtime=SimulatedRuntime(1 << 25)) as engine:

        @functools.cache
        def tokens(prompt: int, manner: int, draw: int = 0) -> list[int]:
            parameters = sampling(**MANNERS[manner])
            with engine._lock:  # nothing beside it, whichever thread asks
                (number,) = engine._admit("test", PROMPTS[prompt : prompt + 1], [draw], LENGTH, parameters)
                found = [engine.step()[number] for _ in range(LENGTH)]
                engine.release(number)
            return found

        yield tokens
        assert engine.runtime.calls["queue_read"] == 1  # that of the engine's making


class Group:
    """The sequences of an engine that its user steps, and what each of them is to get."""

    def __init__(self, engine: Engine, alone: Alone):
        self.engine, self._alone = engine, alone
        self.given: dict[int, list[int]] = {}
        self.wanted: dict[int, list[int]] = {}

    def join(self, prompt: int, manner: int, count: int = LENGTH) -> int:
        (number,) = self.engine.prefill(PROMPTS[prompt : prompt + 1], max_new_tokens=count, **MANNERS[manner])
        self.given[number], self.wanted[number] = [], self._alone(prompt, manner)[:count]
        return number

    def step(self, count: int = 1, *, ahead: bool = True) -> None:
        """The user's own step, or one that runs ahead."""
        for _ in range(count):
            if ahead:
                with self.engine._lock:
                    found = self.engine._step(self.engine.live, more=True)
            else:
                found = self.engine.step()
            for number, token in found.items():
                self.given[number].append(token)
        self.check()

    def check(self) -> None:
        for number, tokens in self.given.items():
            assert tokens == self.wanted[number][: len(tokens)], number

    def finish(self, *, ahead: bool = True) -> None:
        """Step until all that were not released have ended."""
        while self.engine.live:
            self.step(ahead=ahead)
        for number in self.given.keys() & self.engine._sequences.keys():
            assert self.given[number] == self.wanted[number], number


def rows(steps: list[Any]) -> list[list[int]]:
    return np.stack(steps, 1).tolist()


def of_call(alone: Alone, prompts: list[int], manner: int, count: int = LENGTH) -> list[list[int]]:
    """What a call of `generate` is to give."""
    return [alone(prompt, manner, draw)[:count] for draw, prompt in enumerate(prompts)]
