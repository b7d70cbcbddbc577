"""`moe_jax.doctor`: the facts of this machine, and the judgement over machines made up here."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moe_jax import doctor
from moe_jax.cli import device as devices
from moe_jax.errors import CannotServe

ROOT = Path(__file__).parents[1]
CPU = doctor.Device(kind="cpu", platform="cpu")
H200 = doctor.Device(kind="NVIDIA H200", platform="gpu", capability="9.0")
PACKAGES = {
    **dict.fromkeys(doctor.PACKAGES),
    "jax": "0.11.2",
    "jaxlib": "0.11.2",
    "flax": "0.12.0",
    "jax-cuda13-plugin": "0.11.2",
    "jax-triton": "0.4.1",
    "triton": "3.7.0",
    "cuda-core": "1.2.0",
    "cuda-bindings": "13.0.0",
}
HEALTHY = doctor.Machine(
    python="3.12.1",
    packages=PACKAGES,
    driver="580.65.06",
    variables={},
    devices=(H200,),
    complaint=None,
    libraries={},
)
HIDDEN = replace(HEALTHY, devices=(CPU,), complaint="Unknown backend cuda")


def without(machine: doctor.Machine, *names: str) -> doctor.Machine:
    return replace(machine, packages={**machine.packages, **dict.fromkeys(names)})


def test_a_working_gpu_has_no_problem():
    assert doctor.problems(HEALTHY) == []


def test_a_plain_cpu_machine_has_no_problem():
    machine = without(replace(HIDDEN, driver=None, complaint=None), "jax-cuda13-plugin", "triton", "cuda-core")
    assert doctor.problems(machine) == []


def test_C114_a_driver_and_a_jax_that_sees_only_the_cpu_names_jax_plugin_and_driver():
    (problem,) = doctor.problems(HIDDEN)
    assert "driver 580.65.06" in problem.what
    assert "JAX 0.11.2 sees only the CPU" in problem.what
    assert "jax-cuda13-plugin 0.11.2" in problem.what
    assert "Unknown backend cuda" in problem.what


@pytest.mark.parametrize(
    ("machine", "remedy"),
    [
        (without(HIDDEN, "jax-cuda13-plugin"), "pip install 'moe-jax[cuda13]'"),
        (replace(without(HIDDEN, "jax-cuda13-plugin"), driver="550.54.14"), "pip install 'moe-jax[cuda12]'"),
        (replace(HIDDEN, driver="550.54.14"), "pip uninstall jax-cuda13-plugin"),
        (
            replace(HIDDEN, packages={**PACKAGES, "jax-cuda13-plugin": "0.11.1"}),
            "'jax==0.11.2' (plugin and jaxlib 0.11.2 must be of one version)",
        ),
        (replace(HIDDEN, variables={"JAX_PLATFORMS": "cpu"}), "unset JAX_PLATFORMS"),
        (replace(HIDDEN, variables={"CUDA_VISIBLE_DEVICES": ""}), "unset CUDA_VISIBLE_DEVICES"),
        (replace(HIDDEN, variables={"CUDA_VISIBLE_DEVICES": "0", "LD_LIBRARY_PATH": "/x"}), "unset LD_LIBRARY_PATH"),
        (HIDDEN, "pip install --force-reinstall 'moe-jax[cuda13]'"),
    ],
)
def test_C114_the_remedy_fits_the_cause(machine, remedy):
    (problem,) = doctor.problems(machine)
    assert remedy in problem.remedy


def test_a_driver_too_old_says_which_is_needed():
    (problem,) = doctor.problems(replace(HIDDEN, driver="470.82.01"))
    assert "driver 470.82.01 is too old" in problem.what
    assert "525" in problem.what
    assert "580" in problem.remedy


def test_a_gpu_below_capability_8_is_named():
    turing = doctor.Device(kind="Tesla T4", platform="gpu", capability="7.5")
    (problem,) = doctor.problems(replace(HEALTHY, devices=(turing,)))
    assert "Tesla T4 has compute capability 7.5" in problem.what
    assert "8.0" in problem.what
    ten = doctor.Device(kind="NVIDIA B200", platform="gpu", capability="10.0")
    assert doctor.problems(replace(HEALTHY, devices=(ten,))) == []


def test_packages_of_the_cuda_extra_missing_on_a_gpu_machine():
    (problem,) = doctor.problems(without(HEALTHY, "triton"))
    assert problem.what == "not installed: triton"
    assert problem.remedy == "pip install 'moe-jax[cuda13]'"


def test_jax_that_cannot_start_at_all():
    broken = replace(HIDDEN, driver=None, devices=(), variables={"JAX_PLATFORMS": "cuda"}, complaint="no cuda")
    (problem,) = doctor.problems(broken)
    assert "no cuda" in problem.what
    assert problem.remedy == "unset JAX_PLATFORMS (it is 'cuda')"


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Tue May  6 02:39:32 UTC 2026\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U16)\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n",
    ],
)
def test_driver_version_is_read_from_the_kernel_module(tmp_path, monkeypatch, text):
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(doctor, "_DRIVER_FILE", tmp_path / "version")
    assert doctor.find_driver() == "580.65.06"


def test_driver_version_from_nvidia_smi_where_proc_shows_none(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 570.86.10\necho 570.86.10\n")
    tool.chmod(0o755)
    monkeypatch.setattr(doctor, "_DRIVER_FILE", tmp_path / "absent")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.find_driver() == "570.86.10"
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2\nexit 9\n")
    assert doctor.find_driver() is None


@pytest.mark.parametrize(
    ("version", "build"), [("580.65.06", "cuda13"), ("525.60.13", "cuda12"), ("470.82.01", "cpu"), ("", "cpu")]
)
def test_make_installs_the_build_that_fits_the_driver(tmp_path, version, build):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n[ -n '{version}' ] && echo '{version}'\n")
    tool.chmod(0o755)
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has an NVIDIA driver, which is asked before the made-up nvidia-smi")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["sh", ROOT / ".ci/find-extra"], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == build
    assert ("CPU build" in done.stderr) == (build == "cpu")
    assert ("too old" in done.stderr) == version.startswith("470")


def test_facts_of_this_machine():
    machine = doctor.examine()
    assert machine.packages["jax"].startswith("0.11.")
    assert machine.python.startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert machine.devices
    assert machine.variables.get("JAX_PLATFORMS") == os.environ.get("JAX_PLATFORMS")


def test_each_operation_says_what_it_uses_and_why():
    found = {operation.name: operation for operation in doctor.operations()}
    decode = {"linear", "route_rows", "kv_append", "attention", "sample"}
    assert set(found) == {"route", "grouped_moe, 1 row", "grouped_moe, 4096 rows", *decode}
    for name in decode:
        assert found[name].backend == "reference"
        assert found[name].why.startswith("triton declined: no CUDA device")
    for name in ("grouped_moe, 1 row", "grouped_moe, 4096 rows"):
        assert found[name].backend == "reference"
        assert found[name].why.startswith("mosaic declined: no CUDA device")


def fake_machine(monkeypatch, machine):
    monkeypatch.setattr(doctor, "find_driver", lambda: machine.driver)
    monkeypatch.setattr(doctor, "examine", lambda: machine)


def test_C114_auto_refuses_to_replace_a_gpu_by_the_cpu(monkeypatch):
    fake_machine(monkeypatch, HIDDEN)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(CannotServe, match=r"driver 580\.65\.06 is present, but JAX .* sees only the CPU") as caught:
        devices.choose(devices.DeviceName.auto)
    assert "pip install" in str(caught.value)


def test_C114_the_cpu_is_taken_when_it_is_asked_for(monkeypatch):
    fake_machine(monkeypatch, HIDDEN)
    assert devices.choose(devices.DeviceName.cpu).platform == "cpu"
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert devices.choose(devices.DeviceName.auto).platform == "cpu"


def test_a_gpu_that_jax_sees_is_used_whatever_else_the_doctor_finds(monkeypatch):
    asked = []
    fake_machine(monkeypatch, without(HEALTHY, "triton"))
    monkeypatch.setattr(devices.jax, "devices", lambda kind: asked.append(kind) or [H200])
    assert devices.choose(devices.DeviceName.cuda) is H200
    assert asked == ["gpu"]


def test_cuda_on_a_machine_without_a_driver_is_refused(monkeypatch):
    fake_machine(monkeypatch, replace(HIDDEN, driver=None, complaint=None))
    with pytest.raises(CannotServe, match=r"got no NVIDIA driver on this machine .* wanted .* or --device cpu"):
        devices.choose(devices.DeviceName.cuda)


def test_auto_is_the_cpu_on_a_machine_without_a_driver(monkeypatch):
    fake_machine(monkeypatch, replace(HIDDEN, driver=None, complaint=None))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert devices.choose(devices.DeviceName.auto).platform == "cpu"


@pytest.mark.gpu
def test_this_gpu_is_usable():
    machine = doctor.examine()
    assert machine.driver
    assert any(device.capability for device in machine.devices)
    assert any(name.startswith("libcublas") or name.startswith("libcudart") for name in machine.libraries)
    assert devices.choose(devices.DeviceName.cuda).platform == "gpu"


@pytest.mark.parametrize("platforms", ["cuda", "nothing"])
@pytest.mark.parametrize("command", [["doctor"], ["info"], ["decode"], ["decode", "--device", "cuda"]])
def test_a_platform_without_a_plugin_is_named(command: list[str], platforms: str) -> None:
    if doctor.find_driver() is not None:
        pytest.skip("this machine has an NVIDIA driver")
    environment = os.environ | {"JAX_PLATFORMS": platforms}
    run = subprocess.run(
        [sys.executable, "-m", "moe_jax", *command], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert run.returncode == 1
    assert "JAX_PLATFORMS" in run.stdout + run.stderr
    assert "Traceback" not in run.stderr
