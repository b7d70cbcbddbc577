"""The script that measures refused reuse and the first token, without a GPU: on a simulated device, and with processes
that only sleep."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import engine_costs, step_variants
from moe_jax.cache import SimulatedRuntime
from moe_jax.cli import measuring
from moe_jax.errors import InvalidArgument

ROOT = Path(__file__).parents[1]

STEPS = {
    "Engine.update_weights": "direct (weights moved)",
    "array replaced in the table": "direct (weights moved)",
    "manifest accepted again": "direct (first call)",
    "owner generation advanced": "direct (first call)",
    "admission closed": "direct (admission closed)",
}


@pytest.fixture
def script(monkeypatch, capsys, tmp_path):
    """Runs the script in this process; gives exit code, report and stdout."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    def run(*words: str) -> tuple[int, dict, str]:
        path = tmp_path / "report.json"
        with pytest.raises(SystemExit) as stopped:
            engine_costs.main([*words, "--graphs", "simulate", "--json", str(path)])
        return int(stopped.value.code or 0), json.loads(path.read_text()), capsys.readouterr().out

    return run


def test_device_and_runtime_are_chosen_in_one_place(monkeypatch, tmp_path):
    for chosen in ("measured_device", "runtime_of"):
        assert getattr(engine_costs, chosen) is getattr(step_variants, chosen) is getattr(measuring, chosen)
    device, head = measuring.measured_device("here", simulated=True)
    assert (device.platform, head["device"], head["capability"]) == ("cpu", "cpu", "8.0")
    assert isinstance(measuring.runtime_of(device, tmp_path, simulated=True), SimulatedRuntime)
    pytest.importorskip("cuda.core")
    monkeypatch.setattr("moe_jax.cache.cuda_runtime.CudaRuntime", lambda device, *, cubins: (device, cubins))
    assert measuring.runtime_of(device, tmp_path, simulated=False) == (device, tmp_path)
    with pytest.raises(engine_costs.CannotServe, match=r"here: no (CUDA|usable) GPU"):
        measuring.measured_device("here", simulated=False)


def test_what_is_simulated_needs_no_cuda_and_has_a_tiny_shape(monkeypatch, tmp_path):
    """In a process without the CUDA packages, with the options that a reader tries first."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    path = tmp_path / "report.json"
    hidden = "import sys; sys.modules['cuda'] = None; from benchmarks import engine_costs; engine_costs.REPEATS = 3;"
    words = ["--part", "refused", "--graphs", "simulate", "--layers", "1", "--context", "9", "--json", str(path)]
    done = subprocess.run(python(f"{hidden} engine_costs.main({words!r})"), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert (report["shape"], report["stopped"], len(report["refused"])) == ("tiny", None, 5)


def test_a_shape_that_is_unknown_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(engine_costs, "first_token", lambda *given: pytest.fail("measured"))
    monkeypatch.setattr(engine_costs, "measured_device", lambda *given, **options: pytest.fail("looked for a device"))
    with pytest.raises(InvalidArgument, match="--shape: shape: got 'olmo', wanted qwen3-30b-a3b, mixtral-8x7b"):
        engine_costs.main(["--shape", "olmo"])


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_every_refusal_is_measured_against_the_direct_step(script, monkeypatch):
    monkeypatch.setattr(engine_costs, "REPEATS", 3)
    code, report, out = script("--part", "refused", "--shape", "tiny", "--layers", "1", "--context", "9")
    assert (code, report["stopped"], report["layers"]) == (0, None, 1)
    assert {"device", "versions", "date"} <= set(report)
    replayed = report["replayed"]
    assert (replayed["step"], replayed["repeats"]) == ("replay", 3)
    assert {figures["case"]: figures["step"] for figures in report["refused"]} == STEPS
    for figures in (replayed, *report["refused"]):
        assert min(figures[name] for name in ("us", "host_us", "direct_us", "direct_host_us", "change_us")) > 0
        assert set(figures["spread"]) < set(figures)
    for figures in report["refused"]:
        assert figures["explained"][0].startswith(figures["step"].rstrip(")"))
        assert figures["allowed_us"] == replayed["host_us"]
        assert figures["holds"] == (figures["excess_us"] <= figures["allowed_us"])
    # No step destroys what it refuses.
    assert not any(figures["destroy_us"] for figures in report["refused"])
    assert len(out[out.index("| what happened") :].splitlines()) == 2 + 6


def test_a_run_whose_time_is_over_says_so_and_leaves_what_it_had(script):
    code, report, out = script(
        "--part", "refused", "--shape", "tiny", "--layers", "1", "--context", "9", "--time-limit", "0"
    )
    assert code == 1
    assert "wanted a longer --time-limit" in report["stopped"]
    assert report["stopped"] in out


def test_two_processes_share_a_cache_and_their_first_byte_is_timed(script, monkeypatch):
    cache = "import os, pathlib, sys, time; cache = pathlib.Path(os.environ['TRITON_CACHE_DIR']) / 'kernel';"
    text = "time.sleep(0 if cache.exists() else 0.5); cache.touch(); print('a', flush=True); time.sleep(0.2);"
    monkeypatch.setattr(engine_costs, "command", lambda graphs: python(cache + text + "print('b', file=sys.stderr)"))
    code, report, out = script("--part", "first-token")
    cold, warm = (report["first_token"][name] for name in ("cold", "warm"))
    assert code == 0
    assert cold["first_byte_s"] > 0.5
    assert warm["first_byte_s"] < cold["first_byte_s"]
    assert all(found["end_s"] > found["first_byte_s"] for found in (cold, warm))
    assert warm["summary"] == ["b"]
    assert report["first_token"]["holds"] is True
    assert "refused" not in report
    assert out.splitlines()[-2].startswith("first token, cold: ")


@pytest.mark.parametrize(
    ("code", "limit", "said"),
    [
        ("import sys; print('a'); sys.exit('no GPU')", 60.0, "exit code 1 .*no GPU"),
        ("pass", 60.0, "exit code 0"),
        ("import time; time.sleep(60)", 0.2, "exit code -9 .*wanted text within 0 s"),
    ],
)
def test_a_process_that_fails_is_no_measurement(code, limit, said):
    with pytest.raises(engine_costs.CannotServe, match=said):
        engine_costs.one_process(python(code), {}, limit)


def test_the_command_is_the_users():
    _, *words = engine_costs.command("on")
    assert words == ["-m", "moe_jax", "decode", "--device", "cuda", "--graphs", "on", "--max-new-tokens", "16"]


@pytest.mark.slow
def test_the_shipped_model_writes_text_through_the_engine(script, monkeypatch):
    monkeypatch.setattr(engine_costs, "NEW_TOKENS", 2)
    code, report, _ = script("--part", "first-token")
    assert code == 0
    assert any("decoded by: engine" in line for line in report["first_token"]["warm"]["summary"])
