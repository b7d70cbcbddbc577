"""What a model keeps besides its parameters: copies leave it behind, and threads share one engine."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from moe_jax import serving
from moe_jax.engine import Engine
from moe_jax.generation import split
from moe_jax.model import Model
from moe_jax.pallas_kernels.errors import CudaError
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
    """An engine that fails to close so many times."""

    def __init__(self, error: BaseException, times: int):
        self.error, self.left, self.tried = error, times, 0

    def close(self) -> None:
        self.tried += 1
        if self.tried <= self.left:
            raise self.error


CUDA = CudaError("call failed", where="test", got="CUDA_ERROR_UNKNOWN", wanted="CUDA_SUCCESS")


def test_an_engine_that_does_not_close_keeps_no_other_open(model, monkeypatch):
    """Whatever it raises: the others are closed, the first error is raised, and the next call tries again."""
    fakes = [Fake(CUDA, 2), Fake(RuntimeError("second"), 2), Fake(RuntimeError("third"), 0)]
    left = iter(fakes)
    monkeypatch.setattr(serving, "_engine", lambda source, size: next(left))
    kept = serving.Serving()
    source = serving.Source(model.config, model.module, split(model.module), "simulate", jax.devices()[0])

    def run(rows: int) -> Any:
        return kept.run(source, serving.needed(rows, 4), lambda engine: iter(()), automatic=False)

    streams = [run(rows) for rows in (1, 2, 4)]  # each has no room beside those before
    assert list(streams[0]) == [] and fakes[0].tried == 1
    with pytest.raises(RuntimeError, match="second"):
        list(streams[1])
    assert list(streams[2]) == [] and fakes[2].tried == 0
    with pytest.raises(CudaError):
        kept.close()
    assert [fake.tried for fake in fakes] == [2, 2, 1]
    kept.close()
    assert [fake.tried for fake in fakes] == [3, 3, 1]
    kept.close()
    assert [fake.tried for fake in fakes] == [3, 3, 1]


def test_an_engine_that_was_interrupted_while_it_closed_is_tried_again(model, monkeypatch):
    fake = Fake(KeyboardInterrupt(), 1)
    monkeypatch.setattr(serving, "_engine", lambda source, size: fake)
    kept = serving.Serving()
    source = serving.Source(model.config, model.module, split(model.module), "simulate", jax.devices()[0])
    assert list(kept.run(source, serving.needed(1, 4), lambda engine: iter(()), automatic=False)) == []
    with pytest.raises(KeyboardInterrupt):
        kept.close()
    kept.close()
    assert fake.tried == 2
