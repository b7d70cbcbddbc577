"""`Model.generate` on the engine that a model keeps: the tokens of the jitted step, and which of the two runs when."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import COUNT, MAIN, OPTIONS, PROMPTS, expected, turned_model
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import moe_jax
from moe_jax import serving
from moe_jax.cache import NotReplayed, SimulatedRuntime, StickyError
from moe_jax.engine import Engine
from moe_jax.errors import CannotServe, InvalidArgument
from moe_jax.generation import split
from moe_jax.model import Model
from moe_jax.pallas_kernels.errors import CudaError
from moe_jax.tokenizer import Tokenizer
from test_tokenizer import CONFIG, TEMPLATE, byte_tokenizer
from tiny_models import tiny_config, tiny_model, tiny_module

THREE = PROMPTS[:3]
SIMULATE: dict[str, Any] = {"max_new_tokens": COUNT, "graphs": "simulate"}
TEXTS = ("And David said unto", "The words of the wise", "Now it came to pass")
JIT: dict[str, Any] = {"max_new_tokens": COUNT, "graphs": "jit"}


def text_model(**changes: Any) -> Model:
    """A model with an engine of its own; the module is shared, so it must not be changed."""
    config = dataclasses.replace(tiny_config(MAIN), **changes)
    return Model(config, tiny_module(tiny_config(MAIN)), Tokenizer(byte_tokenizer(), CONFIG, TEMPLATE))


@pytest.fixture
def model() -> Iterator[Model]:
    model = text_model()
    yield model
    model.close()


@pytest.fixture(scope="module")
def shipped() -> Iterator[Model]:
    """In f32: in bf16 the two paths round at other places."""
    model = moe_jax.load(dtype="float32")
    yield model
    model.close()


@pytest.fixture
def gpu(monkeypatch) -> list[Exception]:
    """Makes `generate` take the CPU for a GPU with a simulated runtime; an error put in here is raised instead."""
    errors: list[Exception] = []

    def runtime(*_: object) -> SimulatedRuntime:
        if errors:
            raise errors[-1]
        return SimulatedRuntime(1 << 26)

    monkeypatch.setattr(serving, "on_gpu", lambda device: True)
    monkeypatch.setattr("moe_jax.engine.options.cuda_runtime", runtime)
    return errors


def engine_of(model: Model) -> Engine:
    assert model._serving is not None and model._serving._kept is not None
    return model._serving._kept.engine


def closed(engine: Engine) -> bool:
    return engine.stats()["state"] == "closed"


def size(model: Model) -> tuple[int, int, int]:
    """Places, tokens and pages of the engine that is kept; nobody has any of them."""
    stats = model.engine_stats()
    assert stats is not None and model._serving is not None and model._serving._kept is not None
    assert (stats["free_sequences"], stats["free_pages"]) == (stats["max_sequences"], stats["pages"])
    kept = model._serving._kept
    assert (kept.calls, kept.places, kept.pages) == (0, 0, 0)
    return stats["max_sequences"], kept.engine._geometry.max_tokens, stats["pages"]


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


# What the engine is made from.


def test_changes_of_the_module_count_at_once():
    model = turned_model()
    for change in (lambda: None, lambda: _set_head(model), lambda: setattr(model, "module", tiny_model(MAIN).module)):
        change()
        before = model._serving and engine_of(model)
        found = model.generate(THREE, **SIMULATE)
        np.testing.assert_array_equal(found, model.generate(THREE, **JIT))
        assert before is None or closed(before)
        model.generate(THREE, **SIMULATE)
        assert engine_of(model).stats()["captures"]
    assert found.tolist() == expected()[:3]


def _set_head(model: Model) -> None:
    module: Any = model.module
    module.head[...] = jnp.asarray(np.asarray(module.head[...])[::-1])


def test_a_stream_goes_on_with_the_weights_it_began_with(model):
    model = turned_model()
    stream = model.generate(THREE, stream=True, **SIMULATE)
    model.module = tiny_model(MAIN).module
    assert model.generate(THREE, **SIMULATE).tolist() == expected()[:3]
    assert np.stack(list(stream), 1).tolist() == expected(other=True)[:3]


def test_deleted_arrays_are_not_decoded_from_a_copy():
    model = turned_model()
    model.generate(THREE, **SIMULATE)
    engine = engine_of(model)
    for array in jax.tree.leaves(nnx.state(model.module)):
        array.delete()
    with pytest.raises(InvalidArgument, match="array embed: got deleted"):
        model.generate(THREE, **SIMULATE)
    assert closed(engine)


def test_a_module_that_is_not_what_its_config_says_is_refused(gpu):
    model = turned_model()
    model.generate(THREE, max_new_tokens=COUNT)
    assert model.explain_generate() == 'engine: graphs "on"'
    module: Any = model.module
    module.blocks[0].attention.window = 1
    found = model.generate(THREE, max_new_tokens=COUNT)
    assert model.explain_generate().startswith("jitted step: generate(graphs=…): module: got a Decoder whose parts")
    np.testing.assert_array_equal(found, model.generate(THREE, **JIT))
    with pytest.raises(CannotServe, match=r"module: got a Decoder whose parts .* wanted .* graphs=None"):
        model.generate(THREE, max_new_tokens=COUNT, graphs="on")


# Which of the two.


def test_on_a_cpu_the_jitted_step_runs_and_no_engine_is_made(model):
    assert model.explain_generate() == "generate was not called"
    np.testing.assert_array_equal(model.generate(THREE, max_new_tokens=COUNT), expected()[:3])
    assert model.explain_generate() == "jitted step: the model is on a cpu"
    assert model.engine_stats() is None
    model.close()


def test_on_a_gpu_the_engine_runs_unless_told_otherwise(gpu, model):
    np.testing.assert_array_equal(model.generate(THREE, max_new_tokens=COUNT), expected()[:3])
    assert model.explain_generate() == 'engine: graphs "on"'
    stats = model.engine_stats()
    assert stats is not None
    assert (stats["mode"], stats["direct"], stats["captures"]) == ("on", 3, 1)
    assert stats["replays"] == COUNT - 2 and stats["declines"] == {"prompt": 2, "first call": 1}
    np.testing.assert_array_equal(model.generate(THREE, **JIT), expected()[:3])
    assert model.explain_generate() == "jitted step: it was asked for"
    engine = engine_of(model)
    np.testing.assert_array_equal(model.generate(THREE, max_new_tokens=COUNT, graphs="off"), expected()[:3])
    assert closed(engine) and model.explain_generate() == 'engine: graphs "off"'
    stats = model.engine_stats()
    assert stats is not None and stats["direct"] == stats["steps"]


def test_strict_is_warmed_up_and_raises_what_is_no_replay(gpu, model):
    options = {"max_new_tokens": COUNT, "graphs": "strict"}
    np.testing.assert_array_equal(model.generate(THREE, **options), expected()[:3])
    stats = model.engine_stats()
    assert stats is not None and stats["replays"] == COUNT
    engine = engine_of(model)
    engine.registry.advance_owner("main")
    with pytest.raises(NotReplayed):
        model.generate(THREE, **options)
    size(model)


@pytest.mark.parametrize(
    "error",
    [
        CannotServe("device", where="CudaRuntime", got="sm_75", wanted="sm_80 or newer"),
        CudaError("allocate", where="CudaRuntime", got="CUDA_ERROR_OUT_OF_MEMORY", wanted="CUDA_SUCCESS"),
    ],
)
def test_an_engine_that_cannot_be_made_is_a_reason_or_an_error(gpu, model, error):
    gpu.append(error)
    np.testing.assert_array_equal(model.generate(THREE, max_new_tokens=COUNT), expected()[:3])
    assert model.explain_generate() == f"jitted step: {error}"
    with pytest.raises(type(error), match=str(error.got)):
        model.generate(THREE, max_new_tokens=COUNT, graphs="on")
    # Not tried again, until something has changed.
    gpu.clear()
    model.generate(THREE, max_new_tokens=COUNT)
    assert model.explain_generate() == f"jitted step: {error}"
    model.generate(THREE[:1], max_new_tokens=COUNT)
    assert model.explain_generate() == 'engine: graphs "on"'
    model.close()
    model.generate(THREE, max_new_tokens=COUNT)
    assert model.explain_generate() == 'engine: graphs "on"'


def test_a_failure_beside_a_running_call_is_not_remembered(gpu, model):
    one = {"max_new_tokens": COUNT}
    model.generate(THREE[:1], **one)
    engine = engine_of(model)
    stream = model.generate(THREE[:1], stream=True, **one)
    gpu.append(CudaError("allocate", where="CudaRuntime", got="CUDA_ERROR_OUT_OF_MEMORY", wanted="CUDA_SUCCESS"))
    model.generate(THREE[:1], **one)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in model.explain_generate()
    assert np.stack(list(stream), 1).tolist() == expected()[:1]
    model.generate(THREE[:1], **one)
    assert model.explain_generate() == 'engine: graphs "on"' and engine_of(model) is engine


def test_an_engine_that_does_not_close_costs_no_call_its_tokens(model):
    stream = model.generate(THREE, stream=True, **SIMULATE)
    engine = engine_of(model)
    model.close()
    engine.runtime.fail("synchronize")
    assert np.stack(list(stream), 1).tolist() == expected()[:3] and not closed(engine)
    model.close()
    assert closed(engine)


def test_counts_are_not_asked_for_with_the_lock_of_the_calls(model, monkeypatch):
    """A stream that is collected inside a step, with the engine's lock held, takes that one too."""
    model.generate(THREE, **SIMULATE)
    held = []

    def take():
        held.append(model._serving._lock.acquire(timeout=1))
        if held[-1]:
            model._serving._lock.release()

    def stats():
        other = threading.Thread(target=take)
        other.start()
        other.join()
        return {}

    monkeypatch.setattr(engine_of(model), "stats", stats)
    assert model.engine_stats() == {} and held == [True]
    monkeypatch.undo()


