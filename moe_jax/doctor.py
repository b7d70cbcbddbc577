"""What this machine offers to JAX, what each operation would run on, and what stands in the way.

`examine` collects facts, `problems` judges them (a function of the facts alone), `operations` asks the
dispatcher. The command `moe-jax doctor` prints all three.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.errors import CannotServe
from moe_jax.pallas_kernels.dispatch import Choice

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "jax-triton",
    "triton",
    "cuda-core",
    "cuda-bindings",
)
GPU_PACKAGES = ("triton", "cuda-core")  # what the CUDA extras add to JAX
VARIABLES = ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
OLDEST_DRIVER = 525  # CUDA 12 of the PyPI wheels; CUDA 13 wants 580
CUDA13_DRIVER = 580
OLDEST_CAPABILITY = (8, 0)

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_CUDA_LIBRARY = re.compile(
    r"/lib(cuda|cudart|cublas|cublasLt|cudnn\w*|cufft|cusolver|cusparse|nccl|nvrtc|nvJitLink|cupti|nvshmem\w*)\.so"
)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device as JAX shows it. ``capability`` is None where it is no GPU."""

    kind: str
    platform: str
    capability: str | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about this process and machine.

    Attributes:
        python: version of Python.
        packages: version of each of `PACKAGES`, None where it is not installed.
        driver: version of the NVIDIA driver, or None.
        variables: those of `VARIABLES` that are set.
        devices: what JAX sees; empty where it could not start.
        complaint: what JAX said when it was asked for its devices or for CUDA ones, or None.
        libraries: CUDA libraries loaded into this process, with the version of their package or file.
    """

    python: str
    packages: Mapping[str, str | None]
    driver: str | None
    variables: Mapping[str, str]
    devices: tuple[Device, ...]
    complaint: str | None
    libraries: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """The back end that an operation takes, and why that one."""

    name: str
    backend: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something wrong, and what to do about it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}. Remedy: {self.remedy}"


def examine() -> Machine:
    """Collect the facts. Starts JAX's devices."""
    driver = find_driver()
    complaint, devices = None, ()
    try:
        devices = tuple(_describe(device) for device in start_devices())
        if driver and not any(device.platform == "gpu" for device in devices):
            jax.devices("cuda")  # says why there is none
    except RuntimeError as error:  # `CannotServe` is one
        complaint = str(error)
    return Machine(
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        driver=driver,
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        devices=devices,
        complaint=complaint,
        libraries=_loaded_libraries(),
    )


def start_devices() -> list[jax.Device]:
    """`jax.devices()`, with words where JAX has none.

    Raises:
        CannotServe: JAX_PLATFORMS names a platform that JAX cannot start (a bare AssertionError of JAX's where it has
            no plugin for any of them, else a RuntimeError).
    """
    try:
        return jax.devices()
    except (AssertionError, RuntimeError) as error:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        got = f"JAX_PLATFORMS={platforms!r}{f'; JAX says: {error}' if str(error) else ''}"
        raise CannotServe("JAX starts no device", where="jax.devices()", got=got, wanted="it unset") from error


def find_driver() -> str | None:
    """Version of the NVIDIA driver, e.g. ``"580.65.06"``, or None where there is none."""
    try:
        text = _DRIVER_FILE.read_text()
    except OSError:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return None
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found.group() if found else None


def problems(machine: Machine) -> list[Problem]:
    """Everything that keeps this machine from what its hardware could do. Empty on a plain CPU machine."""
    if machine.driver is None:
        if machine.devices:
            return []
        reason = machine.complaint or "no reason given"
        return [Problem(what=f"JAX finds no device ({reason})", remedy=_start_remedy(machine))]
    gpus = [device for device in machine.devices if device.platform == "gpu"]
    if not gpus:
        return [_no_gpu_in_jax(machine)]
    return [*_too_old(gpus), *_missing_packages(machine)]


