"""Long prompts go through one compiled program, which leaves in the pages what chunks of rows would have left."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from engines import MAIN, take, turned_model

import moe_jax
from moe_jax.cache import SimulatedRuntime
from moe_jax.engine import Engine
from moe_jax.errors import InvalidArgument
from moe_jax.pallas_kernels.errors import CudaError
from tiny_models import FAMILIES, tiny_model

LEAST = 12
# Chunks of one row, as single decode rows are: few references are compiled.
OPTIONS: dict[str, Any] = {"max_sequences": 3, "max_tokens": 48, "page_size": 4, "chunk": 1, "long_prompts": LEAST}
POISON = 0xFF


def prompt(length: int, start: int = 3) -> list[int]:
    """Tokens without a pattern that a shifted row would hit by chance."""
    return [(start + 37 * i + i * i) % 258 for i in range(length)]


def page_bytes(engine: Engine) -> dict[str, np.ndarray]:
    """Every page of every layer, as bytes: ``[pages, bytes]``."""
    names = [f"{i}.{kind}" for i in range(engine._geometry.config.layers) for kind in ("k_pages", "v_pages")]
    return {name: (pages := engine.memory.read(name)).reshape(len(pages), -1).view(np.uint8) for name in names}


def stored(engine: Engine, number: int) -> dict[str, np.ndarray]:
    """Keys and values of what was read of a sequence: ``[tokens, kv_heads, D]``."""
    sequence, found = engine._sequences[number], {}
    for name in page_bytes(engine):
        pages = engine.memory.read(name)[list(sequence.pages)]
        found[name] = np.swapaxes(pages, 1, 2).reshape(-1, *pages.shape[1::2])[: sequence.length - 1]
    return found


def poison(engine: Engine) -> None:
    """All pages hold NaN."""
    for name in page_bytes(engine):
        pages = engine.memory.read(name)
        pages.view(np.uint8)[...] = POISON
        engine.memory.write(name, pages)


def free(engine: Engine) -> tuple[int, int, int]:
    stats = engine.stats()
    return stats["sequences"], stats["free_sequences"], stats["free_pages"]


@pytest.mark.parametrize("family", FAMILIES)
def test_pages_hold_what_chunks_leave(engine_for, family):
    model = tiny_model(family)
    long, short = engine_for(model, **OPTIONS), engine_for(model, **{**OPTIONS, "long_prompts": None})
    for length in (LEAST - 1, LEAST, LEAST + 1, LEAST + 2, 17, 32, 33, 40):
        steps = long.stats()["steps"]
        (one,), (two,) = long.prefill([prompt(length)]), short.prefill([prompt(length)])
        assert (long.stats()["steps"] > steps) == (length < LEAST)
        found, wanted = stored(long, one), stored(short, two)
        for name, values in wanted.items():
            assert values.shape[0] == length - 1
            np.testing.assert_allclose(found[name], values, rtol=2e-5, atol=2e-5, err_msg=f"{name} of {length} tokens")
        long.release(one)
        short.release(two)


def test_other_pages_stay_bit_for_bit_and_padding_is_finite(engine_for):
    """The prompt's pages lie apart in the pool, between a neighbour's and free ones that hold NaN."""
    engine = engine_for(tiny_model("qwen3_moe"), **OPTIONS)
    poison(engine)
    first, _ = engine.prefill([prompt(7), prompt(9)], max_new_tokens=2)
    engine.release(first)
    before = page_bytes(engine)
    (number,) = engine.prefill([prompt(15)], max_new_tokens=6)
    pages = engine._sequences[number].pages
    assert pages == (0, 1, 5, 6, 7)
    for name, after in page_bytes(engine).items():
        changed = [page for page in range(len(after)) if not np.array_equal(after[page], before[name][page])]
        assert changed == [0, 1, 5, 6], name
        assert np.isfinite(after[changed].view(np.float32)).all()


def test_sequences_that_decode_go_on_beside_a_long_prompt(engine_for):
    engine, model = engine_for(tiny_model(MAIN), **OPTIONS), tiny_model(MAIN)
    prompts = [prompt(8, 11), prompt(30, 7)]
    wanted = model.generate(prompts, max_new_tokens=6).tolist()
    new: dict[int, list[int]] = {}
    (near,) = engine.prefill(prompts[:1])
    take(engine, new, 2)
    (late,) = engine.prefill(prompts[1:])
    take(engine, new, 4)
    assert new == {near: wanted[0], late: wanted[1][:4]}


def test_greedy_tokens_of_the_shipped_model(engine_for):
    model = moe_jax.load()
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("And it came to pass in those days, that the LORD spake unto Moses, saying, Speak")
    engine = engine_for(model, **OPTIONS)
    for length in (LEAST - 1, LEAST, LEAST + 1, 17, 21):
        row = ids[:length]
        assert len(row) == length
        steps = engine.stats()["steps"]
        (number,) = engine.prefill([row])
        assert (engine.stats()["steps"] > steps) == (length < LEAST)
        new: dict[int, list[int]] = {}
        take(engine, new, 3)
        logits = np.asarray(model(jnp.asarray([row + new[number]], jnp.int32)))[0, length - 1 : -1]
        assert new[number] == logits.argmax(-1).tolist(), f"{length} tokens"
        engine.release(number)


def test_one_program_for_each_bucket_and_warmup_compiles_those_that_are_named(engine_for, compiles):
    model = turned_model()
    # A page size that no other test has: models of equal structure share their programs.
    engine = engine_for(model, **{**OPTIONS, "page_size": 2, "max_sequences": 2})
    store = model.executables
    before = store.stats().misses

    def compiled() -> int:
        return store.stats().misses - before

    engine.warmup([LEAST - 1, 14])
    assert compiled() == 1
    compiles.clear()
    for length in (LEAST - 1, LEAST, 14, 17):
        engine.generate([prompt(length)], max_new_tokens=2)
    assert compiled() == 1 and not compiles
    for length in (18, 33):
        engine.generate([prompt(length)], max_new_tokens=2)
    assert compiled() == 2
    # The last bucket ends with the engine's longest sequence, which is no power of two.
    engine.warmup([34, 40, 48])
    assert compiled() == 3
    engine.generate([prompt(47)], max_new_tokens=1)
    assert compiled() == 3
    assert store.compilations()[-1].command_buffers is False


@pytest.mark.parametrize("weights", ["held", "owned"])
def test_new_weights_count_for_the_next_long_prompt(engine_for, weights):
    row, other = prompt(20), turned_model()
    engine, fresh = (engine_for(model, **OPTIONS, weights=weights) for model in (tiny_model(MAIN), other))

    def keys(engine: Engine) -> np.ndarray:
        (number,) = engine.prefill([row])
        found = stored(engine, number)["0.k_pages"]
        engine.release(number)
        return found

    old, new, wanted = keys(engine), keys(fresh), other.generate([row], max_new_tokens=3).tolist()
    misses = other.executables.stats().misses
    assert not np.allclose(old, new, atol=1e-2)
    engine.update_weights(other)
    np.testing.assert_array_equal(keys(engine), new)
    assert engine.generate([row], max_new_tokens=3).tolist() == wanted
    # One array alone, by its name.
    engine.update_weights({"embed": tiny_model(MAIN).module.embed[...]})
    mixed = keys(engine)
    assert not np.allclose(mixed, new, atol=1e-2) and not np.allclose(mixed, old, atol=1e-2)
    engine.update_weights(tiny_model(MAIN))
    np.testing.assert_array_equal(keys(engine), old)
    assert other.executables.stats().misses == misses


@pytest.mark.parametrize(("call", "after"), [("hold", 1), ("copy", 0), ("copy", 3), ("record_event", 0), ("wait", 0)])
def test_a_long_prompt_that_failed_leaves_nothing(engine_for, call, after):
    """Nor does memory go that a queued copy still reads, or stay when the next one is done."""
    engine, row = engine_for(tiny_model("qwen3_moe"), **OPTIONS), prompt(20)
    wanted = tiny_model("qwen3_moe").generate([row], max_new_tokens=3).tolist()
    neighbour = engine.prefill([prompt(6)])
    books, size = free(engine), engine.runtime.space.bytes
    engine.runtime.fail(call, after=after)
    with pytest.raises(CudaError):
        # The first one makes no step, so the failure is met by the second.
        engine.prefill([[5], row], max_new_tokens=3)
    assert free(engine) == books and engine.live == tuple(neighbour)
    assert engine.runtime.space.bytes > size
    assert engine.generate([row], max_new_tokens=3).tolist() == wanted
    assert engine.runtime.space.bytes == size
    assert engine.step()


def test_a_program_that_does_not_compile_leaves_nothing(engine_for, monkeypatch):
    engine, row = engine_for(tiny_model("mixtral"), **{**OPTIONS, "page_size": 8}), prompt(20)
    books, known = free(engine), tiny_model("mixtral").executables.stats()

    def broken(*_: Any) -> Any:
        raise FloatingPointError("no such program")

    with monkeypatch.context() as patch:
        patch.setattr("moe_jax.models.decoder.Decoder.prefill", broken)
        with pytest.raises(FloatingPointError):
            engine.prefill([prompt(5), row])
    assert free(engine) == books
    assert tiny_model("mixtral").executables.stats().entries == known.entries
    wanted = tiny_model("mixtral").generate([row], max_new_tokens=3).tolist()
    assert engine.generate([row], max_new_tokens=3).tolist() == wanted


def test_closing_after_a_failure_gives_everything_back():
    runtime = SimulatedRuntime(1 << 25)
    engine = Engine(tiny_model(MAIN), **OPTIONS, graphs="simulate", runtime=runtime)
    runtime.fail("wait")
    with pytest.raises(CudaError):
        engine.prefill([prompt(20)])
    engine.close()
    assert runtime.space.bytes == 0


def test_a_long_prompt_has_more_to_read_than_the_longest_chunk_unless_told_otherwise(engine_for):
    options = {**OPTIONS, "max_tokens": 80}
    del options["long_prompts"]
    prompts = engine_for(tiny_model(MAIN), **options)._prompts
    assert not prompts.takes(65) and prompts.takes(66)


@pytest.mark.parametrize("least", [1, None])
def test_a_prompt_of_one_token_has_nothing_to_read(engine_for, least):
    engine = engine_for(tiny_model(MAIN), **{**OPTIONS, "long_prompts": least})
    misses = tiny_model(MAIN).executables.stats().misses
    if least:
        engine._prompts.compile(1)
    engine.prefill([[5]])
    assert engine.step() and tiny_model(MAIN).executables.stats().misses == misses


def test_refusals(engine_for):
    for value in (0, True, 2.5, "all"):
        with pytest.raises(InvalidArgument, match=r"long_prompts: got .* wanted an integer from 1 to"):
            engine_for(tiny_model(MAIN), **{**OPTIONS, "long_prompts": value})
    engine = engine_for(tiny_model(MAIN), **OPTIONS)
    for value in (0, 49, True):
        with pytest.raises(InvalidArgument, match=r"prompts: got .*, wanted an integer from 1 to 48"):
            engine.warmup([value])


# In bf16 a rounding now and then gives a token another expert, and all layers after it other values.
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "first", "later"), [("float32", 1e-5, 1e-3), ("bfloat16", 0.02, None)])
def test_pages_on_a_gpu_hold_what_chunks_leave(engine_for, dtype, first, later):
    """Relative to a key's or value's norm, in the first layer and in the others. Other pages stay bit for bit."""
    options = {"max_sequences": 2, "max_tokens": 512, "page_size": 16, "graphs": "on"}
    model = moe_jax.load(dtype=dtype)
    long, short = engine_for(model, **options), engine_for(model, **options, long_prompts=None)
    poison(long)
    (near,) = long.prefill([prompt(50)], max_new_tokens=2)
    for length in (65, 66, 67, 129, 130, 200, 257, 400):
        before, row = page_bytes(long), prompt(length, length)
        (one,), (two,) = long.prefill([row]), short.prefill([row])
        pages = long._sequences[one].pages[: -(-(length - 1) // 16)]
        for name, after in page_bytes(long).items():
            rest = [page for page in range(len(after)) if page not in pages]
            np.testing.assert_array_equal(after[rest], before[name][rest])
        found, wanted = stored(long, one), stored(short, two)
        for name, values in wanted.items():
            got, right = (x.astype(np.float32).reshape(length - 1, -1) for x in (found[name], values))
            error = np.linalg.norm(got - right, axis=1) / np.linalg.norm(right, axis=1)
            bound = first if name.startswith("0.") else later
            assert bound is None or error.max() < bound, f"{name} of {length} tokens: {np.sort(error)[-8:]}"
        long.release(one)
        short.release(two)
    assert near in long.step()