def test_a_lost_context_is_never_a_reason(gpu, model):
    gpu.append(StickyError("launch", where="CudaRuntime", got="CUDA_ERROR_ILLEGAL_ADDRESS", wanted="CUDA_SUCCESS"))
    with pytest.raises(StickyError):
        model.generate(THREE, max_new_tokens=COUNT)


def test_models_on_several_devices_keep_the_jitted_step(gpu):
    config = tiny_config(MAIN)
    graphdef, state = nnx.split(tiny_module(config))
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    model = Model(config, nnx.merge(graphdef, jax.device_put(state, NamedSharding(mesh, PartitionSpec()))))
    with pytest.raises(CannotServe, match=r"devices: got graphs='simulate' and a model on .*:0, .*:1, wanted"):
        model.generate(THREE, **SIMULATE)
    assert serving.choose(None, split(model.module)) == "the model is on several devices"


@pytest.mark.parametrize("graphs", ["on", "off", "strict"])
def test_without_a_cuda_device_a_named_mode_is_refused(model, graphs):
    with pytest.raises(
        CannotServe, match=rf"device: got graphs='{graphs}' and a model on .*, wanted a model on a CUDA"
    ):
        model.generate(THREE, max_new_tokens=COUNT, graphs=graphs)


def test_other_modes_are_refused(model):
    for graphs in ("yes", True, ["on"]):
        with pytest.raises(InvalidArgument, match="wanted None or on or off or strict or simulate or jit"):
            model.generate(THREE, graphs=graphs)


