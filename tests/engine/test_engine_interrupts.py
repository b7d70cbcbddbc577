"""A step that is interrupted, at any line of its own, has not happened."""

from __future__ import annotations

import inspect
import sys

import pytest
from engines import COUNT, MAIN, OPTIONS, PROMPTS, expected

from moe_jax.engine import Engine
from moe_jax.engine.sequences import Batch
from tiny_models import tiny_model

# Steps before the one that is interrupted: it is the second, replayed alone; the first, which lays out the rows; or the
# last, in which a sequence ends.
PLACES = [
    (function, line, steps)
    for function, steps in (
        *((Engine._step, 1), (Batch.take, 1), (Engine._lay_out, 0), (Batch.__init__, 0)),
        *((Engine._step, COUNT - 1), (Engine._settle, COUNT - 1), (Batch.settle, COUNT - 1)),
    )
    for line in range(2, len(inspect.getsourcelines(function)[0]))
]


@pytest.mark.parametrize(
    ("function", "line", "steps"), PLACES, ids=lambda value: getattr(value, "__qualname__", str(value))
)
def test_no_token_is_lost_or_doubled_whichever_line_is_interrupted(engine_for, function, line, steps):
    engine = engine_for(tiny_model(MAIN), **OPTIONS)
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

    given = [engine.step() for _ in range(steps)]
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        given.append(engine.step())
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    while engine.live:
        given.append(engine.step())
    found = [[tokens[number] for tokens in given if number in tokens] for number in numbers]
    assert [tokens[:COUNT] for tokens in found] == expected()[:3]
    assert [len(tokens) for tokens in found] == [COUNT, COUNT, COUNT + 1]
    books = [engine._sequences[number] for number in numbers]
    assert [one.newest for one in books] == [tokens[-1] for tokens in found]
    assert [one.length for one in books] == [len(PROMPTS[i]) + len(tokens) for i, tokens in enumerate(found)]
