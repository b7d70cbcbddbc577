"""What a model keeps besides its parameters: copies leave it behind, threads share an engine, calls give it back."""

from __future__ import annotations

import _thread
import copy
import dataclasses
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from interrupts import interrupted, named, places
from moe_jax import serving
from moe_jax.engine import Engine
from moe_jax.generation import split
from moe_jax.model import Model
from moe_jax.pallas_kernels.errors import CudaError
from moe_jax.serving import Serving
from moe_jax.tokenizer import Tokenizer
from test_tokenizer import CONFIG, TEMPLATE, byte_tokenizer
from tiny_models import tiny_config, tiny_module

CONFIG_OF = dataclasses.replace(tiny_config("olmoe", vocab_size=258), eos_token_ids=(257,))
SHORT: dict[str, Any] = {"max_new_tokens": 3, "graphs": "simulate"}
SECONDS = 60


@pytest.fixture
def model() -> Iterator[Model]:
    made = Model(CONFIG_OF, tiny_module(tiny_config("olmoe")), Tokenizer(byte_tokenizer(), CONFIG, TEMPLATE))
    yield made
    made.close()


def arrays(model: Model) -> list[jax.Array]:
    return jax.tree.leaves(nnx.state(model.module))


# Copies.

COPIES: dict[str, Callable[[Model], Model]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("graphs", [None, "simulate"])
@pytest.mark.parametrize("kind", COPIES)
def test_a_model_that_has_generated_can_be_copied(kind, graphs, model):
    wanted = model.generate([1, 2], max_new_tokens=3, graphs=graphs)
    other = COPIES[kind](model)
    assert (other.config, type(other.tokenizer)) == (model.config, Tokenizer)
    assert other.tokenizer is not None and other.tokenizer.encode("a b") == model.tokenizer.encode("a b")
    assert other.engine_stats() is None and other.explain_generate() == "generate was not called"
    np.testing.assert_array_equal(other.generate([1, 2], max_new_tokens=3, graphs=graphs), wanted)
    # The engine of either is its own.
    other.close()
    assert (model.engine_stats() is None) == (graphs is None)
    np.testing.assert_array_equal(model.generate([1, 2], max_new_tokens=3, graphs=graphs), wanted)


def test_what_copies_share(model):
    model.generate([1, 2], **SHORT)
    shallow, deep = copy.copy(model), copy.deepcopy(model)
    assert shallow.module is model.module and shallow.tokenizer is model.tokenizer
    assert deep.module is not model.module and deep.config == model.config
    for mine, its in zip(arrays(model), arrays(deep), strict=True):
        assert mine.unsafe_buffer_pointer() != its.unsafe_buffer_pointer()
        assert mine.sharding == its.sharding
        np.testing.assert_array_equal(mine, its)
    wanted = deep.generate([1, 2], **SHORT)
    for array in arrays(deep):
        array.delete()
    np.testing.assert_array_equal(model.generate([1, 2], **SHORT), wanted)


def test_the_engine_of_a_copy_goes_with_the_copy(model):
    model.generate([1, 2], **SHORT)
    other = copy.copy(model)
    other.generate([1, 2], **SHORT)
    assert other._serving is not None and other._serving._kept is not None
    engine = other._serving._kept.engine
    del other
    gc.collect()
    assert engine.stats()["state"] == "closed"
    stats = model.engine_stats()
    assert stats is not None and stats["state"] == "simulate"


# Threads.


class Slow:
    """Making an engine stops here until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.made: list[serving.Size] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        real = serving._engine

        def make(source: serving.Source, size: serving.Size) -> Engine:
            self.made.append(size)
            self.begun.set()
            assert self.go_on.wait(SECONDS)
            return real(source, size)

        monkeypatch.setattr(serving, "_engine", make)


class Call(threading.Thread):
    """A call in another thread."""

    def __init__(self, function: Callable[[], Any]):
        super().__init__(daemon=True)
        self.found: Any = None
        self.function = function
        self.start()

    def run(self) -> None:
        self.found = self.function()

    def result(self) -> Any:
        self.join(SECONDS)
        assert not self.is_alive(), "it still waits"
        return self.found


def test_calls_that_the_engine_serves_do_not_wait_for_a_larger_one(model, monkeypatch):
    wanted = model.generate([1, 2], **SHORT)
    stream = model.generate([1, 2], stream=True, **SHORT)
    next(stream)
    slow = Slow(monkeypatch)
    larger = Call(lambda: model.generate([[1, 2]] * 3, **SHORT))
    assert slow.begun.wait(SECONDS)
    # One that runs goes on to its end, and one begins where it had its place.
    assert len(Call(lambda: list(stream)).result()) == 2
    np.testing.assert_array_equal(Call(lambda: model.generate([1, 2], **SHORT)).result(), wanted)
    assert Call(model.engine_stats).result()["free_sequences"] == 1
    slow.go_on.set()
    np.testing.assert_array_equal(larger.result(), [wanted[0]] * 3)
    stats = model.engine_stats()
    assert stats is not None and (stats["max_sequences"], stats["free_sequences"]) == (4, 4)


def test_close_waits_for_the_engine_that_is_being_made(model, monkeypatch):
    slow = Slow(monkeypatch)
    call = Call(lambda: model.generate([1, 2], **SHORT))
    assert slow.begun.wait(SECONDS)
    closing = Call(model.close)
    closing.join(0.2)
    assert closing.is_alive()
    slow.go_on.set()
    assert call.result().shape == (1, 3)
    closing.result()
    assert model.engine_stats() is None and len(slow.made) == 1


def test_two_threads_with_one_need_make_one_engine(model, monkeypatch):
    slow = Slow(monkeypatch)
    first = Call(lambda: model.generate([[1, 2]] * 2, max_new_tokens=1, graphs="simulate"))
    assert slow.begun.wait(SECONDS)
    refused = threading.Event()
    real = serving.Serving._taken

    def taken(*given: Any) -> Any:
        refused.set()
        return real(*given)

    monkeypatch.setattr(serving.Serving, "_taken", taken)
    second = Call(lambda: model.generate([[1, 2]] * 2, max_new_tokens=1, graphs="simulate"))
    assert refused.wait(SECONDS)
    first_ended = threading.Event()
    monkeypatch.setattr(serving.Serving, "_taken", lambda *given: first_ended.wait(SECONDS) and real(*given))
    slow.go_on.set()
    wanted = first.result()
    first_ended.set()
    np.testing.assert_array_equal(second.result(), wanted)
    assert len(slow.made) == 1


# Letting go.


class Fake:
    """An engine that fails to close so many times, and knows in which threads that was tried."""

    def __init__(self, error: BaseException | None = None, times: int = 0):
        self.error, self.left, self.threads = error, times, list[int]()

    @property
    def tried(self) -> int:
        return len(self.threads)

    def close(self) -> None:
        self.threads.append(threading.get_ident())
        if self.error is not None and self.tried <= self.left:
            raise self.error


class World:
    """A model's serving, with engines that do nothing: those given, then others that close."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Model, *fakes: Fake):
        self.serving, self.engines, given = serving.Serving(), list[weakref.ref[Fake]](), iter(fakes)
        self.source = serving.Source(model.config, model.module, split(model.module), "simulate", jax.devices()[0])

        def make(source: serving.Source, size: serving.Size) -> Fake:
            made = next(given, None) or Fake()
            self.engines.append(weakref.ref(made))
            return made

        monkeypatch.setattr(serving, "_engine", make)

    def run(self, rows: int, steps: int = 1, **options: Any) -> Any:
        """A call of so many rows and steps."""
        options = {"automatic": False, **options}
        return self.serving.run(self.source, serving.needed(rows, 4), lambda engine: iter(range(steps)), **options)

    def check_given_back(self) -> None:
        """No call has anything, and what is not kept was closed, or is held by nobody and closes itself."""
        kept = self.serving._kept
        assert kept is None or not kept.claims
        held = [engine for engine in (reference() for reference in self.engines) if engine is not None]
        assert [engine for engine in held if not engine.tried] == ([] if kept is None else [kept.engine])


CUDA = CudaError("call failed", where="test", got="CUDA_ERROR_UNKNOWN", wanted="CUDA_SUCCESS")


def test_an_engine_that_does_not_close_keeps_no_other_open(model, monkeypatch):
    """Whatever it raises: the others are closed, the first error is raised, and the next call tries again."""
    fakes = [Fake(CUDA, 2), Fake(RuntimeError("second"), 2), Fake(RuntimeError("third"), 0)]
    world = World(monkeypatch, model, *fakes)
    streams = [world.run(rows, 0) for rows in (1, 2, 4)]  # each has no room beside those before
    assert list(streams[0]) == [] and fakes[0].tried == 1
    with pytest.raises(RuntimeError, match="second"):
        list(streams[1])
    assert list(streams[2]) == [] and fakes[2].tried == 0
    with pytest.raises(CudaError):
        world.serving.close()
    assert [fake.tried for fake in fakes] == [2, 2, 1]
    world.serving.close()
    assert [fake.tried for fake in fakes] == [3, 3, 1]
    world.serving.close()
    assert [fake.tried for fake in fakes] == [3, 3, 1]


def test_an_engine_that_was_interrupted_while_it_closed_is_tried_again(model, monkeypatch):
    fake = Fake(KeyboardInterrupt(), 1)
    world = World(monkeypatch, model, fake)
    assert list(world.run(1, 0)) == []
    with pytest.raises(KeyboardInterrupt):
        world.serving.close()
    world.serving.close()
    assert fake.tried == 2


# Interrupts. A call is one of a row, of more than there is room for, or of more while one of a row runs.

LINES = places(
    *(getattr(Serving, name) for name in ("run", "_taken", "_found", "_size", "_made", "_keep", "_idle", "_steps")),
    *(Serving._close_idle, Serving._close, serving._Claim.__init__, serving._Kept.take, serving._Kept.__init__),
    *(serving._Kept.claims.fget, serving._Kept.used.fget),
)  # fmt: skip


@pytest.mark.parametrize(("function", "line"), LINES, ids=named)
def test_a_call_that_was_interrupted_gives_its_room_back(model, monkeypatch, function, line):
    for before, rows in ((0, 1), (1, 1), (1, 2), (1, 4)):
        world = World(monkeypatch, model)
        for _ in range(before):
            list(world.run(1))
        interrupted(function, line, lambda world=world, rows=rows: list(world.run(rows)))
        kept = world.serving._kept
        list(world.run(1))
        assert kept is None or world.serving._kept is kept  # it had the room
        world.check_given_back()
        world.serving.close()
        world.check_given_back()


@pytest.mark.parametrize(("function", "line"), LINES, ids=named)
def test_a_call_that_was_interrupted_beside_another_lets_the_engine_of_that_go(model, monkeypatch, function, line):
    world = World(monkeypatch, model)
    stream = world.run(1, 3)
    next(stream)
    interrupted(function, line, lambda: list(world.run(2)))
    assert [*stream] == [1, 2]
    list(world.run(1))
    world.check_given_back()
    # The last line of a call may be interrupted that has an engine for itself.
    stream = world.run(4, 3)
    world.serving.close()
    interrupted(function, line, lambda: list(stream))
    world.serving.close()
    world.check_given_back()
    assert world.serving._kept is None and not world.serving._left


def test_room_is_given_back_though_an_error_is_kept(model, monkeypatch):
    """With all that its traceback holds, as a notebook keeps the last one."""
    world = World(monkeypatch, model)

    def fail(engine: Any) -> Iterator[Any]:
        yield 0
        raise CUDA

    for begins in (fail, None):
        with pytest.raises((CudaError, TypeError)) as caught:
            list(world.serving.run(world.source, serving.needed(1, 4), begins, automatic=False))  # type: ignore[arg-type]
        world.check_given_back()
        assert caught.value.__traceback__ is not None
    monkeypatch.setattr(serving.Serving, "_steps", None)
    with pytest.raises(TypeError) as caught:
        world.run(1)
    world.check_given_back()
    assert caught.value.__traceback__ is not None


@pytest.mark.parametrize("leave", ["read", "closed", "collected"])
def test_a_call_that_ends_waits_for_nobody(model, monkeypatch, leave):
    """It may be collected in a thread that has what others wait for, such as the lock of another model's calls."""
    world = World(monkeypatch, model)
    streams = [world.run(1, 3)]
    next(streams[0])
    (engine,) = [reference() for reference in world.engines]
    world.serving.close()
    ends = {"read": lambda: list(streams[0]), "closed": lambda: streams[0].close(), "collected": streams.clear}
    with world.serving._making, world.serving._lock:
        Call(ends[leave]).result()
        assert engine is not None and engine.tried == 1
    world.check_given_back()


LEAVE: dict[str, Callable[[list[Any]], object]] = {
    "closed": lambda streams: streams[0].close(),
    "dropped": lambda streams: streams.clear(),
    "in a cycle": lambda streams: streams.append(streams),
}


@pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE)
def test_no_engine_is_closed_in_the_thread_that_collects_its_last_stream(model, monkeypatch, leave):
    """Which may be inside JAX, or have the lock of another engine. It waits, though not for ever."""
    world = World(monkeypatch, model)
    streams = [world.run(1, 3)]
    next(streams[0])
    list(world.run(2))  # takes another engine
    first, second = (reference() for reference in world.engines)
    leave(streams)
    del streams
    gc.collect()
    assert first is not None and second is not None
    assert (first.tried, second.tried) == (1, 0) and threading.get_ident() not in first.threads


