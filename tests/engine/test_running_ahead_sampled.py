"""Steps that run ahead with sampling: tokens are those that each sequence gets alone."""

from __future__ import annotations

import pytest
from engines import MAIN, OPTIONS, PROMPTS, ending_with, other_model
from sampled_groups import LENGTH, MANNERS, Alone, Group, alone, of_call, rows
from test_running_ahead_at_random import Traffic

from moe_jax.cache import SimulatedRuntime
from moe_jax.engine import Engine
from tiny_models import tiny_model

__all__ = ["alone"]


@pytest.fixture
def engine(engine_for) -> Engine:
    engine = engine_for(tiny_model(MAIN), **OPTIONS)
    engine.warmup()
    return engine


@pytest.fixture
def group(engine, alone) -> Group:
    return Group(engine, alone)


# -- Rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", range(len(MANNERS)))
def test_each_row_draws_in_its_own_manner(group, turn):
    for row in range(4):
        group.join(row, (row + turn) % len(MANNERS))
    before = group.engine.runtime.calls["queue_read"]
    group.finish()
    assert group.engine.runtime.calls["queue_read"] - before == LENGTH - 1


def test_the_same_prompt_with_seeds_of_its_own(group):
    numbers = [group.join(0, manner) for manner in range(4)]
    group.finish()
    assert len({tuple(group.given[number]) for number in numbers}) == 4


@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("how", ["limit", "release"])
@pytest.mark.parametrize("who", [0, 1, 3])
def test_one_leaves_and_another_joins_in_its_place(group, who, how, gap):
    numbers = [group.join(row, row, 3 if row == who and how == "limit" else LENGTH) for row in range(4)]
    group.step(3)
    place = group.engine._sequences[numbers[who]].place
    group.engine.release(numbers[who])
    group.step(gap)
    joined = group.join(4, 1)
    assert group.engine._sequences[joined].place == place
    group.finish()


def test_some_are_stepped_more_often_than_others(group):
    """What was drawn for all of them is given to each when it is its turn."""
    numbers = tuple(group.join(row, row) for row in range(4))
    group.step(2)
    for some in (numbers[2:], numbers[1:2], numbers[:1], numbers[::-1], numbers[1:3], numbers[:2], numbers):
        for _ in range(2):
            for number, token in group.engine._step(some, more=True).items():
                group.given[number].append(token)
    group.check()
    group.finish()


# -- Generations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("manner", range(len(MANNERS)))
def test_a_generation_with_a_seed(engine, alone, manner, stream):
    """Row 1 leaves first; all five have four places, so the last one joins then."""
    for prompts in ([0, 1, 2], [0, 1, 2, 3, 4]):
        wanted = of_call(alone, prompts, manner)
        stop = wanted[1][3]
        for row in wanted:
            if stop in row:
                row[row.index(stop) + 1 :] = [engine._model.pad_token_id] * (LENGTH - 1 - row.index(stop))
        given = [PROMPTS[prompt] for prompt in prompts]
        found = engine.generate(given, max_new_tokens=LENGTH, stop=stop, stream=stream, **MANNERS[manner])
        found = rows(list(found)) if stream else found.tolist()
        assert found == [row[: len(found[0])] for row in wanted]


@pytest.mark.parametrize("last", ["stream", "own", "prompt"])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_stream_is_closed_half_way_beside_sequences_of_the_user(group, alone, steps, last, ahead):
    """Who used the device last has drawn a token more, or another has displaced it."""
    engine = group.engine
    group.join(3, 0)
    stream = engine.generate(PROMPTS[:2], max_new_tokens=LENGTH, stream=True, **MANNERS[2])
    found = []
    for _ in range(steps):
        found.append(next(stream))
        group.step(ahead=ahead)
    if last == "stream":
        found.append(next(stream))
    elif last == "prompt":
        group.join(4, 3)
    stream.close()
    assert rows(found) == of_call(alone, [0, 1], 2, len(found))
    group.step(ahead=ahead)
    # In the places of the two that are gone; one of them where the user has taken the fourth.
    again = engine.generate(PROMPTS[1:3], max_new_tokens=LENGTH, stream=True, **MANNERS[1])
    found = [next(again)]
    group.finish(ahead=ahead)
    assert rows([*found, *again]) == of_call(alone, [1, 2], 1)


@pytest.mark.parametrize("weights", ["held", "owned"])
@pytest.mark.parametrize("displaced", [False, True])
def test_new_weights_draw_anew_what_was_drawn_ahead(engine_for, alone, weights, displaced):
    """As an engine without graphs does, which has its weights at the same point."""
    direct = engine_for(tiny_model(MAIN), **OPTIONS, weights=weights, graphs="off", runtime=SimulatedRuntime(1 << 25))
    engine = engine_for(tiny_model(MAIN), **OPTIONS, weights=weights)
    engine.warmup()
    found: list[list[dict[int, int]]] = []
    for each in (direct, engine):
        for row in range(3):
            each.prefill(PROMPTS[row : row + 1], max_new_tokens=LENGTH, **MANNERS[row])
        found.append([])
        numbers = each.live
        for step in range(LENGTH):
            if step == 3:
                if displaced:
                    each.prefill(PROMPTS[4:5], max_new_tokens=LENGTH, **MANNERS[3])
                each.update_weights(other_model())
            found[-1].append(each._step(numbers, more=True))
    assert found[1] == found[0]
    assert [*found[0][2].values()] == [alone(row, row)[2] for row in range(3)]
    assert [*found[0][3].values()] != [alone(row, row)[3] for row in range(3)]


class SampledTraffic(Traffic):
    """Where each sequence draws in a manner of its own."""

    def __init__(self, engine: Engine, end: int, seed: int, alone: Alone):
        super().__init__(engine, end, seed)
        self._alone = alone

    def join(self) -> None:
        if not self.engine.stats()["free_sequences"]:
            return
        prompt, manner = self.rng.randrange(len(PROMPTS)), self.rng.randrange(len(MANNERS))
        count = self.rng.randint(1, LENGTH)
        options = {"max_new_tokens": count, **MANNERS[manner]}
        (number,) = self.engine.prefill(PROMPTS[prompt : prompt + 1], **options)
        row = self._alone(prompt, manner)[:count]
        self.wanted[number] = row[: row.index(self.end) + 1] if self.end in row else row
        self.given[number], self.prompts[number] = [], len(PROMPTS[prompt])


def test_whatever_is_stepped_how_draws_are_those_of_the_sequence_alone(engine_for, alone):
    end = alone(0, 0)[6]
    engine = engine_for(ending_with(end), **OPTIONS, weights="owned")
    engine.warmup()
    for seed in range(8):
        traffic = SampledTraffic(engine, end, seed, alone)
        for _ in range(60):
            traffic.event()
        for number in list(traffic.given):
            engine.release(number)
