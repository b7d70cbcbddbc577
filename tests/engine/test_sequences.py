"""The host's books of sequences, alone."""

from __future__ import annotations

import itertools
import random

import pytest

from moe_jax.engine.sequences import SOME, Batch, Places, Sequence
from moe_jax.sampling import sampling

STOPS = frozenset({7, 9})
GREEDY = sampling(0.0, 1.0, 0)


def sequence(number: int, length: int, limit: int, newest: int = 1, pages: tuple[int, ...] = ()) -> Sequence:
    return Sequence(
        number=number, place=number, pages=pages, length=length, newest=newest, limit=limit, sampling=GREEDY, top_k=0,
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


def test_free_places_and_pages_are_those_that_no_sequence_has():
    rng = random.Random(1)
    for _ in range(200):
        count, most = rng.choice([1, 7, 8, 9, 64, 2 * SOME, 2 * SOME + 3]), rng.randint(1, 6)
        order = rng.sample(range(count), count)
        cuts = sorted(rng.randint(0, count) for _ in range(2 * most))
        parts = [tuple(order[begin:end]) for begin, end in itertools.pairwise(cuts)]
        held = [sequence(place, 1, 9, pages=part) for place, part in enumerate(parts) if place % 2 and part]
        places, pages = Places(2 * most, count).free(held)
        taken = {page for one in held for page in one.pages}
        assert list(places) == sorted({*range(2 * most)} - {one.place for one in held})
        found = list(pages)
        assert found == sorted({*range(count)} - taken) and {type(page) for page in found} <= {int}


class Counted(tuple[int, ...]):
    """Knows how often it was looked through."""

    looks = 0

    def __iter__(self):
        Counted.looks += 1
        return super().__iter__()


def test_pages_of_others_are_not_looked_through_at_each_admission():
    """There may be thousands, and a sequence that joins takes few."""
    held = [sequence(n, 1, 9, pages=Counted(range(100 * n, 100 * n + 100))) for n in range(64)]
    books = Places(65, 6500)
    looks = []
    for _ in range(3):
        _, pages = books.free(held)
        assert next(pages) == 6400
        looks.append(Counted.looks)
    assert looks[0] and set(looks) == {looks[0]}
