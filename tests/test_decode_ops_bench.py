"""The script that times the decode kernels, with a timer and kernels of the test's in place of CUDA's."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cuda.core")

from moe_jax.bench.timing import Clock
from moe_jax.pallas_kernels import launcher
from moe_jax.pallas_kernels.linear import linear_spec

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """The module, which finds its cases beside it."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("decode_ops_bench")


def test_every_cell_says_who_built_its_kernels(script, monkeypatch, tmp_path, capsys):
    """A folder of cubins may be of several; a kernel that is missing there was built by nobody."""
    builders = {1: ["triton 3.9.0"], 2: ["triton 3.9.0", "triton 3.6.0"], 4: []}
    spec = linear_spec(1, 64, 64, dtype="bfloat16", capability=90)

    def case(rows):
        specs = tuple([spec] * max(1, len(builders[rows])))
        return script.Case("linear", "qkv", rows, "", specs, lambda rng: [{}], 1000, None)

    def kernel_of(of, folder, capability):
        assert (folder, capability) == (tmp_path, 90)
        left = pending.pop(0)
        if left is None:
            raise ValueError("no cubin")
        return SimpleNamespace(builder=left)

    pending = [builder for rows in builders for builder in builders[rows] or [None]]
    monkeypatch.setattr(script, "cases", lambda operation: map(case, builders))
    monkeypatch.setattr(script, "kernel_of", kernel_of)
    monkeypatch.setattr(launcher, "load_kernel", lambda of, built: SimpleNamespace(spec=of, compiled=built))
    monkeypatch.setattr(script.Chain, "check", lambda chain: [])
    monkeypatch.setattr(script.Chain, "time", lambda chain, floor: (10.0, 0.1))
    timer = SimpleNamespace(stream=None, folder=tmp_path, capability=90)
    path = tmp_path / "report.json"
    args = SimpleNamespace(operations=["linear"], rows=list(builders), shipped=False, json=path)
    script.run(timer, Clock(np.inf), {"ceilings": {"read_tbs": 4.6}, "failures": [], "cells": []}, args)
    report = json.loads(path.read_text())
    assert [(cell["rows"], cell["us"], cell["builder"]) for cell in report["cells"]] == [
        (1, 10.0, "triton 3.9.0"),
        (2, 10.0, "triton 3.6.0 and triton 3.9.0"),
        (4, None, None),
    ]
    assert report["failures"] == ["linear qkv, 4 rows: ValueError: no cubin"]
    assert "4 rows" in capsys.readouterr().out
