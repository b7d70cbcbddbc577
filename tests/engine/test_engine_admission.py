"""Places and pages are free as soon as no sequence has them, whatever interrupts those that take and give them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from engines import COUNT, MAIN, OPTIONS, PROMPTS, expected, last

from interrupts import interrupted, named, places
from moe_jax.engine import Engine, generating
from moe_jax.engine.prompts import Prompts
from moe_jax.engine.sequences import Generation, Places, Sequence, zeros
from moe_jax.sampling import sampling
from tiny_models import tiny_model

SECONDS = 30.0  # after which who still waits will wait for ever
FEW = 3  # tokens of each sequence


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One for all tests: nothing that they do leaves anything behind. Prompts of six tokens are long ones."""
    with Engine(tiny_model(MAIN), **OPTIONS, long_prompts=6, graphs="simulate") as engine:
        engine.warmup([len(prompt) for prompt in PROMPTS])
        yield engine


def taken(engine: Engine) -> tuple[int, int, int]:
    """Sequences, places and pages that are not free."""
    stats = engine.stats()
    places, pages = (
        stats[whole] - stats[f"free_{part}"] for part, whole in (("sequences", "max_sequences"), ("pages",) * 2)
    )
    return stats["sequences"], places, pages


def works(engine: Engine) -> None:
    """All places are there, and give the tokens that they should."""
    assert engine.live == () and taken(engine) == (0, 0, 0)
    assert engine.generate(PROMPTS[:4], max_new_tokens=FEW).tolist() == [row[:FEW] for row in expected()[:4]]
    assert taken(engine) == (0, 0, 0) and not engine._stepper._drawn and not engine._stepper._doubtful


def prefill(engine: Engine) -> list[int]:
    return engine.prefill(PROMPTS[:3], max_new_tokens=FEW)


def leave(engine: Engine) -> None:
    """A stream whose next step is under way."""
    stream = engine.generate(PROMPTS[:2], max_new_tokens=FEW, stream=True)
    next(stream)
    stream.close()


def generate_in_turns(engine: Engine) -> None:
    engine.generate(PROMPTS, max_new_tokens=2)


ADMISSION = (
    *(Engine._admit, Engine._read_prompt, Engine._held, Places.counts, Places.free, Sequence.__init__),
    *(zeros, Sequence.bits.func),
)
LEAVING = (generating.columns, Engine._forget_all, Engine._forget, Sequence.belongs_to)


@pytest.mark.parametrize(("function", "line"), places(*ADMISSION, Prompts.read), ids=named)
def test_a_prefill_that_was_interrupted_takes_nothing(engine, function, line):
    if interrupted(function, line, lambda: prefill(engine)):
        assert engine.live == ()
    for number in engine.live:
        engine.release(number)
    works(engine)


@pytest.mark.parametrize("call", [generate_in_turns, leave], ids=named)
@pytest.mark.parametrize(("function", "line"), places(*ADMISSION, *LEAVING), ids=named)
def test_a_generation_that_was_interrupted_leaves_nothing(engine, call, function, line):
    interrupted(function, line, lambda: call(engine))
    works(engine)


@pytest.mark.parametrize(("function", "line"), places(Engine.release, Engine._forget), ids=named)
def test_a_release_that_was_interrupted_has_happened_or_not(engine, function, line):
    first, second, third = prefill(engine)
    # The others' tokens have been drawn, and wait for them.
    for numbers in ((first, second, third), (first, second)):
        engine._step(numbers, more=True)
    assert third in engine._stepper._drawn
    if not interrupted(function, line, lambda: engine.release(third)):
        assert third not in engine.live
    live = engine.live
    assert taken(engine)[:2] == (len(live), len(live)) and set(live) - {third} == {first, second}
    found = [engine.step() for _ in range(FEW)]
    assert [tokens[second] for tokens in found if second in tokens] == expected()[1][2:FEW]
    assert [tokens[third] for tokens in found if third in tokens] == (expected()[2][1:FEW] if third in live else [])
    for number in {first, second} | (set(live) & {third}):
        engine.release(number)
    works(engine)


@pytest.mark.parametrize(("function", "line"), places(Engine.step, Engine._step), ids=named)
def test_a_step_that_was_interrupted_steps_no_sequence_that_has_ended(engine, function, line):
    (ends,) = engine.prefill(PROMPTS[:1], max_new_tokens=1)
    (goes_on,) = engine.prefill(PROMPTS[1:2], max_new_tokens=FEW)
    interrupted(function, line, engine.step)
    for _ in range(FEW):
        engine.step()
    assert engine.live == () and taken(engine)[0] == 2
    assert [engine._sequences[n].length for n in (ends, goes_on)] == [len(PROMPTS[0]) + 1, len(PROMPTS[1]) + FEW]
    for number in (ends, goes_on):
        engine.release(number)
    works(engine)


def test_the_sequences_of_a_generation_go_with_it(engine):
    """Also where nothing of it runs any more at its end."""
    generation = Generation()
    (number,) = engine._admit("test", PROMPTS[:1], [0], FEW, sampling(), owner=generation)
    assert taken(engine)[:2] == (1, 1) and number in engine._sequences
    del generation
    assert taken(engine) == (0, 0, 0) and number not in engine._sequences
    works(engine)


def test_a_prompt_that_is_read_has_no_place_yet(engine, monkeypatch):
    """So nobody steps it, and there is nothing to give back if it fails."""
    seen, real = [], engine._read_prompt
    monkeypatch.setattr(engine, "_read_prompt", lambda *given: (seen.append(taken(engine)), real(*given)))
    numbers = prefill(engine)
    monkeypatch.undo()
    assert seen == [(0, 0, 0)] * 3
    assert taken(engine)[:2] == (3, 3)
    for number in numbers:
        engine.release(number)
    works(engine)


def test_a_stream_that_is_left_waits_for_no_step_of_others(engine):
    """It may be collected in a thread that has what the other one waits for, such as the lock of another engine."""
    stream = engine.generate(PROMPTS[:2], max_new_tokens=COUNT, stream=True)
    next(stream)
    leaving = threading.Thread(target=stream.close, daemon=True)
    with engine._lock:
        leaving.start()
        leaving.join(SECONDS)
        assert not leaving.is_alive()
        assert taken(engine) == (0, 0, 0)
    works(engine)


def test_what_a_released_sequence_has_drawn_is_no_more(engine):
    """Where it was released between the lines that keep its tokens."""
    first, second, third = prefill(engine)
    engine._step((first, second, third), more=True)
    engine._step((first, second), more=True)
    engine._sequences.pop(third)
    engine._live = None
    assert third in engine._stepper._drawn
    engine.step()
    assert third not in engine._stepper._drawn and last(engine).kind == "replay"
    for number in (first, second):
        engine.release(number)
    works(engine)


def test_places_are_those_that_no_sequence_has_the_lowest_first():
    def held(place: int, *pages: int) -> Sequence:
        return Sequence(
            number=place, place=place, pages=pages, length=1, newest=0, limit=9, sampling=sampling(), top_k=0, draw=0
        )

    books = Places(4, 8)
    for sequences, rows, pages in (
        ([], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]),
        ([held(1, 0, 3)], [0, 2, 3], [1, 2, 4, 5, 6, 7]),
        ([held(3, 7), held(0, 1, 2), held(1), held(2, 0, 3, 4, 5, 6)], [], []),
    ):
        free: list[Callable[..., object]] = [*map(list, books.free(sequences))]
        assert free == [rows, pages] and books.counts(sequences) == (len(rows), len(pages))