def _no_gpu_in_jax(machine: Machine) -> Problem:
    """A driver is there and JAX does not see the GPU: slow results and no word about it, if nothing is said."""
    driver = _major(machine.driver)
    if driver < OLDEST_DRIVER:
        return Problem(
            what=f"NVIDIA driver {machine.driver} is too old for JAX, which needs {OLDEST_DRIVER} or newer",
            remedy=f"install a driver of {CUDA13_DRIVER} or newer; until then ask for the CPU (--device cpu)",
        )
    plugins = _plugins(machine)
    named = ", ".join(f"{name} {version}" for name, version in plugins.items()) or "none"
    sees = "only the CPU" if machine.devices else "no device"
    said = f"; JAX says: {machine.complaint}" if machine.complaint else ""
    return Problem(
        what=f"NVIDIA driver {machine.driver} is present, but JAX {machine.packages['jax']} sees {sees} "
        f"(CUDA plugin of JAX: {named}{said})",
        remedy=_start_remedy(machine),
    )


def _start_remedy(machine: Machine) -> str:
    """The first thing that explains why JAX does not start a GPU, most certain cause first."""
    driver, plugins, jaxlib = _major(machine.driver), _plugins(machine), machine.packages["jaxlib"]
    platforms = machine.variables.get("JAX_PLATFORMS", "")
    extra = "cuda13" if driver >= CUDA13_DRIVER else "cuda12"
    install = f"pip install 'moe-jax[{extra}]'"
    if platforms:
        return f"unset JAX_PLATFORMS (it is {platforms!r})"
    if machine.driver is None:
        return "run with JAX_PLATFORMS=cpu"
    if machine.variables.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1", "NoDevFiles"):
        return f"unset CUDA_VISIBLE_DEVICES (it is {machine.variables['CUDA_VISIBLE_DEVICES']!r} and hides every GPU)"
    if not plugins:
        return install
    if extra == "cuda12" and "jax-cuda13-plugin" in plugins:
        return f"{install} (CUDA 13 needs driver {CUDA13_DRIVER}), after pip uninstall jax-cuda13-plugin"
    if any(version != jaxlib for version in plugins.values()):
        return f"{install} 'jax=={machine.packages['jax']}' (plugin and jaxlib {jaxlib} must be of one version)"
    if "LD_LIBRARY_PATH" in machine.variables:
        return "unset LD_LIBRARY_PATH (other CUDA libraries found there replace the ones JAX was built with)"
    return f"pip install --force-reinstall 'moe-jax[{extra}]' (a CUDA library is missing or of a wrong version)"


def _too_old(gpus: list[Device]) -> list[Problem]:
    wanted = ".".join(map(str, OLDEST_CAPABILITY))
    return [
        Problem(
            what=f"{gpu.kind} has compute capability {gpu.capability}, the kernels need {wanted} or newer",
            remedy="use a GPU of the Ampere generation or newer, or ask for the CPU (--device cpu)",
        )
        for gpu in gpus
        if gpu.capability is not None and tuple(map(int, gpu.capability.split("."))) < OLDEST_CAPABILITY
    ]


def _missing_packages(machine: Machine) -> list[Problem]:
    absent = [name for name in GPU_PACKAGES if machine.packages[name] is None]
    if not absent:
        return []
    extra = "cuda12" if "jax-cuda12-plugin" in _plugins(machine) else "cuda13"
    return [Problem(what=f"not installed: {', '.join(absent)}", remedy=f"pip install 'moe-jax[{extra}]'")]


