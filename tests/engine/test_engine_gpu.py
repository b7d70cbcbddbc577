"""The engine on a GPU: the same bodies as on the simulated device, so that only the device differs.

What is replayed is compared with a second engine of the same model whose steps are all direct, bit for bit.
"""

from __future__ import annotations

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_pairs import LONG, WARM_UP, Pair, device, make, pair
from engines import MAIN, OPTIONS, PROMPTS, ending_with, last, other_model, turned_model
from flax import nnx

import moe_jax
from moe_jax.cache import Reason
from moe_jax.engine import Engine
from moe_jax.testing import assert_replay_equals_direct
from tiny_models import FAMILIES, tiny_model

__all__ = ["device", "make", "pair"]


def random_prompts(count: int, longest: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


# -- Replays ----------------------------------------------------------------------------------------------------------


def test_steps_are_direct_then_captured_then_replayed_with_other_tokens_and_equal_bits(make):
    pair = Pair(make, tiny_model(MAIN), **OPTIONS)
    pair.prefill(PROMPTS[:3], temperature=0.9, seed=3)
    handles, kinds = [], []
    for _ in range(8):
        kinds.append(pair.step())
        handles.append(last(pair.engine).handle)
    assert kinds == [*WARM_UP, *["replay"] * 5] and len(set(map(id, handles[1:]))) == 1


@pytest.mark.parametrize("weights", ["held", "owned"])
def test_replays_equal_direct_steps_at_every_bucket_while_sequences_join_and_leave(make, device, weights):
    """64 sequences on a GPU; fewer where references take their time."""
    most = 4 if device.simulated else 64
    options = {} if device.simulated else {"max_sequences": most, "max_tokens": 192}
    engine = make(tiny_model(MAIN), **{**OPTIONS, **options}, weights=weights)
    prompts = random_prompts(most, 20, 258)
    assert assert_replay_equals_direct(engine, prompts, temperature=0.8, top_p=0.9, seed=1) == 2 * most - 1
    assert {1, 2, 4, most} <= set(engine.decode_buckets)
    assert engine.stats()["sequences"] == 0


@LONG
def test_replays_of_the_shipped_model_equal_direct_steps(make):
    model = moe_jax.load()
    engine = make(model, max_sequences=2, max_tokens=64, page_size=8, chunk=4)
    texts = ["And David said", "The words of the wise"]
    assert assert_replay_equals_direct(engine, texts, steps=3) == 3 * 3


@pytest.mark.parametrize("count", [1, 4])
def test_generate_runs_ahead_and_gives_the_tokens_of_steps_that_wait(make, count):
    """To the limit, and with an end token in the middle; every step is a replay, one of them at most for nothing."""
    prompts, steps = PROMPTS[:count], 24
    engine = make(tiny_model(MAIN), **OPTIONS)
    engine.warmup()
    wanted = waited_for(engine, prompts, steps)
    for end in (None, wanted[0][5], wanted[-1][9]):
        ends = engine if end is None else make(ending_with(end), **OPTIONS)
        ends.warmup()
        before = ends.stats()
        found = ends.generate(prompts, max_new_tokens=steps, stop=end).tolist()
        after = ends.stats()
        cut = [row[: row.index(end) + 1] if end in row else row for row in wanted]
        assert [row[: len(own)] for row, own in zip(found, cut, strict=True)] == cut
        assert waited_for(ends, prompts, steps) == cut
        longest = max(map(len, cut))
        assert longest <= after["replays"] - before["replays"] <= longest + 1
        assert after["captures"] == before["captures"]
        assert [key for key, n in after["declines"].items() if n != before["declines"].get(key, 0)] in ([], ["prompt"])


def waited_for(engine: Engine, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Tokens of each prompt, by steps that never run ahead."""
    numbers = engine.prefill(prompts, max_new_tokens=count)
    found: dict[int, list[int]] = {number: [] for number in numbers}
    for _ in range(count):
        for number, token in engine.step().items():
            found[number].append(token)
            assert last(engine).kind == "replay"
    for number in numbers:
        engine.release(number)
    return list(found.values())


def test_rows_4_3_2_1_4_keep_the_graph_of_four(pair):
    numbers = pair.prefill(PROMPTS[:4])
    assert pair.step() == "replay"
    handle = last(pair.engine).handle
    for number in numbers[:3]:
        pair.release(number)
        assert pair.step() == "replay" and pair.engine.stats()["graphs"] == 3
    pair.prefill(PROMPTS[1:4])
    assert pair.kinds(2) == ["replay"] * 2 and last(pair.engine).handle is handle
    assert pair.engine.stats()["captures"] == 3


def test_a_prompt_between_decodes_leaves_the_capture(pair):
    pair.prefill([PROMPTS[0]])
    pair.step()
    handle = last(pair.engine).handle
    for prompt in (PROMPTS[4], PROMPTS[2]):
        (number,) = pair.prefill([prompt])
        assert last(pair.engine).reason is Reason.PROMPT
        pair.release(number)
        assert pair.step() == "replay" and last(pair.engine).handle is handle


def test_results_of_earlier_steps_stay(pair):
    pair.prefill(PROMPTS[:3], temperature=0.9, seed=2)
    kept = []
    for _ in range(5):
        pair.step()
        logits = pair.engine.memory.read("logits")
        kept.append((logits, logits.copy()))
    for logits, copy in kept:
        np.testing.assert_array_equal(logits.view(np.uint8), copy.view(np.uint8))


# -- Against the compiled programs ------------------------------------------------------------------------------------


def check_against_the_jitted_path(engine: Engine, prompts: list[list[int]], count: int, tolerance: float) -> None:
    """Logits of every step are those of the whole sequences, read at once and without any storage; and the tokens are
    those of the jitted path, up to the first that is as good as another.

    Args:
        prompts: of one length.
        tolerance: of a logit, in units of the largest.
    """
    model, length = engine._model, len(prompts[0])
    engine.warmup()
    numbers, logits, tokens = engine.prefill(prompts, max_new_tokens=count), [], []
    for _ in range(count):
        tokens.append(list(engine.step().values()))
        logits.append(engine.memory.read("logits")[: len(prompts)])
        assert last(engine).kind == "replay"
    for number in numbers:
        engine.release(number)
    found, got = np.stack(tokens, 1), np.stack(logits, 1).astype(np.float32)
    whole = np.concatenate([np.asarray(prompts, np.int32), found], axis=1)
    with jax.default_matmul_precision("highest"):
        wanted = np.asarray(model(whole)).astype(np.float32)[:, length - 1 : -1]
        jitted = model.generate(prompts, max_new_tokens=count, graphs="jit")
    margin = tolerance * np.abs(wanted).max()
    error = np.abs(got - wanted).max()
    print(f"\nlogits of {model.config.family}: {error / np.abs(wanted).max():.1e} from the jitted path's")
    assert error <= margin
    np.testing.assert_array_equal(found, got.argmax(-1))
    for row, (own, other) in enumerate(zip(found, jitted, strict=True)):
        differ = np.flatnonzero(own != other)
        if differ.size:
            at = wanted[row, differ[0]]
            assert abs(at[own[differ[0]]] - at[other[differ[0]]]) <= 2 * margin, f"row {row}, step {differ[0]}"


@LONG
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees_with_the_jitted_path(make, family):
    prompts = [[5, 17, 3, 60, 2, 9, 41], [80, 2, 2, 4, 251, 7, 7], [1, 2, 3, 4, 5, 6, 7]]
    engine = make(tiny_model(family), max_sequences=3, max_tokens=32, page_size=4, chunk=3)
    check_against_the_jitted_path(engine, prompts, 9, 2e-4)


@LONG
def test_the_shipped_model_agrees_with_the_jitted_path(make):
    model = moe_jax.load()
    assert model.tokenizer is not None
    prompts = [model.tokenizer.encode(text)[:4] for text in ("And David said unto", "Now it came to pass")]
    engine = make(model, max_sequences=2, max_tokens=64, page_size=8, chunk=4)
    check_against_the_jitted_path(engine, prompts, 12, 0.03)


# -- Events -----------------------------------------------------------------------------------------------------------


def test_a_manifest_or_an_owner_that_is_replaced_sweeps_every_graph(pair):
    pair.prefill(PROMPTS[:2])
    pair.step()
    events = [pair.new_manifest, lambda: pair.engine.registry.advance_owner("main")]
    for number, event in enumerate(events, 1):
        event()
        assert pair.kinds(3) == WARM_UP
        assert pair.engine.stats()["swept"] >= 3 * number - 2
    assert len(pair.engine.runtime.executables) == pair.engine.stats()["graphs"] == 1


def test_owned_weights_are_rewritten_under_the_graphs(make):
    pair = Pair(make, tiny_model(MAIN), **OPTIONS, weights="owned")
    pair.engine.warmup()
    pair.prefill(PROMPTS[:2])
    pair.step()
    handle, before = last(pair.engine).handle, pair.engine.memory.read("logits")[:2]
    for model in (other_model(), None):
        pair.each(lambda engine, model=model: engine.update_weights(model))
        assert pair.step() == "replay" and last(pair.engine).handle is handle
        assert (pair.engine.memory.read("logits")[:2] != before).any()


def test_held_weights_that_move_are_captured_anew(pair):
    pair.prefill(PROMPTS[:2])
    pair.step()
    for model in (other_model(), None):
        pair.each(lambda engine, model=model: engine.update_weights(model))
        assert pair.step() == "direct" and last(pair.engine).reason is Reason.WEIGHTS_MOVED
        assert pair.kinds(2) == WARM_UP[1:]


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("weights", ["held", "owned"])
def test_a_user_deleting_or_donating_every_weight_changes_nothing(make, device, weights, donated):
    """Other arrays take the freed memory, if there is any."""
    engine = make(turned_model(), **OPTIONS, weights=weights)
    direct = make(other_model(), **OPTIONS, graphs="off")
    engine.warmup()
    wanted = direct.generate(PROMPTS, max_new_tokens=6).tolist()
    assert engine.generate(PROMPTS, max_new_tokens=6).tolist() == wanted
    donate = jax.jit(lambda x: x + x, donate_argnums=0)
    thieves = []
    for array in jax.tree.leaves(nnx.state(engine._model.module)):
        if donated:
            # Refused, or done on a copy: JAX's affair, as long as the memory stays.
            with warnings.catch_warnings(), contextlib.suppress(RuntimeError, ValueError):
                warnings.simplefilter("ignore")
                thieves.append(donate(array))
        if not array.is_deleted():
            array.delete()
        thieves += [jnp.full(array.shape, jnp.nan, array.dtype) for _ in range(2)]
    jax.block_until_ready(thieves)
    replays = engine.stats()["replays"]
    assert engine.generate(PROMPTS, max_new_tokens=6).tolist() == wanted
    stats = engine.stats()
    assert stats["replays"] > replays and stats["captures"] == 3
