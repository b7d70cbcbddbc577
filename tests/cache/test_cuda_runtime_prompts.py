"""Long prompts over the CUDA runtime and a fake driver: what the compiled program reads, and what is copied when."""

from __future__ import annotations

import gc
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
from moe_jax.model import Model
from moe_jax.pallas_kernels import compiled
from moe_jax.pallas_kernels.errors import CudaError
from tiny_models import tiny_config, tiny_module

MAIN = "olmoe"
OPTIONS: dict[str, Any] = {"max_sequences": 2, "max_tokens": 32, "page_size": 4, "chunk": 1, "graphs": "on"}
PROMPT = [5, 17, 3, 60, 2, 9, 9, 41, 8, 33, 71, 200, 6, 14]


@pytest.fixture
def made(monkeypatch):
    """Runtime and driver; kernels run their references."""
    fake = install(monkeypatch)

    def compile_spec(spec, capability):
        return fake.compile(compiled_reference(spec), capability)

    monkeypatch.setattr(compiled, "compile_spec", compile_spec)
    return CudaRuntime(), fake


def model(*, turned: bool = False, device: int = 0) -> Model:
    """In arrays of its own."""
    config = tiny_config(MAIN)
    graphdef, state = nnx.split(tiny_module(config))

    def own(x: jax.Array) -> jax.Array:
        values = np.ascontiguousarray(np.asarray(x)[..., :: -1 if turned else 1])
        return jax.device_put(values, jax.devices()[device], may_alias=False)

    return Model(config, nnx.merge(graphdef, jax.tree.map(own, state)))


def stored(given: Model) -> list[np.ndarray]:
    """Keys and values of the prompt, from the model alone: ``[tokens, kv_heads, D]`` each."""
    tokens = jnp.asarray([PROMPT[:-1]], jnp.int32)
    _, ((keys, values),) = given.module.prefill(tokens, jnp.asarray([len(PROMPT) - 1], jnp.int32), len(PROMPT) - 1)
    return [np.asarray(keys[0]), np.asarray(values[0])]


def found(engine: Engine) -> list[np.ndarray]:
    """The same, from the pages of a sequence that is read for it."""
    (number,) = engine.prefill([PROMPT])
    pages = list(engine._sequences[number].pages)
    arrays = [np.swapaxes(engine.memory.read(f"0.{name}")[pages], 1, 2) for name in ("k_pages", "v_pages")]
    engine.release(number)
    return [array.reshape(-1, *array.shape[2:])[: len(PROMPT) - 1] for array in arrays]


def check(engine: Engine, wanted: list[np.ndarray]) -> None:
    for got, values in zip(found(engine), wanted, strict=True):
        np.testing.assert_allclose(got, values, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("weights", ["held", "owned"])
def test_the_program_reads_the_weights_that_steps_read(made, weights):
    runtime, fake = made
    wanted = [stored(model(turned=turned)) for turned in (False, True)]
    assert not np.allclose(wanted[0][0], wanted[1][0], atol=1e-2)
    given, new = model(), model(turned=True)
    with Engine(given, **OPTIONS, weights=weights, long_prompts=8, runtime=runtime) as engine:
        fake.calls.clear()
        check(engine, wanted[0])
        # Keys and values of the only layer, whose pages lie together; nothing was launched.
        assert fake.calls.count("cuMemcpyDtoDAsync") == 2 and "cuLaunchKernelEx" not in fake.calls
        engine.update_weights(new)
        # Whatever becomes of the arrays.
        for array in jax.tree.leaves((nnx.state(given.module), nnx.state(new.module))):
            array.delete()
        gc.collect()
        check(engine, wanted[1])


def test_owned_weights_of_a_model_on_another_device(made):
    runtime, _ = made
    with Engine(model(device=1), **OPTIONS, weights="owned", long_prompts=8, runtime=runtime) as engine:
        engine.warmup([len(PROMPT)])
        check(engine, stored(model()))


@pytest.mark.parametrize("call", ["cuMemcpyDtoDAsync", "cuEventRecord", "cuEventSynchronize"])
def test_what_a_queued_copy_reads_outlives_a_failure(made, call):
    runtime, fake = made
    with Engine(model(), **OPTIONS, long_prompts=8, runtime=runtime) as engine:
        fake.fail(call, after=1 if call == "cuMemcpyDtoDAsync" else 0)
        with pytest.raises(CudaError):
            engine.prefill([PROMPT])
        gc.collect()
        # What would come to stand in freed memory.
        others = [jnp.full((4, 4, 4, 8), 7, jnp.float32) for _ in range(8)]
        stats = engine.stats()
        assert (stats["free_sequences"], stats["free_pages"]) == (2, 16)
        runtime.synchronize(engine.graphs.stream)
        keys = np.swapaxes(engine.memory.read("0.k_pages")[:4], 1, 2).reshape(16, 4, 8)[: len(PROMPT) - 1]
        np.testing.assert_allclose(keys, stored(model())[0], rtol=2e-5, atol=2e-5)
        check(engine, stored(model()))
        assert others
