"""The engine over the CUDA runtime and a fake driver, whose memory is that of JAX arrays on the host.

Kernels run their references, so tokens are right or wrong; what memory, copies and compilations are is what a GPU sees.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("cuda.core")

from fake_driver import install
from flax import nnx

from moe_jax.cache.cuda_runtime import CudaRuntime
from moe_jax.engine import Engine
from moe_jax.engine.host import compiled_reference
from moe_jax.engine.weights import module_weights
from moe_jax.errors import InvalidArgument
from moe_jax.model import Model
from moe_jax.pallas_kernels import compiled
from tiny_models import tiny_config, tiny_module

MAIN = "olmoe"
OPTIONS: dict[str, Any] = {"max_sequences": 1, "max_tokens": 64, "page_size": 8, "chunk": 1, "graphs": "on"}
PROMPT, COUNT = [5, 17, 3, 60, 2], 6
WAYS = pytest.mark.parametrize("weights", ["held", "owned"])
AFTER = {"held": ["direct", "capture", "replay"], "owned": ["replay"] * 3}


@pytest.fixture
def made(monkeypatch):
    """Runtime, driver, and how often each kernel was compiled."""
    fake, compilations = install(monkeypatch), Counter[str]()

    def compile_spec(spec, capability):
        compilations[spec.key] += 1
        return fake.compile(compiled_reference(spec), capability)

    monkeypatch.setattr(compiled, "compile_spec", compile_spec)
    return CudaRuntime(), fake, compilations


def model(*, turned: bool = False) -> Model:
    """In arrays of its own."""
    config = tiny_config(MAIN)
    graphdef, state = nnx.split(tiny_module(config))
    state = jax.tree.map(lambda x: jnp.asarray(np.ascontiguousarray(np.asarray(x)[..., :: -1 if turned else 1])), state)
    return Model(config, nnx.merge(graphdef, state))


@functools.cache
def expected(turned: bool = False) -> list[int]:
    return model(turned=turned).generate([PROMPT], max_new_tokens=COUNT)[0].tolist()


def arrays_of(given: Model) -> dict[str, jax.Array]:
    return module_weights("test", given.module)


def tokens(engine: Engine) -> list[int]:
    (number,) = engine.prefill([PROMPT])
    found = [engine.step()[number] for _ in range(COUNT)]
    engine.release(number)
    return found


def kinds(engine: Engine, count: int) -> list[str]:
    (number,) = engine.prefill([PROMPT])
    found = []
    for _ in range(count):
        engine.step()
        found.append(engine.explain_last_step().split()[0].rstrip(":"))
    engine.release(number)
    return found


def places(engine: Engine) -> dict[str, int]:
    return {name: engine.memory.table.get(name).address for name, *_ in engine._geometry.weights}


@WAYS
def test_weights_stand_where_the_model_has_them_or_in_copies(made, weights):
    runtime, _, _ = made
    given = model()
    theirs = {name: array.unsafe_buffer_pointer() for name, array in arrays_of(given).items()}
    with Engine(given, **OPTIONS, weights=weights, runtime=runtime) as engine:
        found = places(engine)
        assert found == theirs if weights == "held" else not set(found.values()) & set(theirs.values())
        # Programs that JAX compiles read the same memory.
        views = engine.memory.weights()
        assert {name: array.unsafe_buffer_pointer() for name, array in views.items()} == found
        assert tokens(engine) == expected()
        for array in arrays_of(given).values():
            array.delete()
        gc.collect()
        # What would come to stand in freed memory.
        others = [jnp.full(array.shape, 7, array.dtype) for array in views.values()]
        assert kinds(engine, 1) == ["replay"] and tokens(engine) == expected()
        np.testing.assert_array_equal(views["embed"], arrays_of(model())["embed"])
        assert others


@WAYS
def test_new_weights_make_no_trip_through_the_host(made, weights):
    runtime, fake, compilations = made
    with Engine(model(), **OPTIONS, weights=weights, runtime=runtime) as engine:
        engine.warmup()
        before, compiled_before = places(engine), dict(compilations)
        new = model(turned=True)
        theirs = {name: array.unsafe_buffer_pointer() for name, array in arrays_of(new).items()}
        fake.calls.clear()
        engine.update_weights(new)
        copies = [call for call in fake.calls if call.startswith("cuMemcpy")]
        assert copies == ([] if weights == "held" else ["cuMemcpyDtoDAsync"] * len(before))
        assert places(engine) == (theirs if weights == "held" else before)
        # Whatever becomes of them: copies are done, or the memory is held.
        for array in arrays_of(new).values():
            array.delete()
        del new
        assert kinds(engine, 3) == AFTER[weights] and tokens(engine) == expected(True)
        assert dict(compilations) == compiled_before


@WAYS
def test_arrays_of_another_device(made, weights):
    runtime, _, _ = made
    array = jax.device_put(arrays_of(model(turned=True))["0.qkv"], jax.devices()[1])
    with Engine(model(), **OPTIONS, weights=weights, runtime=runtime) as engine:
        engine.warmup()
        if weights == "held":
            with pytest.raises(InvalidArgument, match=r"device of 0.qkv: got cpu:1, wanted cpu:0 and no other"):
                engine.update_weights({**arrays_of(model(turned=True)), "0.qkv": array})
            assert kinds(engine, 1) == ["replay"] and tokens(engine) == expected()
        else:
            engine.update_weights({**arrays_of(model(turned=True)), "0.qkv": array})
            assert kinds(engine, 1) == ["replay"] and tokens(engine) == expected(True)


@WAYS
def test_a_model_on_another_device(made, weights):
    runtime, _, _ = made
    given = model()
    for variable in jax.tree.leaves(nnx.state(given.module), is_leaf=lambda x: isinstance(x, nnx.Variable)):
        variable[...] = jax.device_put(variable[...], jax.devices()[1])
    if weights == "held":
        with pytest.raises(InvalidArgument, match="device of embed: got cpu:1, wanted cpu:0"):
            Engine(given, **OPTIONS, weights=weights, runtime=runtime)
    else:
        with Engine(given, **OPTIONS, weights=weights, runtime=runtime) as engine:
            assert tokens(engine) == expected()


@WAYS
def test_nothing_is_compiled_after_the_engine_is_made(made, weights):
    runtime, _, compilations = made
    with Engine(model(), **OPTIONS, weights=weights, runtime=runtime) as engine:
        lists = (*engine._steps.decode.values(), *engine._steps.prompt.values())
        wanted = dict.fromkeys((spec.key for launches in lists for spec in launches.specs), 1)
        assert dict(compilations) == wanted
        engine.warmup()
        assert tokens(engine) == expected() and dict(compilations) == wanted


@WAYS
def test_everything_is_given_back(made, weights, monkeypatch):
    """Old arrays when their update returns, all memory when the engine is closed."""
    runtime, fake, _ = made
    hold, kept = runtime.hold, weakref.WeakSet[Kept]()

    def held(*arguments):
        address, capsule = hold(*arguments)
        kept.add(one := Kept(capsule))
        return address, one

    monkeypatch.setattr(runtime, "hold", held)
    with Engine(model(), **OPTIONS, weights=weights, runtime=runtime) as engine:
        engine.warmup()
        before = len(kept)
        assert len(fake.executables) == 1 and before > len(arrays_of(model()))
        for _ in range(2):
            engine.update_weights(model(turned=True))
            assert len(kept) == before and len(fake.executables) == (0 if weights == "held" else 1)
            assert kinds(engine, 3) == AFTER[weights] and len(kept) == before
    assert not fake.executables and not fake.graphs and not kept


class Kept:
    """A capsule that can be counted."""

    def __init__(self, capsule: Any):
        self.capsule = capsule
