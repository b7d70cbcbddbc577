"""Trials that outlive a search."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from moe_jax.bench.journal import Journal
from moe_jax.bench.search import search
from moe_jax.bench.timing import Clock


@dataclass(frozen=True)
class Tile:
    size: int


class Bench:
    """A measurement that is killed at one size, and says what it was asked for."""

    def __init__(self, killed_at: int = 0):
        self.killed_at, self.asked = killed_at, []

    def __call__(self, tile: Tile) -> tuple[float, float]:
        self.asked.append(tile.size)
        if tile.size == self.killed_at:
            raise KeyboardInterrupt
        return 100.0 / tile.size, 0.5


TILES = [Tile(n) for n in (1, 2, 3, 4)]


def run(path: Path, bench: Bench, tokens: int = 16, **conditions: str):
    measure = Journal(path, **({"device": "a", "source": "b"} | conditions)).remember(bench, op="x", tokens=tokens)
    return search(TILES, measure, Clock(60))


def test_C112_a_search_that_was_killed_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path, first, second = tmp_path / "trials.jsonl", Bench(killed_at=3), Bench()
    with pytest.raises(KeyboardInterrupt):
        run(path, first)
    path.write_text(path.read_text() + '{"key": "cut sho')
    outcome = run(path, second)
    assert (first.asked, second.asked) == ([1, 2, 3], [3, 4])
    assert [trial.us for trial in outcome.trials] == [100.0, 50.0, 100 / 3, 25.0]
    assert outcome.best is not None and outcome.best.candidate == Tile(4)
    third = Bench()
    assert run(path, third) == outcome and not third.asked


@pytest.mark.parametrize("changed", [{"device": "c"}, {"source": "c"}, {"tokens": 17}])
def test_what_was_measured_under_other_conditions_is_measured_again(tmp_path: Path, changed: dict[str, str]) -> None:
    path, again = tmp_path / "trials.jsonl", Bench()
    run(path, Bench())
    run(path, again, **changed)
    assert again.asked == [1, 2, 3, 4]


def test_a_fault_is_tried_again(tmp_path: Path) -> None:
    def faulty(tile: Tile) -> tuple[float, float]:
        raise ValueError("does not fit")

    assert len(search(TILES, Journal(tmp_path / "t").remember(faulty), Clock(60)).faults) == 4
    bench = Bench()
    search(TILES, Journal(tmp_path / "t").remember(bench), Clock(60))
    assert bench.asked == [1, 2, 3, 4]


def test_C112_a_search_ends_with_its_time(tmp_path: Path) -> None:
    def slow(tile: Tile) -> tuple[float, float]:
        time.sleep(0.05)
        return 1.0, 0.1

    outcome = search([Tile(n) for n in range(1000)], Journal(None).remember(slow), Clock(0.2))
    assert 1 <= len(outcome.trials) <= 5 and not outcome.complete
