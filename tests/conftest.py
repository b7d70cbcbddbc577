"""Test-wide settings. `pytest` runs on four CPU devices; `pytest -m gpu` runs the tests of the CUDA device."""

from __future__ import annotations

import gc
import os

import pytest

GPU_RUN = pytest.StashKey[bool]()
# Nearly all of the suite's time is compiling programs that run for milliseconds: LLVM does not optimise them, and
# fusions are neither built through MLIR nor compiled in parts, which together takes three times as long.
COMPILE_FAST = (
    "--xla_backend_optimization_level=0",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_parallel_codegen_split_count=1",
)
# Their few tests take the longest: begun last, they would leave the other workers without anything to do.
LONG_FILES = ("test_notebooks.py", "test_packaging.py")


def pytest_configure(config: pytest.Config) -> None:
    # Before any test module imports JAX: both variables are read when JAX makes its devices.
    gpu_run = config.option.markexpr.split()[:1] == ["gpu"]  # alone, or `gpu and …`
    config.stash[GPU_RUN] = gpu_run
    flags = ["--xla_force_host_platform_device_count=4"]
    if not gpu_run:
        os.environ["JAX_PLATFORMS"] = "cpu"
        flags.extend(COMPILE_FAST)
    else:
        # What XLA multiplies there is for comparison: it need not try every way to do it.
        flags.append("--xla_gpu_autotune_level=0")
    os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *flags])
    # Several workers take files in the order of collection, not those of the most tests first.
    config.option.loadscopereorder = False

    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="module", autouse=True)
def earlier_objects_are_left_alone(request: pytest.FixtureRequest) -> None:
    """A collection that a test asks for looks at what its module has made, not at all of JAX and of earlier tests."""
    if not request.config.stash[GPU_RUN]:  # on a GPU whatever becomes garbage is to give its memory back
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or the bindings of JAX report as lost what Python cannot collect at its end


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
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
