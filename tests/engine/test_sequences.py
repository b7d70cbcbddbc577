"""The host's books of sequences, alone."""

from __future__ import annotations

import random

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


def test_a_batch_goes_on_after_one_of_it_has_ended():
    short, long = sequence(0, 1, 3), sequence(1, 1, 6)
    batch = Batch([short, long], STOPS)
    assert [batch.take([2, 2]) for _ in range(2)] == [False, True]
    assert (short.ended, long.ended) == (True, False)
    assert batch.take([2, 9]) and long.ended