def operations() -> list[Operation]:
    """What each operation takes for bf16 arrays on JAX's default device, and why. The expert block twice: for a decode
    step and for a prompt. Runs nothing.
    """
    from moe_jax.pallas_kernels.grouped_moe import Activation, ExpertWeights, MoEConfig, explain
    from moe_jax.pallas_kernels.route import RouterConfig, Routing
    from moe_jax.pallas_kernels.route.api import ROUTE

    hidden, inner, router = 128, 128, RouterConfig(experts=8, top_k=2)
    config = MoEConfig(router=router, activation=Activation(name="swiglu", layout="halves"))
    weights = ExpertWeights(
        gate_up=jnp.zeros((router.experts, 2 * inner, hidden), jnp.bfloat16),
        down=jnp.zeros((router.experts, hidden, inner), jnp.bfloat16),
    )
    found = [_operation("route", ROUTE.explain(jnp.zeros((1, router.experts), jnp.float32), router, None))]
    for rows, name in ((1, "grouped_moe, 1 row"), (4096, "grouped_moe, 4096 rows")):
        routing = Routing(weights=jnp.full((rows, 2), 0.5, jnp.float32), ids=jnp.zeros((rows, 2), jnp.int32))
        choice = explain(jnp.zeros((rows, hidden), jnp.bfloat16), routing, weights, config)
        found.append(_operation(name, choice))
    return [*found, *(_operation(operation.name, operation.explain(*given)) for operation, given in _decode_calls())]


def _decode_calls() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The other operations of a decode step, each with arguments for one row."""
    from moe_jax.pallas_kernels.attention.api import ATTENTION
    from moe_jax.pallas_kernels.kv_append.api import KV_APPEND
    from moe_jax.pallas_kernels.linear.api import LINEAR
    from moe_jax.pallas_kernels.route import RouterConfig
    from moe_jax.pallas_kernels.route.api import ROUTE_ROWS
    from moe_jax.pallas_kernels.sample.api import SAMPLE

    hidden, heads, kv_heads, dim, eps = 128, 4, 2, 64, 1e-6
    x, zero, real = jnp.zeros((1, hidden), jnp.bfloat16), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.float32)
    pages, table = jnp.zeros((4, kv_heads, 16, dim), jnp.bfloat16), jnp.zeros((1, 4), jnp.int32)
    turn = jnp.zeros((64, dim // 2), jnp.float32)
    qkv, q = (jnp.zeros((1, count * dim), jnp.bfloat16) for count in (heads + 2 * kv_heads, heads))
    weight, router_weight = jnp.zeros((hidden, hidden), jnp.bfloat16), jnp.zeros((8, hidden), jnp.bfloat16)
    seed = jnp.zeros((1, 2), jnp.uint32)
    yield LINEAR, (x, weight, None, None, None, eps, "bfloat16")
    yield ROUTE_ROWS, (x, None, router_weight, None, None, RouterConfig(experts=8, top_k=2), eps)
    yield KV_APPEND, (qkv, None, None, turn, turn, zero, zero, table, pages, pages, None, eps, None)
    yield ATTENTION, (q, pages, pages, table, zero, zero, None, dim**-0.5, None, 1)
    yield SAMPLE, (jnp.zeros((1, 128), jnp.float32), zero, zero, seed, real, zero, real + 1)


def _operation(name: str, choice: Choice) -> Operation:
    reasons = [f"{other} declined: {reason}" for other, reason in choice.declined]
    if choice.detail is not None:
        reasons.append(choice.detail)
    return Operation(name=name, backend=choice.backend, why="; ".join(reasons) or "the best of its back ends can serve")


def _describe(device: jax.Device) -> Device:
    return Device(
        kind=device.device_kind, platform=device.platform, capability=getattr(device, "compute_capability", None)
    )


def _plugins(machine: Machine) -> dict[str, str]:
    return {name: version for name, version in machine.packages.items() if version and name.endswith("-plugin")}


def _major(driver: str | None) -> int:
    return int(driver.split(".")[0]) if driver else 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _loaded_libraries() -> dict[str, str]:
    """CUDA libraries mapped into this process: file name and the version of its package, or of its real name."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return {}
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if _CUDA_LIBRARY.search(line)}
    if not paths:
        return {}
    owners = {
        file.name: f"{distribution.name} {distribution.version}"
        for distribution in importlib.metadata.distributions()
        if (distribution.name or "").startswith("nvidia-")
        for file in distribution.files or ()
    }
    return {Path(path).name: owners.get(Path(path).name, str(Path(path).resolve())) for path in sorted(paths)}
