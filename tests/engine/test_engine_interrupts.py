"""A step that is interrupted, at any line of its own, has not happened."""

from __future__ import annotations

import inspect
import sys

import pytest
from engines import COUNT, MAIN, OPTIONS, PROMPTS, expected

from moe_jax.engine import Engine
from moe_jax.engine.sequences import Batch
from tiny_models import tiny_model

PLACES = [
    (function, line)
    for function in (Engine._step, Batch.take)
    for line in range(2, len(inspect.getsourcelines(function)[0]))
]


@pytest.mark.parametrize(("function", "line"), PLACES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_no_token_is_lost_or_doubled_whichever_line_is_interrupted(engine_for, function, line):
    engine = engine_for(tiny_model(MAIN), **OPTIONS)
    numbers = engine.prefill(PROMPTS[:2], max_new_tokens=COUNT)
    at, code = function.__code__.co_firstlineno + line, function.__code__

    def trace(frame, event, _):
        if frame.f_code is not code:
            return None
        if event == "line" and frame.f_lineno == at:
            raise KeyboardInterrupt
        return trace

    given = [engine.step()]
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
    assert found == expected()[:2]
    assert [engine._sequences[number].tokens for number in numbers] == [
        [*prompt, *tokens] for prompt, tokens in zip(PROMPTS[:2], found, strict=True)
    ]
