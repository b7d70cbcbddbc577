"""The script that compares a step's tiles and schedules, on a simulated device."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("cuda.core")

from benchmarks import step_variants
from moe_jax.cache import SimulatedRuntime
from moe_jax.engine import step
from moe_jax.pallas_kernels.linear import linear_spec

SIMULATED = ["--shape", "tiny", "--layers", "2", "--context", "9", "--graphs", "simulate"]


def test_variants_are_compared_on_one_engine_and_leave_nothing_behind(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(step_variants, "REPLAYS", 1)
    monkeypatch.setattr(step_variants, "ROUNDS", 3)
    before = step.linear_spec, step.decode_attention_specs, step.tuned_tile_for
    variants = ["attention.linger=0,attention.programs=5", "attention.at_once=1", "qkv.split=4,qkv.early=False"]
    path = tmp_path / "report.json"
    step_variants.main([*variants, *SIMULATED, "--rows", "2", "--json", str(path)])
    report = json.loads(path.read_text())
    assert {"jax", "jaxlib", "triton", "cuda-core", "cuda-bindings", "moe-jax"} <= set(report["versions"])
    assert {"driver", "date", "capability", "dtype"} <= set(report)
    assert (report["device"], report["compiler"]) == ("cpu", "simulated") and report["layers"] == 2
    found = report["rows"]["2"]
    assert list(found) == ["as it is", *variants]
    assert all(len(cell["rounds_us"]) == 2 and cell["us"] > 0 for cell in found.values())
    assert [cell["other_bits"] for cell in found.values()] == [False, False, False, False]
    assert "attention.at_once=1" in capsys.readouterr().out
    assert (step.linear_spec, step.decode_attention_specs, step.tuned_tile_for) == before


def test_other_bits_are_told(monkeypatch, capsys):
    monkeypatch.setattr(step_variants, "REPLAYS", 1)
    monkeypatch.setattr(step_variants, "ROUNDS", 2)

    def linear(rows, inputs, outputs, **options):
        made = linear_spec(rows, inputs, outputs, **options)
        twice = options.get("tile") and options["tile"].split == 4
        reference = made.reference
        return dataclasses.replace(made, reference=lambda *given: 2 * reference(*given)) if twice else made

    monkeypatch.setattr(step, "linear_spec", linear)
    step_variants.main(["qkv.early=False", "qkv.split=4,qkv.early=False", *SIMULATED])
    lines = [line for line in capsys.readouterr().out.splitlines() if "µs" in line]
    assert ["other bits" in line for line in lines] == [False, False, True]


def test_what_is_built_is_all_that_is_measured(monkeypatch, tmp_path):
    """The engine and the variants find every kernel in the folder."""
    monkeypatch.syspath_prepend(Path(step_variants.__file__).parent)
    built, loaded, load = set(), set(), SimulatedRuntime.load
    monkeypatch.setattr(step_variants.compiled, "load", lambda folder, spec, capability: built.add(spec.key))
    monkeypatch.setattr(SimulatedRuntime, "load", lambda runtime, spec: loaded.add(spec.key) or load(runtime, spec))
    monkeypatch.setattr(step_variants, "REPLAYS", 1)
    monkeypatch.setattr(step_variants, "ROUNDS", 2)
    words = ["attention.at_once=1", *SIMULATED, "--rows", "1,2"]
    of_device = ["--device", SimulatedRuntime.device_kind, "--capability", str(SimulatedRuntime.capability)]
    step_variants.main([*words, *of_device, "--cubins", str(tmp_path), "--build"])
    assert not loaded
    step_variants.main(words)
    assert loaded and loaded <= built


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["attention"], "got 'attention', wanted part.field=value with a part of attention, experts"),
        (["gate.block_k=1"], "got 'gate.block_k=1'"),
        (["out.block_k=many"], "got 'many' for out.block_k, wanted a number"),
        (["--build"], "--build wants --cubins FOLDER"),
        (["--json", "/no/such/folder/report.json"], "--json: folder: got /no/such/folder/report.json"),
    ],
)
def test_what_it_refuses(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        step_variants.main(words)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_a_field_that_a_part_does_not_have_is_named():
    with step_variants.applied({"attention": {"runz": 1}}, 64, 256), pytest.raises(TypeError, match="runz"):
        step.decode_attention_specs(1, 4, 2, 16, dtype="float16", capability=90)
