"""What the bench prints, draws and writes, and the command that does it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from rich.console import Console

from bench_doubles import FakeTimer
from moe_jax import cli
from moe_jax.bench import cases, plot, table
from moe_jax.bench.cases import Shape
from moe_jax.cli import bench_kernels
from moe_jax.errors import CannotServe, InvalidArgument

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/h200-kernels.json"


def cell(shape, tokens, us, floor, peers, *, jit=None, note=None, read=4.6, **more) -> dict:
    """A cell whose raw launches took ``us``, and whose back ends inside jit, by name, what ``jit`` says."""
    flops = cases.flops(Shape(*shape), tokens)
    ours = ({"device graph": us} if us else {}) | {f"jit: {name}": time for name, time in (jit or {}).items()}
    best = min(ours.values(), default=None)
    made = {"op": "ffn", "shape": list(shape), "tokens": tokens, "us": best, "spread": best and 0.26, "floor_us": floor}
    made |= {"ratio": best and best / floor, "tflops": best and flops / best / 1e6, "builder": None, "peers": peers}
    made["backend"] = next((name for name, time in ours.items() if time == best), None)
    measured = {**ours, **peers}.items()
    made["measured"] = [
        {"name": name, "us": time, "spread": 0.26, "builder": None, "note": note if name.startswith("jit") else None}
        for name, time in measured
    ]
    made |= {"flops": flops, "bytes": floor * 4.6e6, "declined": {}}
    return made | {"ceilings": {"read_tbs": read, "matmul_tflops": 800.0}} | more


QWEN = (2048, 768, 128, 8)
REPORT = {
    "device": "NVIDIA H200",
    "capability": "9.0",
    "driver": "580.1",
    "versions": {"jax": "0.11.2", "triton": "3.6.0"},
    "date": "2026-12-01",
    "dtype": "bfloat16",
    "read_tbs": 4.6,
    "matmul_tflops": 800.0,
    "seed": 1,
    "stopped": None,
    "cells": [
        cell(QWEN, 1, 20.5, 16.4, {"two-launch Triton": 26.75, "jax.lax.ragged_dot": 312.0}, jit={"triton": 26.0}),
        cell(QWEN, 64, 280.0, 260.0, {"two-launch Triton": 279.5}),
        cell(QWEN, 65, 280.0, 260.0, {"two-launch Triton": 290.0}, jit={"mosaic": 334.2, "triton": 306.0}, note="late"),
        cell(QWEN, 4096, 690.0, 386.5, {}, jit={"mosaic": 500.0}),
        cell((64, 32, 8, 2), 4096, None, 10.0, {"torch._grouped_mm": 40.0}),
    ],
}
MARKDOWN = """\
| H, I, E, k | rows | floor µs | engine µs | in jit µs | ÷ floor | TFLOP/s | fastest peer µs | times as fast |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
| 2048, 768, 128, 8 | 1 | 16.4 | 20.5 ± 0.3 | 26.0 ± 0.3 (triton) | 1.25 | 4 | two-launch Triton 26.8 | 1.305 |
| 2048, 768, 128, 8 | 64 | 260.0 | 280.0 ± 0.3 | – | 1.08 | 17 | two-launch Triton 279.5 | 0.998 |
| 2048, 768, 128, 8 | 65 | 260.0 | – | 306.0 ± 0.3 (triton) † | 1.18 | 16 | two-launch Triton 290.0 | 0.948 |
| 2048, 768, 128, 8 | 4,096 | 386.5 | – | 500.0 ± 0.3 (mosaic) | 1.29 | 618 | – | – |
| 64, 32, 8, 2 | 4,096 | 10.0 | – | – | – | – | torch._grouped_mm 40.0 | – |

