"""Where a call will run, and what keeps Triton kernels from running there inside ``jit``."""

from __future__ import annotations

import functools
import importlib.util
import re
from typing import Any

import jax

MINIMUM_CAPABILITY = 80
MINIMUM_TRITON = (3, 6)  # the oldest whose kernels have run on a device


def device_of(array: Any) -> jax.Device:
    """The device of a concrete array, else JAX's default device: inside ``jit`` nothing more is known."""
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        return next(iter(array.devices()))
    wanted = jax.config.jax_default_device
    if wanted is None or isinstance(wanted, str):
        return jax.local_devices(backend=wanted)[0]
    return wanted


def capability_of(array: Any) -> int:
    """Of the device of `device_of`, 90 for 9.0. Where it is not known, as when tracing for a GPU elsewhere, 80."""
    return capability_of_device(device_of(array))


def multiprocessors(device: jax.Device) -> int:
    """Of a GPU, as its runtime tells; 132, those of a whole 9.0, where it does not."""
    return getattr(device, "core_count", None) or 132


def capability_of_device(device: jax.Device) -> int:
    """As `capability_of`."""
    found = getattr(device, "compute_capability", None) or "8.0"
    return int(found.replace(".", ""))


def shared_memory(capability: int) -> int:
    """KiB of shared memory that a program may take (CUDA programming guide, table of technical specifications)."""
    if capability in (80, 87):
        return 163
    return 227 if 90 <= capability < 120 else 99


def triton_refusal(device: jax.Device) -> str | None:
    """Why Triton kernels cannot serve a device inside ``jit``, or None. Decided once per kind of device."""
    return _refusal(device.platform, device.device_kind, getattr(device, "compute_capability", None))


@functools.cache
def _refusal(platform: str, kind: str, capability: str | None) -> str | None:
    # JAX gives ROCm devices the platform "gpu" too, and a capability such as "gfx942".
    number = re.fullmatch(r"(\d+)\.(\d+)", capability or "")
    if number is None:
        return f"no CUDA device: the call runs on {platform} ({kind})"
    major, minor = map(int, number.groups())
    if 10 * major + minor < MINIMUM_CAPABILITY:
        wanted = f"{MINIMUM_CAPABILITY // 10}.{MINIMUM_CAPABILITY % 10}"
        return f"{kind} has compute capability {capability}, {wanted} or newer is needed"
    return _missing_package()


def _missing_package() -> str | None:
    remedy = f"pip install 'moe-jax[{'cuda12' if importlib.util.find_spec('jax_cuda12_plugin') else 'cuda13'}]'"
    wanted = ".".join(map(str, MINIMUM_TRITON))
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported ({error}), {wanted} or newer is needed: {remedy}"
    if tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) < MINIMUM_TRITON:
        return f"Triton {triton.__version__} is installed, {wanted} or newer is needed: {remedy}"
    return None
