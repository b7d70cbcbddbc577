"""`Model.generate` on the engine that a model keeps: the tokens of the jitted step, and the room that calls find."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from engines import COUNT, MAIN, OPTIONS, PROMPTS, expected
from generate_models import JIT, SIMULATE, THREE, closed, engine_of, model, size

import moe_jax
from moe_jax import serving
from moe_jax.errors import CannotServe
from moe_jax.model import Model
from tiny_models import tiny_config, tiny_model, tiny_module

__all__ = ["model"]

TEXTS = ("And David said unto", "The words of the wise", "Now it came to pass")


@pytest.fixture(scope="module")
def shipped() -> Iterator[Model]:
    """In f32: in bf16 the two paths round at other places."""
    model = moe_jax.load(dtype="float32")
    yield model
    model.close()


# The same tokens.


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}, {"temperature": 1.5, "seed": 2}]
)
def test_the_shipped_model_gives_the_tokens_and_logprobs_of_the_jitted_step(shipped, options):
    texts = list(TEXTS)
    wanted, scores = shipped.generate(texts, max_new_tokens=16, logprobs=True, **options)
    assert shipped.explain_generate() == "jitted step: the model is on a cpu"
    found, own = shipped.generate(texts, max_new_tokens=16, logprobs=True, graphs="simulate", **options)
    np.testing.assert_array_equal(found, wanted)
    assert (own.dtype, own.shape) == (np.float32, scores.shape)
    np.testing.assert_allclose(own, scores, rtol=0, atol=2e-4)
    assert shipped.explain_generate() == 'engine: graphs "simulate"'
    assert shipped.engine_stats()["replays"] > 0


def test_stops_end_rows_and_the_rest_is_padded(model):
    free = model.generate(THREE, **JIT)
    assert model.tokenizer is not None
    texts = [model.tokenizer.decode([token]) for token in free[0].tolist()]
    text = next(text for text in texts[1:] if text.isascii() and text.isprintable())
    for stop in (int(free[0, 3]), free[0, 3:5].tolist(), [free[1, 2:4].tolist()], text):
        wanted, scores = model.generate(THREE, stop=stop, logprobs=True, **JIT)
        found, own = model.generate(THREE, stop=stop, logprobs=True, **SIMULATE)
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_allclose(own, scores, rtol=0, atol=1e-5)
        assert ((own == 0) == (scores == 0)).all() and (scores == 0).any()
    assert size(model) == (4, 64, 4)


def test_end_and_pad_tokens_are_those_of_the_config_at_each_call(model):
    end = expected()[0][2]
    for pad in (7, None):
        model.config = dataclasses.replace(model.config, eos_token_ids=(end,), pad_token_id=pad)
        found = model.generate(THREE, **SIMULATE)
        np.testing.assert_array_equal(found, model.generate(THREE, **JIT))
        assert (found[0, 3:] == (end if pad is None else pad)).all()
    # The module's own config counts for what it computes only.
    module = tiny_module(dataclasses.replace(tiny_config(MAIN), eos_token_ids=(end,), max_positions=256))
    ends = Model(tiny_config(MAIN), module)
    assert ends.generate(THREE, **SIMULATE).tolist() == expected()[:3]
    ends.close()


def test_more_prompts_than_places_take_turns(model, monkeypatch):
    monkeypatch.setattr(serving, "MAX_ROWS", 2)
    options = {"temperature": 0.9, "seed": 3, "stop": expected()[1][2], "logprobs": True}
    found, scores = model.generate(PROMPTS, **options, **SIMULATE)
    wanted, own = model.generate(PROMPTS, **options, **JIT)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_allclose(scores, own, rtol=0, atol=1e-5)
    assert size(model)[0] == 2
    steps = list(model.generate(PROMPTS, stream=True, **SIMULATE))
    np.testing.assert_array_equal(np.stack(steps, 1), expected())


def test_a_stream_gives_each_step_as_soon_as_it_is_there(model):
    steps, engine = [], None
    for step in model.generate(THREE, stream=True, logprobs=True, **SIMULATE):
        steps.append(step)
        engine = engine or engine_of(model)
        if engine._stepper.batch is not None:
            engine._stepper.batch.settle()
        assert [sequence.length for sequence in engine._sequences.values()] in (
            [len(prompt) + len(steps) for prompt in THREE],
            [],
        )
    tokens, scores = (np.stack(parts, 1) for parts in zip(*steps, strict=True))
    wanted, own = model.generate(THREE, logprobs=True, **JIT)
    np.testing.assert_array_equal(tokens, wanted)
    np.testing.assert_allclose(scores, own, rtol=0, atol=1e-5)
    plain = list(model.generate(THREE, stream=True, **SIMULATE))
    assert all(step.shape == (3,) and step.dtype == np.int32 for step in plain)


# Room.


def test_streams_that_are_left_give_their_places_back(model):
    unread = model.generate(THREE, stream=True, **SIMULATE)
    before = engine_of(model)
    half = model.generate(THREE, stream=True, **SIMULATE)
    next(half)
    assert engine_of(model).stats()["max_sequences"] == 8 and not closed(before)
    del unread
    assert closed(before)
    half.close()
    assert size(model) == (8, 64, 8)


def test_streams_side_by_side(model):
    """The second finds too few places, and the first goes on where it began."""
    first = model.generate(THREE, stream=True, **SIMULATE)
    steps = [[next(first)]]
    before = engine_of(model)
    second = model.generate(THREE, stream=True, **SIMULATE)
    steps.append([next(second)])
    assert engine_of(model) is not before and not closed(before)
    for a, b in zip(first, second, strict=True):
        steps[0].append(a)
        steps[1].append(b)
    assert [np.stack(each, 1).tolist() for each in steps] == [expected()[:3]] * 2
    assert closed(before) and size(model) == (8, 64, 8)
    # Now there is room for both.
    after = engine_of(model)
    both = [model.generate(THREE, stream=True, **SIMULATE) for _ in range(2)]
    for pair in zip(*both, strict=True):
        np.testing.assert_array_equal(*pair)
    assert engine_of(model) is after


def test_room_grows_in_powers_of_two_and_stays(model, monkeypatch):
    monkeypatch.setattr(serving, "PAGE", 4)

    def generated(rows: int, count: int) -> tuple[int, int, int]:
        found = model.generate([[11]] * rows, max_new_tokens=count, graphs="simulate")
        assert (found[:, :COUNT] == expected()[1][:count]).all()
        return size(model)

    assert generated(1, 2) == (1, 4, 1)
    first = engine_of(model)
    # Three pages of one sequence, not of all: a pool of four.
    assert generated(1, 10) == (1, 16, 4) and closed(first)
    second = engine_of(model)
    assert generated(3, 2) == (4, 16, 4) and closed(second)
    third = engine_of(model)
    assert generated(2, 5) == (4, 16, 4) and engine_of(model) is third
    assert serving.needed(70, 65) == (64, 65, 64 * 17)


def test_the_longest_sequence_of_a_model_fits():
    model = Model(config := tiny_config(MAIN, max_positions=6), tiny_module(config))
    found = model.generate([[1] * 2], max_new_tokens=4, graphs="simulate")
    np.testing.assert_array_equal(found, model.generate([[1] * 2], max_new_tokens=4))
    assert size(model) == (1, 6, 1)


def test_two_threads_on_one_model(model):
    found: dict[int, list[list[list[int]]]] = {}

    def run(turn: int) -> None:
        found[turn] = [model.generate(PROMPTS[turn : turn + 2], **SIMULATE).tolist() for _ in range(3)]

    threads = [threading.Thread(target=run, args=(turn,)) for turn in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {turn: [expected()[turn : turn + 2]] * 3 for turn in range(3)}
    size(model)


# `Engine.generate` itself.


def test_streams_and_logprobs_of_an_engine(engine_for):
    engine = engine_for(tiny_model(MAIN), **OPTIONS)
    own = engine.prefill(PROMPTS[:1])
    found, scores = engine.generate(PROMPTS, max_new_tokens=COUNT, logprobs=True)
    wanted, theirs = tiny_model(MAIN).generate(PROMPTS, max_new_tokens=COUNT, logprobs=True)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_allclose(scores, theirs, rtol=0, atol=1e-5)
    streams = [engine.generate([prompt], max_new_tokens=COUNT, stream=True) for prompt in PROMPTS[:3]]
    steps = [np.concatenate(parts) for parts in zip(*streams, strict=True)]
    np.testing.assert_array_equal(np.stack(steps, 1), wanted[:3])
    half = engine.generate(PROMPTS[:3], max_new_tokens=COUNT, stream=True, logprobs=True)
    next(half)
    with pytest.raises(CannotServe, match="release some"):
        engine.generate(PROMPTS[:1], max_new_tokens=COUNT)
    half.close()
    assert engine.live == tuple(own) and engine.stats()["free_sequences"] == 3


# On a CUDA device.


@pytest.mark.gpu
def test_gpu_generate_takes_the_engine_and_gives_the_tokens_of_the_jitted_step():
    """Prompts whose two best tokens lie 0.1 apart at every step, one after another on one engine."""
    model = moe_jax.load()
    assert model.tokenizer is not None
    prompts = [model.tokenizer.encode(text)[:4] for text in TEXTS]
    for rows in (prompts, prompts[:1], prompts[1:], prompts[::-1]):
        found, scores = model.generate(rows, max_new_tokens=12, logprobs=True)
        assert model.explain_generate() == 'engine: graphs "on"'
        wanted, own = model.generate(rows, max_new_tokens=12, logprobs=True, graphs="jit")
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_allclose(scores, own, rtol=0, atol=0.3)  # bf16
        streamed = [np.copy(step) for step in model.generate(rows, max_new_tokens=12, stream=True)]
        np.testing.assert_array_equal(np.stack(streamed, 1), wanted)
    stats = model.engine_stats()
    assert stats is not None and stats["replays"] > stats["captures"] > 0 and not stats["graph_error"]
    strict = model.generate(prompts, max_new_tokens=12, graphs="strict")
    np.testing.assert_array_equal(strict, model.generate(prompts, max_new_tokens=12, graphs="off"))
    model.close()
    assert model.engine_stats() is None


@pytest.mark.gpu
def test_gpu_draws_with_a_seed_are_those_of_the_jitted_step():
    """In f32, each call with prompts and a seed of its own."""
    model = moe_jax.load(dtype="float32")
    for seed, texts in enumerate((TEXTS, TEXTS[1:], TEXTS[:2])):
        options = {"max_new_tokens": 16, "temperature": 0.8, "top_p": 0.9, "seed": seed}
        found = model.generate(list(texts), **options)
        assert model.explain_generate() == 'engine: graphs "on"'
        np.testing.assert_array_equal(found, model.generate(list(texts), graphs="jit", **options))
    model.close()
