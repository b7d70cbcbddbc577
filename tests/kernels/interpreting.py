"""Tests where Triton interprets instead of compiling: a process of their own, and launches on arrays there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moe_jax.pallas_kernels.interpret import interpret
from moe_jax.pallas_kernels.spec import KernelSpec


def run_interpreted(file: str, names: str | None = None) -> None:
    """Run the tests of a file beside this one, where Triton interprets from its import on.

    Args:
        names: which of them, as ``pytest -k`` takes it.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent / file)]
    command += [] if names is None else ["-k", names]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def buffers(spec: KernelSpec, rng: np.random.Generator, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Random inputs unless given, zero state, outputs and scratch full of NaN (or a number no kernel writes)."""
    made: dict[str, np.ndarray] = {}
    for a in spec.arguments:
        if a.name in given:
            made[a.name] = given[a.name]
        elif a.role == "state":
            made[a.name] = np.zeros(a.shape, a.dtype)
        elif a.role in ("out", "scratch"):
            made[a.name] = np.full(a.shape, -7 if a.dtype == "int32" else np.nan, a.dtype)
        else:
            made[a.name] = rng.standard_normal(a.shape).astype(a.dtype)
    return made


def run(
    spec: KernelSpec, rng: np.random.Generator, given: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Every array after a launch on `buffers`; state must be left at zero."""
    made = buffers(spec, rng, given or {})
    interpret(spec, made)
    for a in spec.arguments:
        if a.role == "state":
            assert not made[a.name].any(), f"{a.name} is left with {made[a.name]}"
    return made
