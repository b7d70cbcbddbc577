"""Test-wide settings. `pytest` runs on four CPU devices; `pytest -m gpu` runs the tests of the CUDA device."""

from __future__ import annotations

import os

import pytest

GPU_RUN = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    # Before any test module imports JAX: both variables are read when JAX makes its devices.
    gpu_run = config.option.markexpr.split()[:1] == ["gpu"]  # alone, or `gpu and …`
    config.stash[GPU_RUN] = gpu_run
    flags = ["--xla_force_host_platform_device_count=4"]
    if not gpu_run:
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Nearly all of the suite's time is compiling, and half of that LLVM optimising what runs for milliseconds.
        flags.append("--xla_backend_optimization_level=0")
    os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *flags])

    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    reason = None
    if not config.stash[GPU_RUN]:
        reason = "this run is on the CPU; `pytest -m gpu` runs it on a CUDA device"
    else:
        import jax

        if jax.default_backend() != "gpu":
            reason = f"no CUDA device: JAX sees only {jax.devices()}"
    if reason:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))