Measured on an NVIDIA H200 in one run, 2026-12-01, bf16: streaming read 4.60 TB/s, 8192³ matmul 800 TFLOP/s. \
jax 0.11.2, triton 3.6.0. †: late."""


def test_the_markdown_of_a_report():
    """What is told of a cell is of the faster way that a user can have: no engine launches more than 64 rows."""
    assert table.markdown(REPORT) == MARKDOWN


def test_the_table_knows_what_a_report_calls_our_contenders():
    pytest.importorskip("triton")
    from moe_jax.bench import contenders, launches

    assert launches.contender(None, 90).name == table.ENGINE
    assert all(member.name.startswith(table.JIT) for member in contenders.back_ends())


def test_facts_count_the_runs_and_name_other_devices():
    told = table.facts(REPORT | {"runs": [REPORT, REPORT | {"read_tbs": 4.5}]})
    assert told.startswith("Measured on an NVIDIA H200 in 2 runs, 2026-12-01, bf16: streaming read 4.50 to 4.60 TB/s")
    assert table.facts(REPORT | {"device": "Tesla T4", "cells": []}).startswith("Measured on a Tesla T4 in one run")


def test_other_operations_get_a_table_of_their_own():
    other = {"op": "route", "shape": [2048, 128, 8], "tokens": 4, "us": 4.5, "floor_us": 1.5}
    text = table.markdown({**REPORT, "cells": [*REPORT["cells"], other]})
    assert "| route | 2048 × 128 × 8 | 4 | 1.5 | 4.5 | 3.00 |" in text
    assert text.replace("| route", "").count("| 2048, 768, 128, 8 |") == 4


def test_the_table_stands_between_the_markers():
    text = f"# Title\n\n{table.BEGIN}\nold\n{table.END}\n\nrest\n"
    new = table.inserted(text, REPORT)
    assert new == f"# Title\n\n{table.BEGIN}\n{MARKDOWN}\n{table.END}\n\nrest\n"
    assert table.inserted(new, REPORT) == new


@pytest.mark.parametrize("text", ["", table.BEGIN, f"{table.END}{table.BEGIN}", f"{table.BEGIN * 2}{table.END}"])
def test_a_document_without_the_markers_is_refused(text):
    with pytest.raises(InvalidArgument, match="markers"):
        table.inserted(text, REPORT)


def built(*pairs) -> dict:
    """A report whose cells were measured with kernels of these builders, a dictionary of contenders for each cell."""
    cells = [{"measured": [{"name": n, "builder": b} for n, b in of.items()]} for of in pairs]
    return {"cells": [*cells, {"op": "route", "us": 4.5}]}


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (built({"jit: triton": None}, {}), ""),
        (
            built({"device graph": "triton 3.9.0", "jit: triton": None}),
            "Kernels were built, as recorded, by triton 3.9.0 (device graph); those inside jit by the versions named.",
        ),
        (
            built(*[{"device graph": "triton 3.9.0", "two-launch Triton": "triton 3.6.0"}] * 2),
            "Kernels were built, as recorded, by triton 3.9.0 (device graph) and triton 3.6.0 (two-launch Triton); "
            "those inside jit by the versions named.",
        ),
        (
            built(
                {"device graph": "triton 3.9.0", "other": "triton 3.6.0"},
                *[{"device graph": "triton 3.6.0", "other": "triton 3.6.0"}] * 2,
            ),
            "Kernels were built, as recorded, by triton 3.9.0 (device graph in 1 cell) and triton 3.6.0 (device graph "
            "in 2 cells, other); those inside jit by the versions named.",
        ),
    ],
)
def test_what_built_the_kernels_is_told_as_recorded(report, told):
    """The Triton that is installed is among the versions, and may have built none of what was launched raw."""
    assert table.built_by(report) == told


def kernels_table():
    """The script."""
    spec = importlib.util.spec_from_file_location("kernels_table", ROOT / "benchmarks/kernels_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernels_table_in(tmp_path, monkeypatch):
    """The script, with its files in a folder of the test's."""
    module = kernels_table()
    monkeypatch.setattr(module, "README", tmp_path / "README.md")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "h200-kernels.json")
    return module


def test_the_script_merges_reports_and_writes_the_readme(monkeypatch, tmp_path):
    script = kernels_table_in(tmp_path, monkeypatch)
    script.README.write_text(f"a\n{table.BEGIN}\n{table.END}\nb\n")
    again = cell(QWEN, 1, 20.0, 16.4, {}, read=4.5)
    other = cell((64, 32, 8, 2), 1, 3.0, 2.0, {}, read=4.5)
    second = {**REPORT, "date": "2026-12-02", "read_tbs": 4.5, "cells": [again, other]}
    for number, report in enumerate((REPORT, second)):
        (tmp_path / f"{number}.json").write_text(json.dumps(report))
    script.main([str(tmp_path / "0.json"), str(tmp_path / "1.json")])
    made = json.loads(script.RESULTS.read_text())
    assert [(c["shape"], c["tokens"], c["us"]) for c in made["cells"]] == [
        ([2048, 768, 128, 8], 1, 20.0),
        ([2048, 768, 128, 8], 64, 280.0),
        ([2048, 768, 128, 8], 65, 280.0),
        ([2048, 768, 128, 8], 4096, 500.0),
        ([64, 32, 8, 2], 4096, None),
        ([64, 32, 8, 2], 1, 3.0),
    ]
    assert made["read_tbs"] == pytest.approx(4.55)
    assert [run["read_tbs"] for run in made["runs"]] == [4.6, 4.5]
    assert script.README.read_text() == f"a\n{table.BEGIN}\n{table.markdown(made)}\n{table.END}\nb\n"
    again["measured"][0]["builder"] = "triton 3"
    told = {**REPORT, "cells": [again]}
    (tmp_path / "2.json").write_text(json.dumps(told))
    script.main([str(tmp_path / "2.json")])
    made = json.loads(script.RESULTS.read_text())
    text = table.markdown(made)
    assert "by triton 3 (device graph)" in text
    assert script.README.read_text() == f"a\n{table.BEGIN}\n{text}\n{table.END}\nb\n"


