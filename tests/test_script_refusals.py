"""What the scripts in `benchmarks` refuse: one line on stderr and an exit code, as they are run from a shell."""

from __future__ import annotations

import runpy
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_jax.cli import measuring
from moe_jax.errors import CannotServe

FOLDER = Path(__file__).parents[1] / "benchmarks"
SHAPES = "wanted qwen3-30b-a3b, mixtral-8x7b, olmoe-1b-7b"
OLD = "error: --capability: compute capability: got 75, wanted 80 or more"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs a script in a folder of the test's, as a shell would; gives exit code, stdout and stderr."""
    pytest.importorskip("triton")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.chdir(tmp_path)
    # Tests have modules of the same names; each finds its own, before and after.
    names = [file.stem for file in FOLDER.glob("*.py")]
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}

    def run(script: str, *words: str) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", [script, *words])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(FOLDER / script), run_name="__main__")
        return stopped.value.code, *capsys.readouterr()

    yield run
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(others)


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("experts_build.py", ["cubins", "--shape", "foo"], f"error: --shape: shape: got 'foo', {SHAPES}"),
        ("experts_build.py", ["cubins", "--rows", "abc"], "error: --rows: rows: got 'abc', wanted numbers from 1"),
        ("experts_build.py", ["cubins", "--capability", "75"], OLD),
        ("decode_build.py", ["cubins", "--shape", "olmo"], f"error: --shape: shape: got 'olmo', {SHAPES}"),
        ("decode_build.py", ["cubins", "--rows", "abc"], "error: --rows: rows: got 'abc', wanted numbers from 1"),
        ("decode_build.py", ["cubins", "--capability", "75"], OLD),
        ("decode_ops_cases.py", ["cubins", "--capability", "75"], OLD),
        ("step_variants.py", ["--build", "--cubins", "cubins", "--capability", "75"], OLD),
        ("engine_costs.py", ["--shape", "olmo"], f"error: --shape: shape: got 'olmo', {SHAPES}"),
        ("kernels_table.py", ["no.json"], "error: [Errno 2] No such file or directory: 'no.json'"),
        ("kernels_table.py", ["text.md"], "error: text.md: report: got Expecting value: line 1 column 1 (char 0)"),
        ("kernels_table.py", ["list.json"], "error: list.json: report: got something else, wanted a report of"),
        ("decode_ops_bench.py", ["--json", "a.json", "--operations", "x"], "error: --operations: names: got 'x', want"),
        ("mosaic_sweep.py", ["--dry", "--tiles", "x"], "error: --tiles: names: got 'x', wanted some of shared,alone"),
    ],
)
def test_wrong_options(run, script, words, message, tmp_path):
    (tmp_path / "text.md").write_text("# A text\n")
    (tmp_path / "list.json").write_text("[]")
    code, out, err = run(script, *words)
    assert (code, out) == (2, "")
    assert err.startswith(message) and err.count("\n") == 1
    assert not (tmp_path / "cubins").exists()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("tune.py", ["--rows", "1"]),
        ("settling.py", []),
        ("decode_ops_bench.py", ["--json", "a.json"]),
        ("step_variants.py", ["--shape", "tiny"]),
        ("decode_profile.py", ["--shape", "tiny"]),
        ("mosaic_sweep.py", []),
        ("prefill_sweep.py", ["--seconds", "1", "--json", "a.json"]),
    ],
)
def test_without_a_gpu(run, monkeypatch, script, words, tmp_path):
    """Nor with the packages that would use one. The check is that of `moe-jax bench`."""

    def capability_of(machine, where):
        raise CannotServe("no CUDA GPU", where=where, got="no NVIDIA driver", wanted="one")

    monkeypatch.setattr(measuring, "capability_of", capability_of)
    for name in ("moe_jax.pallas_kernels.launcher", "moe_jax.cache.cuda_runtime"):
        monkeypatch.setitem(sys.modules, name, None)
    code, out, err = run(script, *words)
    assert (code, out) == (2, "")
    assert err == f"error: {script.removesuffix('.py')}: no CUDA GPU: got no NVIDIA driver, wanted one\n"
    assert not list(tmp_path.iterdir())


def test_kernels_that_fail_to_compile_are_counted(run, monkeypatch):
    """The rest is tried all the same."""

    def refuse(spec, capability):
        raise RuntimeError("too large")

    monkeypatch.setattr("moe_jax.pallas_kernels.compiled.compile_spec", refuse)
    # In threads, as processes would not know what was replaced.
    monkeypatch.setattr("multiprocessing.get_context", lambda kind: SimpleNamespace(Pool=ThreadPool))
    code, out, err = run("experts_build.py", "cubins", "--shape", "olmoe-1b-7b", "--rows", "1")
    reads, launches = 3, 2  # ways to read, and the expert layer with programmatic launch and without
    assert out.count("FAILED: RuntimeError: too large") == reads + launches
    assert code == "error: 5 kernels failed to compile"  # which Python prints, and exits 1
    assert err == ""
