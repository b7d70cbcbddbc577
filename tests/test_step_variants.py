"""The script that compares a step's tiles and schedules, on a simulated device."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("cuda.core")

from benchmarks import step_variants
from moe_jax.engine import step

SIMULATED = ["--shape", "tiny", "--layers", "2", "--context", "9", "--graphs", "simulate"]


def test_variants_are_compared_on_one_engine_and_leave_nothing_behind(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(step_variants, "REPLAYS", 1)
    monkeypatch.setattr(step_variants, "ROUNDS", 3)
    before = step.linear_spec, step.decode_attention_specs, step.tuned_tile_for
    variants = ["attention.linger=0,attention.programs=5", "attention.run=1", "qkv.split=4,qkv.early=False"]
    path = tmp_path / "report.json"
    step_variants.main([*variants, *SIMULATED, "--rows", "2", "--json", str(path)])
    found = json.loads(path.read_text())["rows"]["2"]
    assert list(found) == ["as it is", *variants]
    assert all(len(cell["rounds_us"]) == 2 and cell["us"] > 0 for cell in found.values())
    # Keys are cut by the reference as by the kernel; everything else is the schedule's.
    assert [cell["other_bits"] for cell in found.values()] == [False, False, True, False]
    assert "attention.run=1" in capsys.readouterr().out
    assert (step.linear_spec, step.decode_attention_specs, step.tuned_tile_for) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["attention"], "got 'attention', wanted part.field=value with a part of attention, experts"),
        (["gate.block_k=1"], "got 'gate.block_k=1'"),
        (["out.block_k=many"], "got 'many' for out.block_k, wanted a number"),
        (["--build"], "--build wants --cubins FOLDER"),
    ],
)
def test_what_it_refuses(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        step_variants.main(words)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_a_field_that_a_part_does_not_have_is_named():
    with step_variants.applied({"attention": {"runz": 1}}, 64, 256), pytest.raises(TypeError, match="runz"):
        step.decode_attention_specs(1, 4, 2, 16, dtype="float16", capability=90)
