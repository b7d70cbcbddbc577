"""Weights where the model has them, or copies of the engine's own; new ones, and what happens to the old."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import COUNT, MAIN, OPTIONS, PROMPTS, expected, kinds, last, other_model, take, turned_model
from flax import nnx
from jax.experimental.layout import Format, Layout

from moe_jax.cache import NotReplayed, SimulatedRuntime
from moe_jax.engine import Engine
from moe_jax.engine.weights import module_weights
from moe_jax.errors import InvalidArgument
from moe_jax.model import Model
from moe_jax.pallas_kernels.errors import CudaError
from tiny_models import tiny_config, tiny_model, tiny_module

# One bucket of rows is enough here, and few references are compiled.
ONE: dict[str, Any] = {**OPTIONS, "max_sequences": 1, "chunk": 1}
WAYS = pytest.mark.parametrize("weights", ["held", "owned"])
# How the steps after new weights run.
AFTER = {"held": ["direct", "capture", "replay"], "owned": ["replay"] * 3}


@pytest.fixture
def made(engine_for):
    def make(weights: str, model: Model | None = None, **options: Any) -> Engine:
        engine = engine_for(model or tiny_model(MAIN), **{**ONE, **options}, weights=weights)
        engine.warmup()
        return engine

    return make


def tokens(engine: Engine) -> list[int]:
    """Of the first prompt, read anew."""
    new: dict[int, list[int]] = {}
    (number,) = engine.prefill([PROMPTS[0]])
    take(engine, new, COUNT)
    engine.release(number)
    return new[number]


def arrays_of(model: Model) -> dict[str, jax.Array]:
    return module_weights("test", model.module)


def without(name: str, array: Any) -> dict[str, Any]:
    """Other weights, the last of which is this one."""
    arrays: dict[str, Any] = dict(arrays_of(other_model()))
    del arrays[name]
    return {**arrays, name: array}


def own_model() -> Model:
    """The main model in arrays of its own."""
    config = tiny_config(MAIN)
    graphdef, state = nnx.split(tiny_module(config))
    return Model(config, nnx.merge(graphdef, jax.tree.map(jnp.copy, state)))


def sharded(array: jax.Array) -> jax.Array:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("x",))
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))


def deleted(array: jax.Array) -> jax.Array:
    copy = jnp.copy(array)
    copy.delete()
    return copy


@WAYS
def test_new_weights_count_from_the_next_step_on(made, weights):
    engine = made(weights)
    (number,) = engine.prefill([PROMPTS[0]])
    before = kinds(engine, 1)
    handle = last(engine).handle
    engine.update_weights(other_model())
    seen, explained = [], []
    for _ in range(3):
        seen += kinds(engine, 1)
        explained.append(engine.explain_last_step())
    assert before == ["replay"] and seen == AFTER[weights]
    assert (last(engine).handle is handle) == (weights == "owned")
    assert ("weights moved" in explained[0]) == (weights == "held")
    engine.release(number)
    new = made(weights, other_model())
    assert tokens(engine) == tokens(new) == expected(other=True)[0] != expected()[0]
    # Back again, by name and all at once.
    engine.update_weights(arrays_of(tiny_model(MAIN)))
    assert tokens(engine) == expected()[0]


@WAYS
def test_some_weights_by_name(made, weights):
    """What is not given stays, the small arrays of the engine's own included."""
    engine = made(weights)
    one = {"0.down": arrays_of(other_model())["0.down"]}
    before = {name: engine.memory.read(name) for name in (*arrays_of(tiny_model(MAIN)), "cos", "sin", "zeros", "stop")}
    engine.update_weights(one)
    for name, array in before.items():
        np.testing.assert_array_equal(engine.memory.read(name), one.get(name, array), name)
        assert name not in engine.memory.weights() or (engine.memory.weights()[name] == one.get(name, array)).all()


@WAYS
def test_the_models_own_weights_as_they_are_now(made, weights):
    model = own_model()
    engine = made(weights, model)
    nnx.update(model.module, nnx.split(other_model().module)[1])
    assert tokens(engine) == expected()[0]
    engine.update_weights()
    assert tokens(engine) == expected(other=True)[0]


@WAYS
@pytest.mark.parametrize("way", ["delete", "donate"])
def test_arrays_that_the_user_gives_up_under_a_live_graph(made, weights, way):
    model = turned_model()
    engine = made(weights, model)
    assert tokens(engine) == expected(other=True)[0]
    handle = last(engine).handle
    give_up = {"delete": lambda x: x.delete(), "donate": jax.jit(lambda x: x * 0, donate_argnums=0)}[way]
    for array in jax.tree.leaves(nnx.state(model.module)):
        give_up(array)
    gc.collect()
    assert tokens(engine) == expected(other=True)[0]
    assert (last(engine).kind, last(engine).handle) == ("replay", handle)
    if way == "delete":
        with pytest.raises(InvalidArgument, match=r"Engine.update_weights: array embed: got deleted, wanted one that"):
            engine.update_weights()
        with pytest.raises(InvalidArgument, match="Engine: array embed: got deleted"):
            Engine(model, **ONE, graphs="simulate", weights=weights)