def test_reports_of_other_machines_are_not_merged():
    for name, other in (("device", "another"), ("versions", {"jax": "0.11.2", "triton": "3.7.0"})):
        with pytest.raises(InvalidArgument, match=name):
            table.merged([REPORT, {**REPORT, name: other}])
    fewer = {**REPORT, "versions": {"jax": "0.11.2", "flax": "0.12.10"}}
    assert table.merged([REPORT, fewer])["versions"] == {"jax": "0.11.2", "triton": "3.6.0", "flax": "0.12.10"}
    with pytest.raises(InvalidArgument, match="at least one"):
        table.merged([])


def test_runs_of_merged_reports_are_those_that_a_cell_is_left_of():
    def run(read, *cells):
        return {**REPORT, "read_tbs": read, "cells": [cell(QWEN, rows, us, 16.4, {}, read=read) for rows, us in cells]}

    two = table.merged([run(4.5, (1, 21.0)), run(4.6, (4, 70.0))])
    assert [one["read_tbs"] for one in two["runs"]] == [4.5, 4.6]
    three = table.merged([two, run(4.7, (1, 20.0))])
    assert [one["read_tbs"] for one in three["runs"]] == [4.6, 4.7]
    assert three["read_tbs"] == pytest.approx(4.65)
    assert "in 2 runs" in table.facts(three)


def test_the_readme_shows_the_raw_results():
    """Whatever stands in benchmarks/results; before there is anything, a document made here shows the report above."""
    if RESULTS.exists():
        report, text = json.loads(RESULTS.read_text()), (ROOT / "README.md").read_text()
    else:
        report, text = REPORT, f"{table.BEGIN}\n{MARKDOWN}\n{table.END}\n"
    assert text == table.inserted(text, report)
    wanted = {"op", "shape", "tokens", "us", "floor_us", "ratio", "tflops", "peers"}
    assert all(wanted <= set(c) for c in report["cells"] if c["op"] == "ffn")
    assert {"device", "versions", "date", "read_tbs", "matmul_tflops"} <= set(report)


