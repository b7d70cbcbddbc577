"""A CUDA machine without a GPU: as the choice of a back end sees one, and programs as text lowered for one."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import pytest

from moe_jax.pallas_kernels import dispatch, xla_call


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """No module finds a reason against the device. Programs still compile for the CPU."""
    for module in modules:
        monkeypatch.setattr(module, "triton_refusal", lambda device: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "_reported", set())


def pretend_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lowering for CUDA needs on a machine without a GPU: Triton, and a device to compile kernels for."""
    pytest.importorskip("triton")
    monkeypatch.setattr(xla_call, "capability_of", lambda array: 90)


def lowered(f: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The program for CUDA. Options are those of `jax.jit`."""
    return jax.jit(f, **options).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text: str) -> int:
    """Calls of Triton kernels in a program."""
    return text.count(f"stablehlo.custom_call @{xla_call.TARGET}(")


def compiled_here(f: Callable[..., Any], *args: Any) -> Any:
    """What a program traced for a GPU gives when it is compiled for the CPU: only XLA sees for which device."""
    return jax.jit(f).lower(*args).compile({"xla_backend_optimization_level": 0})(*args)
