"""Importing the package: fast, silent, without a device, and refused on versions it does not work with."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import jax
import pytest

import moe_jax
from moe_jax import versions
from moe_jax.errors import MoeJaxError

ROOT = Path(__file__).parents[1]

PROBE = """
import json, sys, time
import jax
start = time.perf_counter()
import moe_jax
seconds = time.perf_counter() - start
from jax._src import xla_bridge
print(json.dumps({
    "seconds": seconds,
    "modules": sorted(set(sys.modules)),
    "backends": xla_bridge.backends_are_initialized(),
}))
"""


@pytest.fixture(scope="module")
def probe():
    command = [sys.executable, "-W", "error", "-c", PROBE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_import_adds_less_than_three_tenths_of_a_second_to_jax(probe):
    assert probe["seconds"] < 0.3


def test_import_touches_no_device(probe):
    assert probe["backends"] is False


@pytest.mark.parametrize("module", ["flax", "triton", "jax_triton", "tokenizers", "safetensors", "rich", "typer"])
def test_import_does_not_load(probe, module):
    assert module not in probe["modules"]


def test_every_public_name_resolves():
    for name in moe_jax.__all__:
        assert getattr(moe_jax, name) is not None
    assert set(moe_jax.__all__) <= set(dir(moe_jax))


def test_public_names_are_those_the_type_checker_sees():
    tree = ast.parse(Path(moe_jax.__file__).read_text())
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname or alias.name for node in typed.body for alias in node.names}
    assert seen == set(moe_jax._HOMES) == set(moe_jax.__all__) - {"__version__"}


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'grouped_mow'"):
        _ = moe_jax.grouped_mow


def test_a_users_own_cache_module_neither_shadows_nor_is_shadowed(tmp_path):
    (tmp_path / "cache.py").write_text("MINE = True\n")
    (tmp_path / "pallas_kernels.py").write_text("MINE = True\n")
    code = (
        f"import sys; sys.path.append({str(ROOT)!r})\n"
        "import cache, pallas_kernels, moe_jax.cache, moe_jax.pallas_kernels\n"
        "assert cache.MINE and pallas_kernels.MINE\n"
        "assert not hasattr(moe_jax.cache, 'MINE') and not hasattr(moe_jax.pallas_kernels, 'MINE')\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)


def fake_jax(version: tuple[int, int, int], without: str | None = None) -> types.ModuleType:
    """A module with the version given and every name the check looks up, but one."""
    module = types.ModuleType("jax")
    module.__version_info__ = version
    module.__version__ = ".".join(map(str, version))
    for name in versions.JAX_NAMES:
        if name != without:
            *parents, leaf = name.split(".")
            holder = module
            for parent in parents:
                if not hasattr(holder, parent):
                    setattr(holder, parent, types.SimpleNamespace())
                holder = getattr(holder, parent)
            setattr(holder, leaf, object())
    return module


@pytest.mark.parametrize("version", [(0, 11, 1), (0, 10, 9), (0, 12, 0), (0, 13, 1), (1, 0, 0)])
def test_C109_the_supported_range_of_jax_is_stated_when_another_is_found(version):
    with pytest.raises(versions.UnsupportedVersion, match="version of JAX") as caught:
        versions.check(fake_jax(version))
    message = str(caught.value)
    assert ".".join(map(str, version)) in message
    assert ">=0.11.2,<0.12" in message
    assert "pip install 'jax>=0.11.2,<0.12'" in message
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, MoeJaxError)


def test_C110_importing_the_package_under_a_newer_jax_is_refused():
    code = "import jax; jax.__version_info__, jax.__version__ = (0, 12, 0), '0.12.0'; import moe_jax"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "UnsupportedVersion: moe_jax: version of JAX: got 0.12.0, wanted JAX >=0.11.2,<0.12" in done.stderr


def test_C110_the_module_run_as_a_command_stops_with_one_line(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import jax; jax.__version_info__, jax.__version__ = (0, 12, 0), '0.12'")
    (tmp_path / "users_package").mkdir()
    (tmp_path / "users_package/__init__.py").write_text("import moe_jax")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    def run(module: str) -> str:
        command = [sys.executable, "-m", module, "doctor"]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        return done.stderr

    message = run("moe_jax")
    assert message.splitlines() == [message.strip()]
    assert message.startswith("error: moe_jax: version of JAX: got 0.12, wanted JAX >=0.11.2,<0.12")
    assert "Traceback" in run("users_package.part")  # another program is told as usual


@pytest.mark.parametrize("version", [(0, 11, 2), (0, 11, 9)])
def test_supported_jax_passes(version):
    versions.check(fake_jax(version))
    versions.check(jax)


@pytest.mark.parametrize("name", versions.JAX_NAMES)
def test_C110_a_name_missing_from_jax_is_refused_at_import_naming_versions(name):
    with pytest.raises(versions.UnsupportedVersion) as caught:
        versions.check(fake_jax((0, 11, 5), without=name))
    message = str(caught.value)
    assert f"jax.{name}" in message
    assert "0.11.5" in message
    assert ">=0.11.2,<0.12" in message


def test_C110_a_name_missing_while_a_part_is_loaded_says_the_same(monkeypatch):
    def load(home):
        raise AttributeError("module 'jax.lax' has no attribute 'gone'")

    monkeypatch.delitem(vars(moe_jax), "route", raising=False)
    monkeypatch.setattr(moe_jax.importlib, "import_module", load)
    with pytest.raises(versions.UnsupportedVersion, match=r"'jax\.lax' has no attribute 'gone'.*>=0\.11\.2,<0\.12"):
        _ = moe_jax.route


def test_a_mistake_of_our_own_is_not_blamed_on_jax(monkeypatch):
    def load(home):
        raise ImportError("cannot import name 'x' from 'moe_jax.y'", name="moe_jax.y")

    monkeypatch.delitem(vars(moe_jax), "route", raising=False)
    monkeypatch.setattr(moe_jax.importlib, "import_module", load)
    with pytest.raises(ImportError, match=r"moe_jax\.y") as caught:
        _ = moe_jax.route
    assert not isinstance(caught.value, versions.UnsupportedVersion)


def test_old_python_is_refused():
    with pytest.raises(versions.UnsupportedVersion, match=r"got 3\.11\.7, wanted Python >=3\.12"):
        versions.check(fake_jax((0, 11, 2)), python=(3, 11, 7))


def test_ranges_checked_at_import_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=" + ".".join(map(str, versions.PYTHON))
    wanted = versions.JAX_RANGE.removeprefix("JAX ")
    extras = project["optional-dependencies"]
    assert f"jax{wanted}" in project["dependencies"]
    assert f"jax[cuda12]{wanted}" in extras["cuda12"]
    assert f"jax[cuda13]{wanted}" in extras["cuda13"]