def test_types_that_no_kernel_takes_are_refused():
    config = tiny_config(MAIN)
    graphdef, state = nnx.split(tiny_module(config))
    state = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim == 1 else x, state)
    model = Model(config, nnx.merge(graphdef, state))
    with pytest.raises(InvalidArgument, match=r"dtype of .*: got bfloat16, wanted float32"):
        model.generate(THREE, **SIMULATE)


# Letting go.


def test_close_frees_the_engine_and_the_model_stays_usable(model):
    model.generate(THREE, **SIMULATE)
    engine = engine_of(model)
    model.close()
    assert closed(engine) and model.engine_stats() is None
    stream = model.generate(THREE, stream=True, **SIMULATE)
    engine = engine_of(model)
    model.close()
    assert np.stack(list(stream), 1).tolist() == expected()[:3] and closed(engine)


def test_the_engine_goes_with_the_model():
    model = text_model()
    model.generate(THREE, **SIMULATE)
    engine, gone = engine_of(model), weakref.ref(model)
    stream = model.generate(THREE[:1], stream=True, **SIMULATE)
    del model
    assert gone() is None and not closed(engine)
    assert np.stack(list(stream), 1).tolist() == expected()[:1] and closed(engine)


def test_a_failed_call_gives_everything_back(model):
    model.generate(THREE, **SIMULATE)
    runtime: Any = engine_of(model).runtime
    runtime.fail("read")
    with pytest.raises(CudaError):
        model.generate(THREE, **SIMULATE)
    size(model)
    assert model.generate(THREE, **SIMULATE).tolist() == expected()[:3]


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