def test_a_left_stream_whose_end_raises_closes_its_engine_apart_too(model, monkeypatch):
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    def columns(_: object) -> Any:
        try:
            yield from range(3)
        finally:
            raise RuntimeError("at its end")

    world = World(monkeypatch, model)
    streams = [world.serving.run(world.source, serving.needed(1, 4), columns, automatic=False)]
    next(streams[0])
    list(world.run(2))
    first = world.engines[0]()
    streams.clear()
    gc.collect()
    assert len(told) == 1
    assert first is not None and first.tried == 1 and threading.get_ident() not in first.threads


def test_an_engine_for_which_there_is_no_thread_is_closed_by_the_next_call(model, monkeypatch):
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    world = World(monkeypatch, model)
    streams = [world.run(1, 3)]
    next(streams[0])
    (engine,) = [reference() for reference in world.engines]
    world.serving.close()
    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    streams.clear()
    assert engine is not None and engine.tried == 0
    list(world.run(1))
    assert engine.tried == 1
    world.check_given_back()


def test_what_keeps_an_engine_from_closing_there_is_told_and_nothing_is_lost(model, monkeypatch):
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    fakes = [Fake(CUDA, 1), Fake(RuntimeError("second"), 1)]
    world = World(monkeypatch, model, *fakes)
    for fake in fakes:
        streams = [world.run(1, 3)]
        next(streams[0])
        world.serving._keep(None)
        streams.clear()
        assert fake.tried == 1
    assert [str(one.exc_value) for one in told] == ["second"]
    world.serving.close()
    assert [fake.tried for fake in fakes] == [2, 2] and not world.serving._left


def test_no_engine_is_closed_with_the_lock_of_the_calls_held(model, monkeypatch):
    """Closing waits for the device; calls on other engines begin and end meanwhile."""
    world, free = World(monkeypatch, model), list[bool]()

    def close(fake: Fake) -> None:
        fake.threads.append(threading.get_ident())

        def other() -> None:
            free.append(world.serving._lock.acquire(timeout=1))
            if free[-1]:
                world.serving._lock.release()

        Call(other).result()

    monkeypatch.setattr(Fake, "close", close)
    streams = [world.run(rows, 2) for rows in (1, 2)]  # the first engine is left when its call ends
    list(streams[0])
    list(streams[1])
    list(world.run(8))  # nobody uses the second: it is left before the third is made
    world.source = world.source._replace(mode="off")
    list(world.run(1))  # the third serves no such source
    world.serving.close()
    assert free == [True] * 4
    world.check_given_back()
