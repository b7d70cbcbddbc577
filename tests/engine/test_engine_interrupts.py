"""A step that is interrupted, at any line of its own, has not happened."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator

import pytest
from engines import COUNT, MAIN, OPTIONS, PROMPTS, expected

from moe_jax.engine import Engine
from moe_jax.engine.sequences import Batch
from moe_jax.engine.stepping import Stepper
from tiny_models import tiny_model

Way = Callable[[Engine, int], dict[int, int]]


def waiting(engine: Engine, _: int) -> dict[int, int]:
    return engine.step()


def ahead(engine: Engine, _: int) -> dict[int, int]:
    return engine._step(engine.live, more=True)


def in_turns(engine: Engine, turn: int) -> dict[int, int]:
    """All, then the first two alone, then the last one, whose tokens have been drawn."""
    live = engine.live
    return engine._step((live, live[:2], live[2:])[turn % 3], more=True)


# Steps before the one that is interrupted: it is the second, replayed alone; the first, which lays out the rows; or the
# last, in which a sequence ends. In turns, the second gives what was drawn, and the fifth a part of what was.
PLACES = [
    (way, function, line, steps)
    for way, function, steps in (
        *((waiting, Stepper.step, 1), (waiting, Batch.take, 1), (waiting, Stepper._lay_out, 0)),
        *((waiting, Batch.__init__, 0), (waiting, Stepper.step, COUNT - 1), (waiting, Stepper.settle, COUNT - 1)),
        *((waiting, Batch.settle, COUNT - 1), (ahead, Stepper.step, 0), (ahead, Stepper.step, 1)),
        *((ahead, Stepper._read_with_next, 0), (ahead, Stepper._read_with_next, 1), (ahead, Stepper._lay_out, 0)),
        *((ahead, Stepper.step, COUNT - 1), (ahead, Stepper.settle, COUNT - 1)),
        *((in_turns, Stepper.step, 1), (in_turns, Stepper.settle, 1), (in_turns, Stepper._give, 1)),
        *((in_turns, Stepper._give, 2), (in_turns, Stepper._doubt, 1), (in_turns, Stepper.settle, 4)),
        *((in_turns, Stepper._lay_out, 3), (in_turns, Stepper.step, 3)),
        *(
            (way, Stepper._let_go, steps)
            for way, steps in ((waiting, COUNT - 1), (ahead, COUNT - 1), (in_turns, 1), (in_turns, 4))
        ),
    )
    for line in range(2, len(inspect.getsourcelines(function)[0]))
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One for all places: an interrupt leaves nothing behind."""
    engine = Engine(tiny_model(MAIN), **OPTIONS, graphs="simulate")
    engine.warmup()
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("way", "function", "line", "steps"), PLACES, ids=lambda value: getattr(value, "__qualname__", str(value))
)
def test_no_token_is_lost_or_doubled_whichever_line_is_interrupted(engine, way, function, line, steps):
    # The third ends after the others, and is stepped alone at last: it begins where they have left it.
    numbers = engine.prefill(PROMPTS[:2], max_new_tokens=COUNT)
    numbers += engine.prefill(PROMPTS[2:3], max_new_tokens=COUNT + 1)
    at, code = function.__code__.co_firstlineno + line, function.__code__

    def trace(frame, event, _):
        if frame.f_code is not code:
            return None
        if event == "line" and frame.f_lineno == at:
            raise KeyboardInterrupt
        return trace

    given = [way(engine, step) for step in range(steps)]
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        given.append(way(engine, steps))
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    given += [way(engine, turn) for turn in range(steps + 1, 4 * COUNT)]
    assert not engine.live
    found = [[tokens[number] for tokens in given if number in tokens] for number in numbers]
    assert [tokens[:COUNT] for tokens in found] == expected()[:3]
    assert [len(tokens) for tokens in found] == [COUNT, COUNT, COUNT + 1]
    books = [engine._sequences[number] for number in numbers]
    assert [one.newest for one in books] == [tokens[-1] for tokens in found]
    assert [one.length for one in books] == [len(PROMPTS[i]) + len(tokens) for i, tokens in enumerate(found)]
    for number in numbers:
        engine.release(number)
    assert not engine._stepper._drawn and not engine._stepper._doubtful
