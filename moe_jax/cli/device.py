"""Which device a command runs on and how, and a clear refusal where the device asked for cannot be had."""

from __future__ import annotations

import enum
import os

import jax

from moe_jax import doctor
from moe_jax.errors import CannotServe


class DeviceName(enum.StrEnum):
    """Choices of ``--device``."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class GraphsName(enum.StrEnum):
    """Choices of ``--graphs``, as `moe_jax.Model.generate` takes them."""

    on = "on"
    off = "off"
    strict = "strict"
    simulate = "simulate"
    jit = "jit"


def choose(name: DeviceName) -> jax.Device:
    """The device to run on.

    ``auto`` is the GPU where there is an NVIDIA driver, else the CPU. A GPU that JAX cannot use is refused, not
    replaced by the far slower CPU; ``cpu`` (or JAX_PLATFORMS=cpu) asks for that.

    Raises:
        CannotServe: no usable GPU, with what is wrong and the remedy.
    """
    asked_for_cpu = name == DeviceName.cpu or (
        name == DeviceName.auto and os.environ.get("JAX_PLATFORMS", "").strip() == "cpu"
    )
    if asked_for_cpu:
        return _cpu()
    if name == DeviceName.auto and doctor.find_driver() is None:
        return doctor.start_devices()[0]
    machine = doctor.examine()
    if any(device.platform == "gpu" for device in machine.devices):
        return jax.devices("gpu")[0]
    found = doctor.problems(machine)
    if found:
        raise CannotServe(
            "no usable GPU", where=f"--device {name}", got=found[0].what, wanted=f"a working GPU: {found[0].remedy}"
        )
    raise CannotServe(
        "no usable GPU",
        where=f"--device {name}",
        got=f"no NVIDIA driver on this machine (JAX {machine.packages['jax']} sees only the CPU)",
        wanted="an NVIDIA GPU with its driver, or --device cpu",
    )


def _cpu() -> jax.Device:
    jax.config.update("jax_platforms", "cpu")  # leaves a GPU alone: starting it takes seconds and most of its memory
    return jax.devices("cpu")[0]


def free_memory(device: jax.Device) -> tuple[int | None, str]:
    """Free bytes for weights on a device, and whose memory that is."""
    statistics = device.memory_stats() if device.platform == "gpu" else None
    if statistics:
        free = statistics["bytes_limit"] - statistics["bytes_in_use"]
        return free, f"free in JAX's memory pool on {device.device_kind}"
    try:
        with open("/proc/meminfo") as file:
            kib = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None, "memory of this machine is unknown"
    return kib * 1024, "available in the memory of this machine"
