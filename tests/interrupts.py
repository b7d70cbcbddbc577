"""Ctrl-C at a line of the library, as Python's tracing makes it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def lines(function: Callable[..., Any]) -> list[int]:
    """All lines of a function that can be interrupted."""
    code = function.__code__
    return sorted({line for *_, line in code.co_lines() if line} - {code.co_firstlineno})


def places(*functions: Callable[..., Any]) -> list[tuple[Callable[..., Any], int]]:
    """All lines of these."""
    return [(function, line) for function in functions for line in lines(function)]


def named(value: Any) -> str:
    """For ``ids=`` of `pytest.mark.parametrize`."""
    return getattr(value, "__qualname__", str(value))


def interrupted(function: Callable[..., Any], line: int, call: Callable[[], object]) -> bool:
    """Make a call that is interrupted where it comes to a line of a function for the first time; whether it did."""
    code, hit = function.__code__, False

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal hit
        if frame.f_code is not code:
            return None
        if event == "line" and frame.f_lineno == line and not hit:
            hit = True
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        assert hit
    finally:
        sys.settrace(before)
    return hit
