"""A compilation that is interrupted, or stopped by an error: nobody waits for it, and the next call compiles."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interrupts import interrupted, named, places
from moe_jax.cache import Executables, executables
from moe_jax.errors import InvalidArgument


def ask(store: Executables) -> Any:
    arguments = (jax.ShapeDtypeStruct((3,), jnp.float32),)
    return store.get_or_compile("key", lambda x: x + 1, arguments, parts={"size": "3"})


def served(store: Executables) -> None:
    """The next call, from any thread, gets a program, and the counts are those of one program."""
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(ask(store)), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == 2, "a call waits for a compilation that nobody makes"
    for result in results:
        np.testing.assert_array_equal(result(np.zeros(3, np.float32)), np.ones(3))
    assert store.stats().entries == 1 and store.holds("key")


INSIDE = (Executables.get_or_compile, Executables.acquire, Executables._compile, Executables._evict, executables._bytes)


@pytest.mark.parametrize(("function", "line"), places(*INSIDE), ids=named)
def test_C56_an_interrupt_at_any_line_of_a_compilation_leaves_no_promise_open(function, line):
    store = Executables()
    interrupted(function, line, lambda: ask(store))
    served(store)


@pytest.mark.parametrize(("function", "line"), places(Executables._compile, Executables.acquire), ids=named)
def test_C56_an_interrupt_while_a_failed_compilation_is_put_away_leaves_no_promise_open(function, line, monkeypatch):
    store = Executables()

    def fails(*_):
        raise InvalidArgument("options", where="test", got=1, wanted=2)

    with monkeypatch.context() as patch:
        patch.setattr(executables, "_options", fails)
        with contextlib.suppress(InvalidArgument):
            interrupted(function, line, lambda: ask(store))
    served(store)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_C56_an_error_just_after_a_compilation_fails_it(error, monkeypatch):
    store = Executables()

    def fails(_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(executables, "_bytes", fails)
        with pytest.raises(error):
            ask(store)
    assert store.stats().entries == 0
    served(store)


def test_a_program_whose_size_xla_cannot_say_counts_as_0_bytes(monkeypatch):
    def refuses(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: no such statistics")

    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", refuses)
    store = Executables(max_bytes=1)
    served(store)
    assert store.stats().bytes == 0


def test_who_waits_for_a_compilation_that_was_given_up_compiles_itself():
    store, inside, go, results = Executables(), threading.Event(), threading.Event(), []

    def given_up() -> executables.Recipe:
        inside.set()
        go.wait(60)
        raise KeyboardInterrupt

    def first() -> None:
        with pytest.raises(KeyboardInterrupt):
            store.acquire("key", given_up)
        results.append("given up")

    def second() -> None:
        inside.wait(60)
        results.append(ask(store))

    threads = [threading.Thread(target=work, daemon=True) for work in (first, second)]
    for thread in threads:
        thread.start()
    inside.wait(60)
    assert store.holds("key") and store.stats().entries == 1
    go.set()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == 2
    assert (store.stats().misses, store.stats().hits, store.stats().entries) == (2, 0, 1)
