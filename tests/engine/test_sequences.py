"""The host's books of sequences, alone."""

from __future__ import annotations

import random

import pytest

from moe_jax.engine.sequences import Batch, Sequence
from moe_jax.sampling import sampling

STOPS = frozenset({7, 9})
GREEDY = sampling(0.0, 1.0, 0)


def sequence(number: int, length: int, limit: int, newest: int = 1) -> Sequence:
    return Sequence(
        number=number, place=number, pages=(), length=length, newest=newest, limit=limit, sampling=GREEDY, top_k=0,
        draw=0,
    )  # fmt: skip


def test_a_batch_ends_each_sequence_with_the_token_that_a_look_at_every_one_would_end_it_with():
    rng = random.Random(0)
    for _ in range(300):
        sizes = [(rng.randint(1, 4), rng.randint(5, 12), rng.randint(1, 9)) for _ in range(rng.randint(1, 5))]
        together = [sequence(n, *size) for n, size in enumerate(sizes)]
        alone = [sequence(n, *size) for n, size in enumerate(sizes)]
        batch = Batch(together, STOPS)
        assert batch.numbers == tuple(range(len(sizes)))
        while True:
            tokens = [rng.randint(0, 40) for _ in sizes]
            ended = batch.take(tokens)
            for one, token in zip(alone, tokens, strict=True):
                one.length, one.newest = one.length + 1, token
                one.ended = token in STOPS or one.length >= one.limit
            assert ended == any(one.ended for one in alone)
            if ended or rng.random() < 0.5:
                batch.settle()
                assert together == alone
            if ended:
                break


def test_a_step_touches_no_sequence():
    together = [sequence(n, 2, 5) for n in range(3)]
    batch = Batch(together, STOPS)
    assert not batch.take([2, 3, 4])
    assert together == [sequence(n, 2, 5) for n in range(3)]


@pytest.mark.parametrize("steps", range(3))
@pytest.mark.parametrize("written", range(4))
def test_steps_are_undone_also_where_they_were_written_in_part(steps, written):
    # 7 and 9 end a sequence, but not as the last tokens of prompts.
    together = [sequence(n, 2, 5, newest) for n, newest in enumerate((7, 9, 1))]
    batch = Batch(together, STOPS)
    for step in range(steps):
        assert not batch.take([2 + step, 3 + step, 4 + step])
    before = batch.taken
    assert batch.take([2, 7, 9])
    for one in together[:written]:
        one.length, one.newest, one.ended = 3 + steps, 9, True
    batch.taken = before
    for _ in range(2):
        batch.settle()
        newest = [(7, 9, 1), (2, 3, 4), (3, 4, 5)][steps]
        assert together == [sequence(n, 2 + steps, 5, token) for n, token in enumerate(newest)]
    assert batch.take([2, 2, 2]) == (steps == 2)
