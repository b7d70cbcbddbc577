"""The host's books of sequences, alone."""

from __future__ import annotations

import random

import pytest

from moe_jax.engine.sequences import Batch, Sequence
from moe_jax.sampling import sampling

STOPS = frozenset({7, 9})
GREEDY = sampling(0.0, 1.0, 0)


def sequence(number: int, held: int, limit: int) -> Sequence:
    return Sequence(
        number=number, place=number, pages=(), tokens=[1] * held, limit=limit, sampling=GREEDY, top_k=0,
        draw=0, inner=False,
    )  # fmt: skip


def test_a_batch_ends_each_sequence_with_the_token_that_a_look_at_every_one_would_end_it_with():
    rng = random.Random(0)
    for _ in range(300):
        sizes = [(rng.randint(1, 4), rng.randint(5, 12)) for _ in range(rng.randint(1, 5))]
        together = [sequence(n, *size) for n, size in enumerate(sizes)]
        alone = [sequence(n, *size) for n, size in enumerate(sizes)]
        batch = Batch(together, STOPS)
        assert batch.numbers == tuple(range(len(sizes)))
        while True:
            tokens = [rng.randint(0, 40) for _ in sizes]
            ended = batch.take(tokens)
            for one, token in zip(alone, tokens, strict=True):
                one.tokens.append(token)
                one.ended = token in STOPS or len(one.tokens) >= one.limit
            assert together == alone
            assert ended == any(one.ended for one in alone)
            if ended:
                break


@pytest.mark.parametrize("appended", range(4))
def test_what_was_taken_only_in_part_is_taken_back(appended):
    together = [sequence(n, 2, 4) for n in range(3)]
    batch = Batch(together, STOPS)
    assert not batch.take([2, 3, 4])
    for one in together[:appended]:
        one.tokens.append(7)
        one.ended = True
    batch.return_to(1)
    assert [one.tokens for one in together] == [[1, 1, 2], [1, 1, 3], [1, 1, 4]]
    assert not any(one.ended for one in together)
    assert batch.take([2, 2, 2])