def test_the_roofline_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "roofline.png"
    plot.roofline(REPORT, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_without_matplotlib_there_is_one_clear_error(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(CannotServe, match=r"no matplotlib .* pip install matplotlib"):
        plot.roofline(REPORT, tmp_path / "x.png")


# The command.


@pytest.fixture
def command(capfd, monkeypatch):
    """Runs the command in this process; gives exit code, stdout and stderr."""
    monkeypatch.setattr("warnings.showwarning", None)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return stopped.value.code or 0, out, err

    return run


def machine(**changes):
    from moe_jax import doctor

    cpu = doctor.Device(kind="cpu", platform="cpu")
    packages = dict.fromkeys(doctor.PACKAGES, "1") | {"jax": "0.11.2", "jaxlib": "0.11.2", "jax-cuda12-plugin": None}
    facts = {"python": "3.12.0", "packages": packages, "driver": None, "variables": {}, "devices": (cpu,)}
    return doctor.Machine(**{**facts, "complaint": None, "libraries": {}, **changes})


def test_without_a_gpu_the_command_stops_with_what_was_found_and_wanted(command, monkeypatch):
    monkeypatch.setattr("moe_jax.doctor.examine", machine)
    code, out, err = command("bench", "kernels", "--shape", "64,32,8,2")
    assert code == 1
    assert out == ""
    assert err == (
        "error: moe-jax bench kernels: no CUDA GPU: got no NVIDIA driver, JAX sees cpu (cpu), "
        "wanted an NVIDIA GPU of compute capability 8.0 or newer that JAX can use\n"
    )


@pytest.mark.parametrize(
    ("kind", "capability", "driver", "text"),
    [
        ("Tesla T4", "7.5", "580.1", "Tesla T4 has compute capability 7.5"),
        ("AMD Instinct MI300X", "gfx942", None, "JAX sees AMD Instinct MI300X (gpu)"),
        (None, None, "580.1", "NVIDIA driver 580.1 is present, but JAX 0.11.2 sees only the CPU"),
    ],
)
def test_gpus_that_do_not_fit_are_named(command, monkeypatch, kind, capability, driver, text):
    from moe_jax import doctor

    found = {"driver": driver}
    if kind:
        found["devices"] = (doctor.Device(kind=kind, platform="gpu", capability=capability),)
    monkeypatch.setattr("moe_jax.doctor.examine", lambda: machine(**found))
    code, _, err = command("bench", "kernels")
    assert code == 1
    assert text in err
    assert "wanted an NVIDIA GPU of compute capability 8.0 or newer" in err


def test_wrong_options_stop_before_anything_is_measured(command, monkeypatch, tmp_path):
    monkeypatch.setattr("moe_jax.doctor.examine", lambda: pytest.fail("looked at the machine"))
    for option, value in (("--shape", "nothing"), ("--rows", "0"), ("--json", tmp_path / "no/x.json")):
        code, _, err = command("bench", "kernels", option, value)
        assert code == 2
        assert f"error: {option}: " in err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = command("bench", "kernels", "--plot", tmp_path / "x.png")
    assert code == 1
    assert "pip install matplotlib" in err


def test_the_command_measures_prints_and_writes(command, monkeypatch, tmp_path):
    """The whole command on a machine said to have a GPU, with a timer of the test's in place of CUDA's."""
    pytest.importorskip("matplotlib")
    from moe_jax import doctor

    gpu = doctor.Device(kind="NVIDIA H200", platform="gpu", capability="9.0")
    monkeypatch.setattr("moe_jax.doctor.examine", lambda: machine(driver="580.1", devices=(gpu,)))
    cpu = jax.devices("cpu")[0]
    monkeypatch.setattr("jax.devices", lambda *_: [cpu])
    monkeypatch.setattr("moe_jax.bench.timing.CudaTimer", lambda *_: FakeTimer())
    report, picture = tmp_path / "report.json", tmp_path / "roofline.png"
    code, out, err = command(
        *("bench", "kernels", "--shape", "32,16,4,2", "--rows", "2,1", "--json", report, "--plot", picture),
        *("--cubins", tmp_path),
    )
    assert code == 0
    made = json.loads(report.read_text())
    assert made["device"] == "cpu"
    assert made["capability"] == "9.0"
    assert made["versions"]["jax"] == "0.11.2"
    assert [c["tokens"] for c in made["cells"]] == [1, 2]
    assert made["cells"][0]["backend"] == "jit: reference"
    assert "no cubin" in made["cells"][0]["declined"]["device graph"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert out == table.markdown(made) + "\n"
    lines = err.splitlines()
    assert lines[0].startswith("[0/")
    assert any("32,16,4,2, 2 rows, jit: reference: 50.0 µs ± 2.5" in line for line in lines)
    assert not list(tmp_path.glob("*.part"))


def test_the_command_tells_what_built_the_kernels(capsys):
    launched, *rest = REPORT["cells"][0]["measured"]
    cells = [REPORT["cells"][0] | {"measured": [launched | {"builder": "triton 3.9.0"}, *rest]}]
    bench_kernels._show({**REPORT, "cells": cells}, Console())
    *_, last = capsys.readouterr().out.splitlines()
    assert "Kernels were built, as recorded, by triton 3.9.0 (device graph)" in last


def test_the_other_commands_do_not_load_the_bench():
    code = "import sys, moe_jax.cli; print([name for name in sys.modules if name.startswith('moe_jax.bench')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.gpu
def test_the_command_on_a_gpu(tmp_path):
    report = tmp_path / "report.json"
    options = ["--shape", "256,128,8,2", "--rows", "1,4,65", "--time-limit", "120", "--json", report]
    command = [sys.executable, "-m", "moe_jax", "bench", "kernels", *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    made = json.loads(report.read_text())
    assert 0.1 < made["read_tbs"] < 20
    assert 10 < made["matmul_tflops"] < 10_000
    for cell in made["cells"]:
        ours = {m["name"]: m for m in cell["measured"] if m["name"] in ("device graph", "jit: triton")}
        assert set(ours) == {"device graph", "jit: triton"}, cell["declined"]
        assert ours["device graph"]["method"] == "launches"
        assert ours["device graph"]["builder"].startswith("triton ")
        assert all(m["faults"] == [] for m in ours.values())
        assert "jax.lax.ragged_dot" in cell["peers"]
