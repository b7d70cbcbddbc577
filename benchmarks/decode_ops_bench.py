"""Time the decode kernels on a GPU: projections, routing, attention, append, sampling.

    python benchmarks/decode_ops_bench.py --json FILE [--cubins FOLDER] [--seconds N] [--operations linear,route,…]
                                          [--rows 1,4,…] [--shipped]

Cubins come from decode_ops_cases.py; without a folder kernels are compiled here. Times are replays of CUDA graphs of a
chain of launches over rotating weights, pages or logits (L2 is cold), divided by the number of steps. Ceilings are
measured first, in the same run. Before it is timed, a chain runs on poisoned outputs and scratch, its counters must be
left at zero, and its last launch is compared with its reference.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from decode_ops_cases import OPERATIONS, ROWS, Arrays, Case, cases
from refusals import some_of, told

from moe_jax.bench.launches import kernel_of
from moe_jax.bench.timing import Clock, CudaTimer, median_and_spread
from moe_jax.cli.measuring import check_folder, measured_device
from moe_jax.pallas_kernels.device import capability_of_device

if TYPE_CHECKING:
    from moe_jax.pallas_kernels.launcher import LoadedKernel

# What rounding to bf16 explains of a result's norm, and the share of rows that near ties may decide otherwise.
FLOAT_BOUND, INTEGER_BOUND = 1e-2, 0.1
CHAIN_US, REPLAYS = 3e5, 15


class Chain:
    """The launches of a case, with buffers of their own for what is no input of the first that has it."""

    def __init__(self, case: Case, steps: list[Arrays], timer: CudaTimer):
        from moe_jax.pallas_kernels.launcher import load_kernel  # needs CUDA, which `main` looks for

        self.case, self.steps, self.stream = case, steps, timer.stream
        self.kernels: list[LoadedKernel] = [
            load_kernel(spec, kernel_of(spec, timer.folder, timer.capability)) for spec in case.specs
        ]
        self.own: Arrays = {}
        for a in (a for spec in case.specs for a in spec.arguments):
            if a.role == "state":
                self.own[f"{a.name} {a.shape}"] = jnp.zeros(a.shape, a.dtype)
            elif a.role in ("out", "scratch"):
                self.own[a.name] = jnp.full(a.shape, jnp.nan if a.dtype != "int32" else -7, a.dtype)
        self.nothing = jnp.zeros(16, jnp.float32)
        jax.block_until_ready((self.own, self.steps, self.nothing))

    @property
    def builder(self) -> str:
        """What compiled the kernels; a folder of cubins may be of several."""
        return " and ".join(sorted({kernel.compiled.builder for kernel in self.kernels}))

    def array(self, argument: Any, step: Arrays) -> jax.Array:
        if argument.role == "state":
            return self.own[f"{argument.name} {argument.shape}"]
        if argument.role in ("in", "inout") and argument.name in step:
            array = step[argument.name]
            assert (array.shape, array.dtype.name) == (argument.shape, argument.dtype), f"{argument}: {array.aval}"
            return array
        if argument.name in self.own:
            return self.own[argument.name]
        assert argument.shape == (1,), f"{argument.name} is missing"
        return self.nothing

    def record(self, stream: Any, steps: list[Arrays]) -> None:
        for step in steps:
            for kernel in self.kernels:
                kernel.launch(stream, [self.array(a, step).unsafe_buffer_pointer() for a in kernel.spec.arguments])

    def check(self) -> list[str]:
        """What is wrong with one step."""
        self.record(self.stream, self.steps[:1])
        self.stream.sync()
        found = [f"{name} is not left at zero" for name, a in self.own.items() if " " in name and bool(jnp.any(a != 0))]
        spec = self.case.specs[-1]
        if not self.case.checked or spec.reference is None:
            return found
        given = [self.array(a, self.steps[0]) for a in spec.inputs]
        wanted = jax.jit(spec.reference)(*given)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for a, want in zip(spec.outputs, wanted, strict=True):
            got, want = np.asarray(self.own[a.name]), np.asarray(want)
            if a.shape == (1,):
                continue
            if a.dtype == "int32":
                rows = (got != want).reshape(got.shape[0], -1).any(axis=1)
                if rows.mean() > INTEGER_BOUND:
                    found.append(f"{a.name} differs in {rows.sum()} of {rows.size} rows")
            else:
                got, want = got.astype(np.float64), want.astype(np.float64)
                error = np.linalg.norm(got - want) / np.linalg.norm(want)
                if not error <= FLOAT_BOUND:
                    found.append(f"{a.name} has an error of {error:.1e}")
        return found

    def time(self, floor: float) -> tuple[float, float]:
        """Median and spread of microseconds of a step."""
        from moe_jax.pallas_kernels.launcher import capture, replay_times

        graph = capture(self.stream, lambda builder: self.record(builder, self.steps))
        replays = max(4, min(REPLAYS, int(CHAIN_US / max(floor * len(self.steps), 1.0))))
        try:
            return median_and_spread([t / len(self.steps) for t in replay_times(graph, self.stream, replays)])
        finally:
            graph.close()


def run(timer: CudaTimer, clock: Clock, report: dict[str, Any], args: argparse.Namespace) -> None:
    rng = np.random.default_rng(1)
    for operation in args.operations:
        made: tuple[Any, list[Arrays]] = None, []
        for case in cases(operation):
            if case.rows not in args.rows or (args.shipped and case.variant):
                continue
            what = f"{case.operation} {case.name}, {case.rows} rows{f', {case.variant}' if case.variant else ''}"
            if clock.left < 5:
                print("stopped by the clock before", what, flush=True)
                return
            floor, builder = case.moved / report["ceilings"]["read_tbs"] / 1e6, None
            try:
                key = case.name, case.rows
                if made[0] != key:
                    made = None, []  # before the next ones are made: pools are large
                    made = key, case.steps(rng)
                chain = Chain(case, made[1], timer)
                builder = chain.builder
                failures = chain.check()
                us, spread = chain.time(floor)
            except Exception as error:
                failures, us, spread = [f"{type(error).__name__}: {error}"[:300]], None, None
                traceback.print_exc(file=sys.stdout)
                if "CUDA driver" in str(error):
                    raise
            bar = case.bar_us and case.bar_us(floor)
            report["failures"] += [f"{what}: {failure}" for failure in failures]
            cell = {"op": case.operation, "name": case.name, "rows": case.rows, "variant": case.variant}
            cell["builder"] = builder
            report["cells"].append(cell | {"us": us, "spread": spread, "floor_us": floor, "bar_us": bar})
            took = "failed" if us is None else f"{us:8.2f} ±{spread:.2f}"
            print(f"{what:40s} {took}, floor {floor:7.2f}, bar {bar or 0:7.2f} {'; '.join(failures)}", flush=True)
            args.json.write_text(json.dumps(report, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--cubins", type=Path)
    parser.add_argument("--seconds", type=float, default=220)
    parser.add_argument("--operations", default=",".join(OPERATIONS))
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=[*ROWS, 256])
    parser.add_argument("--shipped", action="store_true", help="no other variants")
    args = parser.parse_args()
    args.operations = some_of("--operations", args.operations, OPERATIONS)
    check_folder("--json", args.json)
    clock = Clock(args.seconds)
    device, _ = measured_device("decode_ops_bench", simulated=False)
    timer = CudaTimer(device, args.cubins, capability_of_device(device))
    versions = {name: importlib.metadata.version(name) for name in ("jax", "triton")}
    report: dict[str, Any] = {
        "device": device.device_kind,
        "date": time.strftime("%F"),
        "versions": versions,
        "cubins": "a folder's" if args.cubins else "compiled here",
        "ceilings": timer.ceilings()._asdict(),
        "failures": [],
        "cells": [],
    }
    print(report["ceilings"], f"after {clock.spent:.0f} s", flush=True)
    run(timer, clock, report, args)
    args.json.write_text(json.dumps(report, indent=1))
    print(f"{len(report['failures'])} failures, {clock.spent:.0f} s")


if __name__ == "__main__":
    told(main)
