"""The engine that a model keeps for `generate`: what it is made from, which calls run on it, and when it goes."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import COUNT, MAIN, expected, turned_model
from flax import nnx
from generate_models import JIT, SIMULATE, THREE, closed, engine_of, gpu, model, size, text_model
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax import serving
from moe_jax.cache import NotReplayed, StickyError
from moe_jax.engine import ending
from moe_jax.errors import CannotServe, InvalidArgument
from moe_jax.generation import split
from moe_jax.model import Model
from moe_jax.pallas_kernels.errors import CudaError
from tiny_models import tiny_config, tiny_model, tiny_module

__all__ = ["gpu", "model"]


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


def test_an_engine_that_is_kept_no_more_closes_outside_whatever_its_last_stream_is_collected_in(model, monkeypatch):
    """Inside a trace of JAX, what a simulated device still runs would become a part of the program."""
    monkeypatch.setattr(ending, "SECONDS", 60.0)  # on a busy machine too
    streams = [model.generate(THREE, stream=True, **SIMULATE)]
    for _ in range(4):
        next(streams[0])
    engine = engine_of(model)
    model.close()
    assert not closed(engine)

    def traced(x):
        streams.clear()
        return x + 1

    assert str(jax.make_jaxpr(traced)(1)).count("add") == 1
    assert closed(engine)


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