BAD = {
    "a deleted array": lambda array: (deleted(array), "array 0.qkv: got deleted"),
    "another dtype": lambda array: (array.astype(jnp.bfloat16), r"array 0.qkv: got bfloat16\[96, 32\], wanted float32"),
    "another shape": lambda array: (array[1:], r"array 0.qkv: got float32\[95, 32\]"),
    "swapped bytes": lambda array: (np.asarray(array).astype(">f4"), r"array 0.qkv: got float32\[96, 32\], its bytes"),
    "a list": lambda array: (array.tolist(), "array 0.qkv: got list, wanted a jax.Array"),
}
NOT_HELD = {
    "an array of the host": lambda array: (np.asarray(array), "0.qkv: got ndarray, wanted a jax.Array"),
    "a sharded array": lambda array: (sharded(array), "device of 0.qkv: got cpu:0, cpu:1, wanted one device"),
    "columns first": lambda array: (
        jax.device_put(array, Format(Layout((1, 0)), array.sharding)),
        r"layout of 0.qkv: got axes in order \(1, 0\), wanted row-major",
    ),
}


@pytest.mark.parametrize(("weights", "way"), [*(("held", w) for w in (BAD | NOT_HELD)), *(("owned", w) for w in BAD)])
def test_one_bad_array_changes_nothing(made, weights, way):
    engine = made(weights)
    engine.prefill([PROMPTS[0]])
    array, message = (BAD | NOT_HELD)[way](arrays_of(other_model())["0.qkv"])
    before, size = engine.memory.weights(), engine.runtime.space.bytes
    with pytest.raises(InvalidArgument, match=message):
        engine.update_weights(without("0.qkv", array))
    gc.collect()
    assert kinds(engine, 1) == ["replay"] and engine.runtime.space.bytes == size
    for name, values in before.items():
        np.testing.assert_array_equal(engine.memory.read(name), values, name)


@pytest.mark.parametrize("way", NOT_HELD)
def test_what_cannot_be_held_is_copied(made, way):
    engine = made("owned")
    array, _ = NOT_HELD[way](arrays_of(other_model())["0.qkv"])
    engine.update_weights(without("0.qkv", array))
    assert tokens(engine) == expected(other=True)[0] and last(engine).kind == "replay"


@WAYS
def test_a_model_in_parts(made, weights):
    model = own_model()
    module: Any = model.module
    module.embed[...] = sharded(module.embed[...])
    if weights == "owned":
        assert tokens(made(weights, model)) == expected()[0]
        return
    with pytest.raises(InvalidArgument, match="device of embed: got cpu:0, cpu:1, wanted one device"):
        made(weights, model)


@WAYS
def test_no_memory_for_new_weights_changes_nothing(made, weights):
    engine = made(weights)
    size = engine.runtime.space.bytes
    engine.runtime.fail("hold", after=3, name="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        engine.update_weights(other_model())
    gc.collect()
    assert engine.runtime.space.bytes == size
    assert tokens(engine) == expected()[0] and last(engine).kind == "replay"


def test_copies_under_way_keep_what_they_read(made):
    """The wait for them fails, so they run later: from memory that was not freed meanwhile."""
    engine = made("owned")
    engine.runtime.fail("synchronize")
    with pytest.raises(CudaError, match="synchronize"):
        engine.update_weights(other_model())
    gc.collect()
    for name, array in arrays_of(other_model()).items():
        np.testing.assert_array_equal(engine.memory.read(name), array, name)
    engine.update_weights(other_model())
    assert tokens(engine) == expected(other=True)[0]


def test_owned_weights_are_written_after_the_work_that_is_queued(made):
    engine = made("owned")
    name, runtime = "0.qkv", engine.runtime
    resource = engine.memory.table.get(name)
    copy, _capsule = runtime.allocate(resource.bytes)
    before = engine.memory.read(name)
    runtime.copy(copy, resource.address, resource.bytes, engine.graphs.stream)
    engine.update_weights({name: arrays_of(other_model())[name]})
    found = runtime.read(copy, "float32", before.shape, engine.graphs.stream)
    np.testing.assert_array_equal(found, before)


@WAYS
def test_memory_is_what_it_was(weights):
    """After an update, with live graphs, and after all is closed."""
    runtime = SimulatedRuntime(1 << 25)
    engine = Engine(tiny_model(MAIN), **ONE, graphs="simulate", weights=weights, runtime=runtime)
    engine.warmup()
    engine.prefill([PROMPTS[0]])
    size = runtime.space.bytes
    for model in (other_model(), tiny_model(MAIN), other_model()):
        engine.update_weights(model)
        gc.collect()
        assert runtime.space.bytes == size
        engine.step()
        assert runtime.space.bytes == size
    engine.close()
    gc.collect()
    assert runtime.space.bytes == 0 and not runtime.executables and not runtime.graphs


def test_warmup_makes_the_calls_after_new_weights(made):
    engine = made("held", graphs="strict", runtime=SimulatedRuntime(1 << 25))
    engine.prefill([PROMPTS[0]])
    engine.update_weights(other_model())
    with pytest.raises(NotReplayed, match="weights moved"):
        engine.step()
    engine.warmup()
    assert kinds(engine, 1) == ["replay"]


def test_weights_is_an_option():
    with pytest.raises(InvalidArgument, match="weights: got 'borrowed', wanted held or owned"):
        Engine(tiny_model(MAIN), **ONE, graphs="simulate", weights="borrowed")


@pytest.mark.parametrize("weights", ["held", "owned"])
def test_weights_of_a_model_that_computes_something_else_are_refused(made, weights):
    engine = made(weights)
    other = dataclasses.replace(tiny_config(MAIN), clip_qkv=0.01)
    with pytest.raises(InvalidArgument, match=r"config: got clip_qkv 0.01, wanted the engine's clip_qkv"):
        engine.update_weights(Model(other, tiny_module(other)))
    ends = dataclasses.replace(tiny_config(MAIN), eos_token_ids=(7,))
    engine.update_weights(Model(ends, tiny_module(ends)))
