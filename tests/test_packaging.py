"""Wheel, sdist, editable install and bare tree hold the same package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import moe_jax

ROOT = Path(__file__).parents[1]
VERSION = moe_jax.__version__

PROBE = """
import importlib, json, sys
import moe_jax, moe_jax.cache, moe_jax.pallas_kernels.grouped_moe, moe_jax.cli
top = []
for name in ("cache", "pallas_kernels"):
    try:
        importlib.import_module(name)
        top.append(name)
    except ModuleNotFoundError:
        pass
print(json.dumps([moe_jax.__file__, moe_jax.cache.__name__, moe_jax.pallas_kernels.grouped_moe.__name__, top]))
"""


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the tree, since building writes into it, with an asset and a tuned table planted."""
    copy = tmp_path_factory.mktemp("tree") / "moe-jax"
    copy.mkdir()
    for name in ("moe_jax", "pallas_kernels", "cache"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for name in ("moe_jax/assets/planted/deeper/weights.bin", "pallas_kernels/grouped_moe/tuned_planted.json"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("{}")
    return copy


@pytest.fixture(scope="module")
def built(tree, tmp_path_factory) -> dict[str, Path]:
    """Wheel and sdist of the tree, and the wheel made of that sdist."""
    out = tmp_path_factory.mktemp("dist")
    build = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
    python = (sys.executable, "-W", "ignore", "-c", build)
    run(*python, "build_wheel", out, cwd=tree)
    run(*python, "build_sdist", out, cwd=tree)
    sdist = out / f"moe_jax-{VERSION}.tar.gz"
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
    run(*python, "build_wheel", out / "again", cwd=out / f"moe_jax-{VERSION}")
    wheel = f"moe_jax-{VERSION}-py3-none-any.whl"
    return {"wheel": out / wheel, "sdist": sdist, "sdist wheel": out / "again" / wheel}


def expected_files(tree: Path) -> set[str]:
    """Every file of the import package as the bare tree shows it."""
    found = set()
    for folder, _, names in os.walk(tree / "moe_jax", followlinks=True):
        found |= {str((Path(folder) / name).relative_to(tree)) for name in names if not name.endswith(".pyc")}
    return found


@pytest.mark.parametrize("kind", ["wheel", "sdist wheel"])
def test_wheel_holds_every_file_and_nothing_beside_the_package(tree, built, kind):
    with zipfile.ZipFile(built[kind]) as archive:
        names = set(archive.namelist())
    info = f"moe_jax-{VERSION}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == expected_files(tree)
    assert "moe_jax/py.typed" in names
    assert "moe_jax/pallas_kernels/grouped_moe/tuned_planted.json" in names
    assert "moe_jax/assets/planted/deeper/weights.bin" in names
    assert f"{info}licenses/LICENSE" in names


def test_sdist_holds_every_file_and_no_link(tree, built):
    with tarfile.open(built["sdist"]) as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    inside = {member.name.removeprefix(f"moe_jax-{VERSION}/") for member in members if member.isfile()}
    assert expected_files(tree) <= inside
    assert {"README.md", "LICENSE", "pyproject.toml"} <= inside


@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_installed_package_imports_like_the_bare_tree(built, tree, tmp_path, kind):
    target = tmp_path / "site"
    source = ["--editable", tree] if kind == "editable" else [built[kind]]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", target]
    run(sys.executable, "-m", "pip", "install", *options, *source, cwd=tmp_path)
    # A .pth file counts only in a site folder, which the editable install's must be told to be.
    probe = f"import site; site.addsitedir({str(target)!r})\n{PROBE}" if kind == "editable" else PROBE
    out = run(sys.executable, "-c", probe, cwd=tmp_path, PYTHONPATH=str(target))
    home, cache, kernels, top = json.loads(out)
    assert Path(home).is_relative_to(tree if kind == "editable" else target)
    assert (cache, kernels) == ("moe_jax.cache", "moe_jax.pallas_kernels.grouped_moe")
    assert top == []


def test_bare_tree_imports_the_same(tmp_path):
    out = run(sys.executable, "-c", PROBE, cwd=ROOT, PYTHONPATH=str(ROOT))
    _, cache, kernels, _ = json.loads(out)
    assert (cache, kernels) == ("moe_jax.cache", "moe_jax.pallas_kernels.grouped_moe")


def test_entry_point_and_metadata(built):
    with zipfile.ZipFile(built["wheel"]) as archive:
        info = f"moe_jax-{VERSION}.dist-info"
        entry = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    assert "moe-jax = moe_jax.cli:main" in entry
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.12" in metadata
    for extra in ("cuda12", "cuda13", "hub", "notebooks", "test"):
        assert f"Provides-Extra: {extra}" in metadata


def uv_compile(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if uv is None:
        pytest.skip("uv is not installed (extra `test` brings it)")
    command = [uv, "pip", "compile", "--quiet", "--python", sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def unreachable(message: str) -> bool:
    """Whether uv got no connection at all. What an index answers, also that it has no such package, is a failure."""
    causes = ("dns error", "connection refused", "timed out", "network is unreachable", "no route to host")
    return any(cause in message.lower() for cause in causes)


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:9", pytest.param("http://nowhere.invalid", marks=pytest.mark.slow)]
)
def test_an_index_out_of_reach_is_told_from_a_wrong_name(tmp_path, monkeypatch, address):
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")  # nothing comes of waiting
    wanted = tmp_path / "network-failed-to-fetch.in"
    wanted.write_text("network-failed-to-fetch")
    no_connection = uv_compile(wanted, "--no-config", "--no-cache", "--default-index", address)
    assert no_connection.returncode and unreachable(no_connection.stderr)
    wrong_name = uv_compile(wanted, "--no-config", "--no-cache", "--no-index")
    assert wrong_name.returncode and not unreachable(wrong_name.stderr)


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_cuda_extras_resolve(extra):
    done = uv_compile("--extra", extra, "--python-platform", "x86_64-manylinux_2_28", "pyproject.toml")
    if done.returncode and unreachable(done.stderr):
        pytest.skip("no package index can be reached from here")
    assert done.returncode == 0, done.stderr
    for package in (f"jax-{extra}-plugin==0.11.", "jax-triton==", "cuda-core==", f"cuda-bindings=={extra[4:]}."):
        assert package in done.stdout


def find_python(home: Path, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {"HOME": str(home), "PATH": f"{path}"}
    command = ["/bin/sh", str(ROOT / ".ci/find-python")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def fake(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_finder_runs_each_candidate_before_it_chooses(tmp_path):
    home, path = tmp_path / "home", tmp_path / "bin"
    fake(path / "python3.14", "echo 'pyenv: python3.14: command not found' >&2; exit 127")  # a shim
    fake(path / "python3", "echo")  # runs, and says it is too old
    chosen = fake(home / ".pyenv/versions/3.12.9/bin/python", f'exec "{sys.executable}" "$@"')
    fake(home / ".pyenv/versions/3.9.1/bin/python", "echo")
    assert Path(find_python(home, path).stdout.strip()) == Path(sys.executable)
    chosen.unlink()
    done = find_python(home, path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    for text in ("3.12", "python3.14", "python3 on PATH", str(home / ".pyenv/versions")):
        assert text in done.stderr


def test_finder_prefers_path_to_pyenv(tmp_path):
    home, path = tmp_path / "home", tmp_path / "bin"
    fake(home / ".pyenv/versions/3.14.0/bin/python", "echo /from/pyenv")
    fake(path / "python3.12", "echo /from/path")
    assert find_python(home, path).stdout.strip() == "/from/path"
