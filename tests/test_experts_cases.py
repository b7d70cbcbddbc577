"""Tiles that tuning tries: every one of them makes a launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_jax.bench.cases import NAMED

ROOT = Path(__file__).parents[1]


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import experts_cases

    return experts_cases


@pytest.mark.parametrize("name", NAMED)
def test_every_tile_of_one_row_makes_a_launch(listed, name):
    """The kernel of its own is searched where the heuristic takes it, with the arithmetic that it has."""
    planned = listed.searched(NAMED[name], 1)
    names = [spec.name for one in planned for spec in one.specs()]
    assert len(names) == len(planned) and set(names) <= {"expert_ffn", "expert_ffn_row"}
    rings = {(one.tile.ring, one.tile.ahead) for one in planned if one.tile.ring}
    assert [name == "expert_ffn_row" for name in names] == [bool(one.tile.ring) for one in planned]
    if listed.heuristic(NAMED[name], 1).ring:
        assert rings == {(ring, ahead) for ring in range(6, 10) for ahead in range(4, ring)}
        assert any(not one.tile.ring for one in planned)
    else:
        assert not rings
    assert {listed.heuristic(NAMED[n], 1).ring for n in NAMED} == {0, 8}
