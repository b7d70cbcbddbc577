"""One engine and several threads: every caller gets what it gets alone, and nobody waits for ever."""

from __future__ import annotations

import faulthandler
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from engines import MAIN, PROMPTS
from sampled_groups import LENGTH, MANNERS, Alone, Group, alone, of_call, opened, rows

from moe_jax.cache import StoreUnusable
from moe_jax.engine import Engine
from tiny_models import tiny_model

__all__ = ["alone"]

SECONDS = 60.0  # after which threads that are not over wait for each other
ROUNDS = 12


@pytest.fixture(params=["held", "owned"])
def engine(request) -> Iterator[Engine]:
    with opened(graphs="simulate", weights=request.param) as engine:
        engine.warmup()
        yield engine


@pytest.fixture(autouse=True)
def threads_take_turns() -> Iterator[None]:
    """Much sooner than they would by themselves."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def together(*calls: Callable[[], None]) -> None:
    """Make all calls at once, in a thread each. What one of them raises is raised when all are over."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> None:
        try:
            start.wait()
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    end = time.monotonic() + SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    for error in errors:
        raise error
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback(sys.__stderr__)
        pytest.fail(f"threads are not over after {SECONDS} s")


def generations(engine: Engine, alone: Alone, prompts: list[int], manner: int, rounds: Iterable[int]) -> None:
    """Whole ones, streams, and streams that are left half-way, closed or not."""
    wanted, options = of_call(alone, prompts, manner), {"max_new_tokens": LENGTH, **MANNERS[manner]}
    given = [PROMPTS[prompt] for prompt in prompts]
    for turn in rounds:
        assert engine.generate(given, **options).tolist() == wanted
        count = 1 + (5 * turn) % LENGTH
        stream, steps = engine.generate(given, stream=True, **options), []
        for step in itertools.islice(stream, count):
            steps.append(step)
            time.sleep(0.0005)  # so that others come between
        assert rows(steps) == [row[:count] for row in wanted]
        if turn % 2:
            stream.close()
        del stream


def own_sequences(engine: Engine, alone: Alone, over: Callable[[], bool]) -> None:
    """Sequences of the user, new weights now and then (of the same values) and what else takes the device's rows."""
    group, rng = Group(engine, alone), random.Random(5)
    events = [lambda: engine.update_weights(tiny_model(MAIN).module), engine.warmup, engine.stats]
    while not over():
        number = group.join(rng.randrange(len(PROMPTS)), rng.randrange(len(MANNERS)), rng.randint(1, LENGTH))
        for _ in range(rng.randrange(LENGTH)):
            group.step(ahead=rng.random() < 0.4)
            if rng.random() < 0.2:
                rng.choice(events)()
            time.sleep(0.0002)
        engine.release(number)
        assert engine.live == ()


def test_each_thread_gets_what_it_gets_alone(engine, alone, monkeypatch):
    """Two that generate with a seed of their own, beside one that steps sequences itself."""
    displaced, give = [], engine._stepper._give
    monkeypatch.setattr(engine._stepper, "_give", lambda numbers: (displaced.append(numbers), give(numbers))[1])
    over: list[int] = []

    def generate(prompts: list[int], manner: int) -> None:
        try:
            generations(engine, alone, prompts, manner, range(ROUNDS))
        finally:
            over.append(manner)

    together(
        lambda: generate([0, 1], 0),
        lambda: generate([2], 1),
        lambda: own_sequences(engine, alone, lambda: len(over) == 2),
    )
    assert len(displaced) > ROUNDS, "threads did not come between each other's steps"
    stats = engine.stats()
    assert (stats["sequences"], stats["free_sequences"], stats["free_pages"]) == (0, 4, stats["pages"])


EVENTS: dict[str, Callable[[Engine, int], object]] = {
    "step": lambda engine, own: engine.step(),
    "prefill": lambda engine, own: engine.prefill(PROMPTS[4:5]),
    "release": lambda engine, own: engine.release(own),
    "update_weights": lambda engine, own: engine.update_weights(tiny_model(MAIN).module),
    "warmup": lambda engine, own: engine.warmup(),
}


@pytest.mark.parametrize("event", EVENTS)
def test_nobody_comes_into_a_step_of_another_thread(engine, alone, monkeypatch, event):
    """They wait while the tokens of a step are read behind which the next one is queued already."""
    (own,) = engine.prefill(PROMPTS[3:4])
    inside, through = threading.Event(), threading.Event()
    real, early = engine.runtime.finish_read, []

    def finish_read(reading: Any) -> Any:
        if not inside.is_set():
            inside.set()
            early.append(through.wait(0.05))
        return real(reading)

    def other() -> None:
        assert inside.wait(SECONDS)
        EVENTS[event](engine, own)
        through.set()

    monkeypatch.setattr(engine.runtime, "finish_read", finish_read)
    together(lambda: generations(engine, alone, [0, 1], 0, range(1)), other)
    assert early == [False]


def test_a_thread_that_closes_the_engine_ends_the_others(engine, alone):
    def until_closed(call: Callable[[], None]) -> None:
        with pytest.raises(StoreUnusable, match="closed"):
            call()

    def close() -> None:
        time.sleep(0.2)
        engine.close()

    together(
        lambda: until_closed(lambda: generations(engine, alone, [0, 1], 0, itertools.count())),
        lambda: until_closed(lambda: generations(engine, alone, [2], 1, itertools.count())),
        lambda: until_closed(lambda: own_sequences(engine, alone, lambda: False)),
        close,
    )
    assert engine.runtime.space.bytes == 0
