"""Tests where Triton interprets instead of compiling: a process of their own, and launches on arrays there."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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


def run_early(
    spec: KernelSpec, rng: np.random.Generator, given: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Every array after a launch on `buffers` of a spec with ``pdl``, where a program that has not waited finds nothing
    as it is but ``spec.early``. All bits must be those of the launch without ``pdl``.

    Until its first wait a program reads NaN (from int32 a number that is no index), and must write nothing: what is
    written then would be lost. It lets the next launch start before it waits, or afterwards if the spec ``opens``.
    """
    made = buffers(spec, rng, given or {})
    assert spec.pdl and not dict(spec.constexprs).get("LINGER"), "the interpreter has no inline assembly"
    without = tuple((name, False if name == "PDL" else value) for name, value in spec.constexprs)
    wanted = {name: value.copy() for name, value in made.items()}
    interpret(dataclasses.replace(spec, pdl=False, constexprs=without), wanted)
    programs = _Programs(spec, made)
    with programs.watched():
        interpret(spec, made)
    programs.end()
    for name, value in wanted.items():
        np.testing.assert_array_equal(_bits(made[name]), _bits(value), err_msg=f"{spec.name}: {name}")
    return made


class _Programs:
    """Programs of a launch, one after another, and what is hidden from each until it waits."""

    def __init__(self, spec: KernelSpec, made: Mapping[str, np.ndarray]):
        self.spec = spec
        self.hidden = {a.name: made[a.name] for a in spec.arguments if a.name not in spec.early}
        self.poison = {}
        for a in spec.arguments:
            # What may be written gets a NaN that no sum with the NaN of inputs is: all bits set.
            value = -7 if a.dtype == "int32" else np.nan
            self.poison[a.name] = np.full(a.shape, value, a.dtype)
            if a.dtype != "int32" and a.role != "in":
                _bits(self.poison[a.name])[...] = -1
        self.kept: dict[str, np.ndarray] = {}
        self.calls: list[str] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within it the interpreter's programs are these, and every module's kernels call them."""
        from triton.language.extra import cuda
        from triton.runtime.interpreter import interpreter_builder

        original, stubs = (
            interpreter_builder.set_grid_idx,
            {"gdc_wait": self.wait, "gdc_launch_dependents": self.launch},
        )

        def set_grid_idx(*place: int) -> None:
            self.end()
            self.begin()
            original(*place)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter_builder, "set_grid_idx", set_grid_idx)
            for module in [m for name, m in sys.modules.items() if not name.startswith("triton")]:
                for name, stub in stubs.items():
                    if vars(module).get(name) is getattr(cuda, name):
                        patch.setattr(module, name, stub)
            yield
        assert self.calls is not None

    def begin(self) -> None:
        self.calls = []
        for name, array in self.hidden.items():
            self.kept[name] = array.copy()
            array[...] = self.poison[name]

    def launch(self) -> None:
        self._call("launch")

    def wait(self) -> None:
        if "wait" not in self._call("wait"):
            for name, array in self.hidden.items():
                same = np.array_equal(_bits(array), _bits(self.poison[name]))
                assert same, f"{self.spec.name} writes {name} before it waits"
                array[...] = self.kept[name]

    def end(self) -> None:
        if self.calls is not None:
            wanted = ["wait", "launch"] if self.spec.opens else ["launch", "wait"]
            # It may wait again.
            got = [*dict.fromkeys(self.calls)]
            assert got == wanted and self.calls.count("launch") == 1, f"{self.spec.name}: {self.calls}, not {wanted}"

    def _call(self, name: str) -> list[str]:
        """What was called before."""
        assert self.calls is not None
        before, self.calls = self.calls, [*self.calls, name]
        return before


def _bits(array: np.ndarray) -> Any:
    return array.view(f"i{array.itemsize}")
