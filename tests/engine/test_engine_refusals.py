"""Bad input gets one typed error that says what was got and wanted, and changes nothing."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import MAIN, OPTIONS, PROMPTS

from moe_jax.cache import SimulatedRuntime
from moe_jax.engine import Engine
from moe_jax.engine.step import Geometry, Steps, build
from moe_jax.engine.weights import module_weights
from moe_jax.errors import CannotServe, InvalidArgument
from moe_jax.model import Model
from moe_jax.testing import assert_replay_equals_direct
from tiny_models import tiny_config, tiny_model, tiny_module


@pytest.fixture(scope="module")
def engine():
    with Engine(tiny_model(MAIN), **OPTIONS, graphs="simulate") as engine:
        yield engine


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_sequences": 0}, "max_sequences: got 0, wanted an integer from 1 to 64"),
        ({"max_sequences": 65}, "max_sequences: got 65, wanted an integer from 1 to 64"),
        ({"max_tokens": 513}, "max_tokens: got 513, wanted an integer from 1 to 512"),
        ({"max_tokens": 8.0}, "max_tokens: got 8.0"),
        ({"page_size": 12}, "page_size: got 12, wanted a power of two"),
        ({"pages": 0}, "pages: got 0"),
        ({"chunk": 65}, "chunk: got 65"),
        ({"max_entries": 2}, r"max_entries: got 2, wanted at least 3, a graph for each bucket of \[1, 2, 4\] rows"),
        ({"max_bytes": 1 << 16}, r"max_bytes: got 65536, wanted at least \d{6}, a graph for each bucket of"),
        ({"graphs": "yes"}, "graphs: got 'yes', wanted on or off or strict or simulate"),
        *(
            ({"runtime": runtime}, "runtime: got .*, wanted a SimulatedRuntime, a CudaRuntime or None")
            for runtime in (3, "cuda", jax.devices()[0])
        ),
        ({"runtime": 3, "graphs": "on"}, "runtime: got int"),
    ],
)
def test_options(options, message):
    with pytest.raises(InvalidArgument, match=message):
        Engine(tiny_model(MAIN), **{**OPTIONS, "graphs": "simulate", **options})


@pytest.mark.parametrize("graphs", ["on", "off", "strict"])
def test_without_a_cuda_device_only_simulate_runs(graphs):
    with pytest.raises(
        CannotServe, match=r'no CUDA device, wanted a GPU, or graphs="simulate"; Model.generate needs neither'
    ):
        Engine(tiny_model(MAIN), **OPTIONS, graphs=graphs)


def test_without_graphs_their_bounds_are_nobodys_concern():
    options = {**OPTIONS, "graphs": "off", "max_entries": 1, "max_bytes": 1, "runtime": SimulatedRuntime(1 << 25)}
    with Engine(tiny_model(MAIN), **options) as engine:
        assert len(engine.decode_buckets) == 3


def test_models():
    with pytest.raises(InvalidArgument, match=r"model: got Decoder, wanted a moe_jax.Model"):
        Engine(tiny_module(tiny_config(MAIN)), **OPTIONS)  # type: ignore[arg-type]
    config = tiny_config(MAIN, dtype="float64")
    module = tiny_module(tiny_config(MAIN))
    with pytest.raises(InvalidArgument, match="module: got Attention, wanted a Decoder"):
        Engine(Model(config, module.blocks[0].attention), **OPTIONS, graphs="simulate")


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts: got an empty list"),
        ([[]], {}, "empty prompt"),
        ([[1, 258]], {}, "token out of the vocabulary: got 258"),
        ([[1] * 64], {}, r"prompt and new tokens: got 64 \+ 1 tokens, wanted at most max_tokens=64"),
        ([[1] * 60], {"max_new_tokens": 5}, r"got 60 \+ 5 tokens"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ([[1]], {"max_new_tokens": True}, "max_new_tokens: got True"),
        ([[1]], {"temperature": -1.0}, "temperature: got -1.0"),
        ([[1]], {"top_k": -1}, "top_k: got -1"),
        ("text", {}, "tokenizer"),
        (None, {}, r"^Engine.prefill\(prompts\): type of prompts: got NoneType"),
    ],
)
def test_prompts(engine, prompts, options, message):
    with pytest.raises(InvalidArgument, match=message) as caught:
        engine.prefill(prompts, **options)
    assert caught.value.where.startswith("Engine.prefill")
    assert engine.stats()["sequences"] == engine.stats()["steps"] == 0


@pytest.mark.parametrize("name", ["logprobs", "stream"])
@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_switches_of_generate(engine, name, value):
    with pytest.raises(InvalidArgument, match=f"^Engine.generate: {name}: got .*, wanted True or False"):
        engine.generate([[1]], **{name: value})


@pytest.mark.parametrize(
    ("prompts", "options", "place"),
    [(None, {}, "(prompts)"), ([[1]], {"temperature": "hot"}, ""), ([[1]], {"stop": 1.5}, "(stop=…)")],
)
def test_refusals_of_generate_name_it(engine, prompts, options, place):
    with pytest.raises(InvalidArgument) as caught:
        engine.generate(prompts, **options)
    assert caught.value.where == f"Engine.generate{place}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": None}, "type of engine: got NoneType, wanted Engine"),
        *(({"prompts": value}, "prompts: got .*, wanted a list of prompts") for value in (None, 3, "text")),
        *(({"steps": value}, "steps: got .*, wanted an integer, 1 or more") for value in (None, "3", 1.0, 0, -1)),
    ],
)
def test_assert_replay_equals_direct(engine, arguments, message):
    with pytest.raises(InvalidArgument, match=f"^assert_replay_equals_direct: {message}"):
        assert_replay_equals_direct(**{"engine": engine, "prompts": [[1]], **arguments})
    assert engine.stats()["steps"] == 0


def test_no_more_than_there_are_places(engine):
    with pytest.raises(CannotServe, match="sequences and pages: got 5 and 40, wanted at most 4 and 32"):
        engine.prefill(PROMPTS)
    assert engine.stats()["free_pages"] == 32


@pytest.mark.parametrize("pages", [10**9, 1 << 31])
def test_a_pool_that_the_host_cannot_hold(pages, monkeypatch):
    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr(SimulatedRuntime, "__init__", refuse)  # what a host grants is not the same everywhere
    with pytest.raises(CannotServe, match=rf"Engine: memory: got [\d,]+ bytes for a pool of {pages:,} pages, wanted"):
        Engine(tiny_model(MAIN), **{**OPTIONS, "pages": pages}, graphs="simulate")


def test_a_sequence_that_no_pool_holds():
    with (
        Engine(tiny_model(MAIN), **{**OPTIONS, "pages": 2}, graphs="simulate") as small,
        pytest.raises(InvalidArgument, match="got 18 tokens, wanted at most 2 pages of 8"),
    ):
        small.prefill([[1] * 8], max_new_tokens=10)


def test_integers_of_numpy_are_integers(engine):
    sizes = {name: np.int64(size) for name, size in OPTIONS.items()}
    with Engine(tiny_model(MAIN), **sizes, graphs="simulate") as same:
        assert same._steps.decode == engine._steps.decode


def test_an_engine_without_triton_says_what_is_missing(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "triton" else found(name, *more)
    )
    with pytest.raises(CannotServe, match=r"got no triton, wanted jax-triton \(`pip install jax-triton`\)"):
        Engine(tiny_model(MAIN), max_sequences=1, max_tokens=8, graphs="simulate")


def test_sequences(engine):
    with pytest.raises(InvalidArgument, match=r"sequence: got 9, wanted one of \[\]"):
        engine.release(9)
    assert engine.step() == {}


def test_weights(engine):
    before = engine.memory.read("0.qkv")
    for given, message in [
        ({"0.q": before}, r"names: got \['0.q'\], wanted some of"),
        ({"0.qkv": before[1:]}, r"array 0.qkv: got float32\[95, 32\], wanted float32\[96, 32\]"),
        ({"0.qkv": jnp.asarray(before, jnp.bfloat16)}, r"got bfloat16\[96, 32\]"),
        ({"embed": np.zeros((258, 32), np.float32), "norm": np.zeros(3, np.float32)}, "array norm"),
        (tiny_model("qwen3_moe"), "names: got "),
        ("x", "weights: got str, wanted a moe_jax.Model, its module, a dict of arrays by name, or None"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            engine.update_weights(given)
    np.testing.assert_array_equal(engine.memory.read("0.qkv"), before)
    assert engine.memory.read("embed").any()


def test_launch_lists_are_content():
    """Built anew they are equal; another size, another key."""
    arrays = module_weights("test", tiny_module(tiny_config(MAIN)))
    weights = tuple((name, array.dtype.name, tuple(array.shape)) for name, array in arrays.items())
    sizes = {"max_sequences": 7, "max_tokens": 64, "page_size": 8, "pages": 56, "rows": 7, "stops": 1}

    def lists(**changes: Any) -> Steps:
        geometry = Geometry(config=tiny_config(MAIN), dtype="float32", weights=weights, **{**sizes, **changes})
        return build(geometry, (1, 2), (2,))

    one, two, three = lists(), lists(), lists(pages=57)
    assert one.decode == two.decode and one.prompt == two.prompt and one.manifest.key == two.manifest.key
    assert {launch.spec.pdl for launch in lists(pdl=True).decode[2].launches} == {True}
    assert one.decode[2] != one.prompt[2] and one.decode[2] != three.decode[2]
    assert len(one.decode[1].launches) == 1 + 4 + 2 + 5 and len(one.decode[2].launches) == 1 + 4 + 3 + 5
