"""Tokens of the engine are those of the jitted path, for every family and however sequences come and go."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from engines import COUNT, MAIN, OPTIONS, PROMPTS, ending_with, expected, other_model, take

import moe_jax
from moe_jax.engine import Engine
from moe_jax.engine.sequences import Generation
from moe_jax.model import Model
from moe_jax.pallas_kernels.advance.specs import LENGTH, STOPPED
from moe_jax.sampling import sampling
from tiny_models import FAMILIES, tiny_model

# Three sequences and chunks of three tokens: one row bucket for steps and chunks, so few references are compiled. Three
# is the declared maximum and no power of two.
THREE = {"max_sequences": 3, "max_tokens": 32, "page_size": 4, "chunk": 3}


def check_greedy(engine: Engine, model: Model, prompts: list[list[int]], count: int) -> None:
    """Every token is the largest logit of the whole sequence before it, read at once and without any storage."""
    found = engine.generate(prompts, max_new_tokens=count)
    logits = np.asarray(model(np.concatenate([np.asarray(prompts, np.int32), found], axis=1)))
    np.testing.assert_array_equal(found, logits[:, len(prompts[0]) - 1 : -1].argmax(-1))
    # All three sequences ran in every step, the first two of which were direct and captured.
    assert (engine.stats()["replays"], engine.explain_last_step()) == (count - 2, "replay: 3 rows in a bucket of 3")


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {MAIN}))
def test_greedy_tokens_of_every_family_equal_the_uncached_model(engine_for, family):
    prompts = [[5, 17, 3, 60, 2, 9, 41], [80, 2, 2, 4, 251, 7, 7], [1, 2, 3, 4, 5, 6, 7]]
    model = tiny_model(family)
    check_greedy(engine_for(model, **THREE), model, prompts, 9)


def test_greedy_tokens_of_the_shipped_model_equal_the_uncached_model(engine_for):
    """Prompts whose two best tokens lie 0.1 apart at every step: bf16 rounds at other places in the two paths."""
    model = moe_jax.load()
    assert model.tokenizer is not None
    texts = ("And David said unto", "The words of the wise", "Now it came to pass")
    prompts = [model.tokenizer.encode(text)[:4] for text in texts]
    check_greedy(engine_for(model, **THREE), model, prompts, 12)


def test_sequences_join_and_leave_between_steps(engine_for):
    engine = engine_for(tiny_model(MAIN), **OPTIONS)
    new: dict[int, list[int]] = {}
    first = engine.prefill(PROMPTS[:3])
    take(engine, new, 2)
    engine.release(first[1])
    second = engine.prefill(PROMPTS[3:5])
    take(engine, new, 3)
    engine.release(first[0])
    third = engine.prefill([PROMPTS[1]])
    take(engine, new, 2)
    assert engine.live == (first[2], *second, *third)
    for number, prompt, steps in [(0, 0, 5), (1, 1, 2), (2, 2, 7), (3, 3, 5), (4, 4, 5), (5, 1, 2)]:
        assert new[number] == expected()[prompt][:steps], f"sequence {number}"


def test_more_prompts_than_places_wait_for_one(engine_for):
    engine = engine_for(tiny_model(MAIN), **OPTIONS)
    own = engine.prefill(PROMPTS[:2])
    found = engine.generate(PROMPTS, max_new_tokens=COUNT)
    assert found.tolist() == expected()
    assert engine.live == tuple(own)
    new: dict[int, list[int]] = {}
    take(engine, new, COUNT)
    assert list(new.values()) == expected()[:2]


def test_draws_equal_those_of_the_jitted_path(engine_for):
    options = {"max_new_tokens": COUNT, "temperature": 0.8, "top_p": 0.9, "seed": 5}
    wanted = tiny_model(MAIN).generate(PROMPTS, **options)
    engine = engine_for(tiny_model(MAIN), **OPTIONS)
    np.testing.assert_array_equal(engine.generate(PROMPTS, **options), wanted)
    assert wanted.tolist() != expected()


def test_top_k_of_one_is_greedy(engine_for):
    engine = engine_for(tiny_model(MAIN), **OPTIONS)
    new: dict[int, list[int]] = {}
    engine.prefill(PROMPTS[1:], temperature=2.0, top_k=1)
    take(engine, new, COUNT)
    assert list(new.values()) == expected()[1:]


def test_stops_end_rows_and_the_rest_is_padded(engine_for):
    stop = expected()[0][3]
    wanted = tiny_model(MAIN).generate(PROMPTS, max_new_tokens=COUNT, stop=stop)
    engine = engine_for(tiny_model(MAIN), **OPTIONS)
    np.testing.assert_array_equal(engine.generate(PROMPTS, max_new_tokens=COUNT, stop=stop), wanted)
    assert engine.stats()["sequences"] == 0


def test_end_tokens_and_limits_are_flags_on_the_device(engine_for):
    """The device ends rows by itself: their input, position and next position are negative before the host writes."""
    row = expected()[0]
    index = next(i for i in range(1, COUNT) if row[i] not in row[:i])
    engine = engine_for(ending_with(row[index]), **OPTIONS)
    ends, goes_on, short = (
        engine.prefill([PROMPTS[0]])[0],
        *engine.prefill([PROMPTS[1]]),
        *engine.prefill([PROMPTS[2]], max_new_tokens=index + 1),
    )
    assert all(row[index] not in expected()[prompt][: index + 1] for prompt in (1, 2))
    new: dict[int, list[int]] = {}
    take(engine, new, index + 1)
    assert new[ends] == row[: index + 1] and new[short] == expected()[2][: index + 1]
    assert engine.live == (goes_on,)
    geometry, block = engine._geometry, engine.memory.read("rows").view(np.int32)
    ids, position, following = (
        block[geometry.offsets[name] // 4 :][:3].tolist() for name in ("ids", "position", "following")
    )
    assert ids == [-1, new[goes_on][-1], -1]
    assert position == [-1, len(PROMPTS[1]) + index, -1] and following == [-1, position[1] + 1, -1]
    assert engine.memory.read("finished")[:3].tolist() == [STOPPED, 0, LENGTH]
    tokens = engine.memory.read("tokens")
    assert tokens[0, len(PROMPTS[0]) :][: index + 1].tolist() == new[ends]


def test_pages_are_released_and_used_again(engine_for):
    engine = engine_for(tiny_model(MAIN), **OPTIONS)
    numbers = engine.prefill(PROMPTS[:4])
    assert engine.stats()["free_pages"] == engine.stats()["free_sequences"] == 0
    engine.step()
    with pytest.raises(moe_jax.CannotServe, match=r"1 and 8, wanted at most 0 and 0; release some"):
        engine.prefill([[1, 2]])
    pages = engine._sequences[numbers[0]].pages
    engine.release(numbers[0])
    (again,) = engine.prefill([PROMPTS[4]])
    assert engine._sequences[again].pages == pages
    new: dict[int, list[int]] = {}
    take(engine, new, COUNT - 1)
    assert new[again] == expected()[4][: COUNT - 1]
    assert new[numbers[1]] == expected()[1][1:]
    for number in (*numbers[1:], again):
        engine.release(number)
    assert engine.stats()["free_pages"] == 32 and engine.stats()["free_sequences"] == 4


def test_two_engines_on_one_device(engine_for):
    one = engine_for(tiny_model(MAIN), **OPTIONS)
    two = engine_for(other_model(), **OPTIONS, runtime=one.runtime)
    new: tuple[dict[int, list[int]], ...] = ({}, {})
    for engine in (one, two):
        engine.prefill(PROMPTS[:2])
    for _ in range(4):
        for engine, into in zip((one, two), new, strict=True):
            take(engine, into, 1)
    for into, other in zip(new, (False, True), strict=True):
        assert list(into.values()) == [row[:4] for row in expected(other)[:2]]


def test_two_threads_on_one_engine(engine_for):
    engine = engine_for(tiny_model(MAIN), **OPTIONS)
    found = {}

    def run(name: str, prompts: list[list[int]]) -> None:
        found[name] = engine.generate(prompts, max_new_tokens=COUNT).tolist()

    threads = [
        threading.Thread(target=run, args=("a", PROMPTS[:2])),
        threading.Thread(target=run, args=("b", PROMPTS[2:4])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"a": expected()[:2], "b": expected()[2:4]}


def test_sequences_of_a_generation_are_its_own(engine_for):
    """Another thread neither steps them nor gives them back."""
    engine = engine_for(tiny_model(MAIN), **OPTIONS)
    generation = Generation()
    (number,) = engine._admit("test", [PROMPTS[0]], [0], 4, sampling(), owner=generation)
    assert engine.live == () and engine.step() == {}
    with pytest.raises(moe_jax.InvalidArgument, match=r"wanted one of \[\]"):
        engine.release(number)
