"""Time the Triton prefill kernels over their tiles on a GPU, cell by cell, within a time limit.

    python benchmarks/prefill_sweep.py --seconds N --json FILE [--cells qwen3:256,mixtral:4096] [--jobs N]

Kernels compile in processes of their own while the GPU works. Each launch is timed alone, then the whole FFN with the
best tiles of each form of block; all as replays of CUDA graphs over changing routings and weight sets. Every whole FFN
is compared with the f32 reference before it is timed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from prefill_cases import CELLS, build, joined, matmul_specs, shared_specs, short, tiles_of
from refusals import some_of, told

from moe_jax.bench.cases import flops, mean_floor_us
from moe_jax.bench.timing import Clock, CudaTimer, median_and_spread
from moe_jax.cli.measuring import check_folder, measured_device

GATE_UP, DOWN, SHARED = 0, 1, 2
CHECKED_STEPS = 2
# What feeds an argument, by its name; the launch that writes it and the argument's name there.
SOURCES = {
    "counts_ptr": "prefill_plan_count.counts_ptr",
    "before_ptr": "prefill_plan_scan.before_ptr",
    "totals_ptr": "prefill_plan_scan.totals_ptr",
    "used_ptr": "prefill_plan.used_ptr",
    "block_row_ptr": "prefill_plan.block_row_ptr",
    "block_pair_ptr": "prefill_plan.block_pair_ptr",
    "place_ptr": "prefill_plan.place_ptr",
    "pair_ptr": "prefill_down.out_ptr",
}


class Setup(NamedTuple):
    """What all measurements of a run share."""

    stream: Any
    kernels: dict[tuple, concurrent.futures.Future]
    clock: Any
    replays: int


class Chain:
    """Steps of one cell, and buffers for launches over blocks of one form."""

    def __init__(self, setup: Setup, layer: Any, steps: list, cell: str, tile: Any):
        self.setup, self.layer, self.steps, self.cell = setup, layer, steps, cell
        self.shared = [self.load(tile, SHARED + i, spec)[0] for i, spec in enumerate(shared_specs(cell, tile))]
        self.outputs = [a for k in self.shared for a in self._named(k.spec)]
        self.outputs += [a for spec in matmul_specs(cell, tile) for a in self._named(spec)]
        self.poison()

    @staticmethod
    def _named(spec: Any) -> list[tuple[str, Any]]:
        return [(f"{spec.name}.{a.name}", a) for a in spec.outputs]

    def load(self, tile: Any, which: int, spec: Any) -> tuple[Any, Any]:
        """One launch's kernel on the device, and its registers."""
        from moe_jax.pallas_kernels.launcher import load_kernel

        kernel, use = self.setup.kernels[self.cell, tile, which].result()
        return load_kernel(spec, kernel), use

    def poison(self) -> None:
        """Fresh outputs: a plan for each step, everything else one for all steps."""
        import jax
        import jax.numpy as jnp

        def worst(a: Any) -> Any:
            return jnp.full(a.shape, jnp.nan if a.dtype != "int32" else -7, a.dtype)

        common = {name: worst(a) for name, a in self.outputs if not name.startswith("prefill_plan")}
        plans = [{name: worst(a) for name, a in self.outputs if name.startswith("prefill_plan")} for _ in self.steps]
        self.buffers = jax.block_until_ready([common | plan for plan in plans])

    def addresses(self, spec: Any, i: int) -> list[int]:
        step, buffers, weights = self.steps[i], self.buffers[i], self.layer.weights(i)
        first = spec.name == "prefill_gate_up"
        given = {
            "x_ptr": step.x if first else buffers["prefill_gate_up.out_ptr"],
            "weight_ptr": weights.gate_up if first else weights.down,
            "ids_ptr": step.ids,
            "scale_ptr": step.scale,
        }
        found = []
        for a in spec.arguments:
            name = f"{spec.name}.{a.name}" if a.role == "out" else SOURCES.get(a.name, "")
            # An absent optional may be any address.
            array = given.get(a.name, step.x) if a.role == "in" and name not in buffers else buffers[name]
            found.append(array.unsafe_buffer_pointer())
        return found

    def record(self, stream: Any, kernels: list) -> None:
        for i in range(len(self.steps)):
            for kernel in kernels:
                kernel.launch(stream, self.addresses(kernel.spec, i))

    def run(self, kernels: list) -> None:
        self.record(self.setup.stream, kernels)
        self.setup.stream.sync()

    def time(self, kernels: list) -> tuple[float, float]:
        """Median and spread of microseconds a layer."""
        from moe_jax.pallas_kernels.launcher import capture, replay_times

        graph = capture(self.setup.stream, lambda builder: self.record(builder, kernels))
        times = [t / len(self.steps) for t in replay_times(graph, self.setup.stream, self.setup.replays, warmup=2)]
        graph.close()
        return median_and_spread(times)

    def check(self, kernels: list, exact: list) -> dict:
        """Errors of whole layers beside those of the reference in the same dtype; and the bits of a second run.

        Every step is run by itself on poisoned buffers: their results lie in one buffer.
        """
        import numpy as np

        if not exact:
            exact += [references(self.layer, self.steps[i], i) for i in range(CHECKED_STEPS)]
        errors, equal = [], True
        for i in range(CHECKED_STEPS):
            outs = []
            for _ in range(2):
                self.poison()
                for kernel in kernels:
                    kernel.launch(self.setup.stream, self.addresses(kernel.spec, i))
                self.setup.stream.sync()
                outs.append(np.asarray(self.buffers[i]["prefill_combine.out_ptr"].copy()).astype(np.float32))
            errors.append(relative(outs[0], exact[i][0]))
            equal = equal and bool(np.array_equal(outs[0], outs[1]))
        self.run(self.shared[:-1])
        same = [e[1] for e in exact]
        ok = equal and all(e <= 2 * s for e, s in zip(errors, same, strict=True))
        return {"errors": errors, "same_dtype": same, "bit_equal": equal, "ok": ok}


def relative(out: Any, exact: Any) -> float:
    import numpy as np

    return float(np.linalg.norm(out - exact) / np.linalg.norm(exact))


def references(layer: Any, step: Any, i: int) -> tuple[Any, float]:
    """A step's rows in f32, and the relative error of the reference in the rows' own dtype."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from moe_jax.pallas_kernels.grouped_moe import reference
    from moe_jax.pallas_kernels.route import Routing

    routing, weights = Routing(step.scale, step.ids), layer.weights(i)
    same = np.asarray(reference.grouped_moe(step.x, routing, weights, layer.config)).astype(np.float32)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (step.x, weights))
    exact = np.asarray(reference.grouped_moe(wide[0], routing, wide[1], layer.config))
    return exact, relative(same, exact)


def measure_cell(setup: Setup, layer: Any, name: str, rng: Any, ceilings: Any) -> dict:
    shape, tokens = CELLS[name]
    tiles = tiles_of(name)
    steps = layer.steps(rng, tokens, 8 if tokens <= 1024 else 4 if tokens <= 4096 else 2)
    floor = mean_floor_us(shape, [step.host_ids for step in steps], ceilings)
    cell: dict = {"shape": shape, "tokens": tokens, "floor_us": floor, "parts": [], "whole": []}
    exact: list = []
    for form in dict.fromkeys((t.main, t.tail, t.extend) for t in tiles):
        mine = [t for t in tiles if (t.main, t.tail, t.extend) == form]
        if setup.clock.left < 10:
            break
        chain = Chain(setup, layer, steps, name, mine[0])
        chain.run(chain.shared[:-1])
        best: dict[int, tuple] = {}
        for which in (GATE_UP, DOWN):
            for tile in mine:
                if setup.clock.left < 5:
                    break
                entry = {"launch": ("gate_up", "down")[which], "tile": short(tile, which)}
                try:
                    kernel, use = chain.load(tile, which, matmul_specs(name, tile)[which])
                    us, spread = chain.time([kernel])
                except Exception as error:
                    if "CUDA driver" in str(error):
                        raise
                    print("  skipped", entry, f"{type(error).__name__}: {error}"[:160], flush=True)
                    continue
                cell["parts"].append(entry | {"us": us, "spread": spread, "resources": use})
                if which not in best or us < best[which][0]:
                    best[which] = (us, tile, kernel)
        if len(best) < 2:
            continue
        shared = {"plan_us": chain.time(chain.shared[:-1])[0], "combine_us": chain.time(chain.shared[-1:])[0]}
        picks = [(joined(best[0][1], best[1][1]), best[0][2], best[1][2])]
        if tiles[0] in mine and picks[0][0] != tiles[0]:
            picks.append((tiles[0], *(chain.load(tiles[0], w, matmul_specs(name, tiles[0])[w])[0] for w in (0, 1))))
        for tile, first, second in picks:
            kernels = [*chain.shared[:-1], first, second, chain.shared[-1]]
            result = chain.check(kernels, exact)
            us, spread = chain.time(kernels)
            found = {"tile": dataclasses.asdict(tile), "short": [short(tile, 0), short(tile, 1)], "check": result}
            times = {"us": us, "spread": spread, "gate_up_us": best[0][0], "down_us": best[1][0]} | shared
            cell["whole"].append(found | times | {"shipped": tile == tiles[0]})
    cell["whole"].sort(key=lambda w: w["us"])
    return cell


def table(cells: dict[str, dict]) -> list[str]:
    lines = []
    for name, cell in cells.items():
        lines.append(f"{name}: floor {cell['floor_us']:.1f}")
        for w in cell["whole"]:
            tflops, ratio = flops(cell["shape"], cell["tokens"]) / w["us"] / 1e6, w["us"] / cell["floor_us"]
            result = w["check"]
            lines.append(
                f"  {w['us']:.1f} ±{w['spread']:.1f} us, {ratio:.3f}, {tflops:.0f} TF{', shipped' * w['shipped']}: "
                f"plan {w['plan_us']:.1f} gate-up {w['gate_up_us']:.1f} down {w['down_us']:.1f} "
                f"combine {w['combine_us']:.1f}; error {max(result['errors']):.2e} of {max(result['same_dtype']):.2e}"
                f"{'' if result['ok'] else '  FAILED'}"
            )
            lines.append(f"     {w['short'][0]} | {w['short'][1]}")
        for launch in ("gate_up", "down"):
            parts = sorted((p for p in cell["parts"] if p["launch"] == launch), key=lambda p: p["us"])
            lines.append(f"  {launch}: " + "; ".join(f"{p['us']:.1f} {p['tile']}" for p in parts[:6]))
    return lines


def start_compiling(names: list[str], processes: concurrent.futures.Executor) -> dict[tuple, concurrent.futures.Future]:
    """Every launch of the cells, in the order in which it will be wanted."""
    jobs: list[tuple] = []
    for name in names:
        tiles = tiles_of(name)
        for form in dict.fromkeys((t.main, t.tail, t.extend) for t in tiles):
            mine = [t for t in tiles if (t.main, t.tail, t.extend) == form]
            jobs += [(name, mine[0], SHARED + i) for i in range(len(shared_specs(name, mine[0])))]
            jobs += [(name, tile, which) for which in (GATE_UP, DOWN) for tile in mine]
    print(f"{len(jobs)} kernels to compile", flush=True)
    return {job: processes.submit(build, job) for job in jobs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--replays", type=int, default=9)
    args = parser.parse_args()
    names = some_of("--cells", args.cells, CELLS)
    check_folder("--json", args.json)
    device, _ = measured_device("prefill_sweep", simulated=False)
    processes = concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn"))
    kernels = start_compiling(names, processes)

    import numpy as np

    from moe_jax.bench.layer import Layer

    clock = Clock(args.seconds)
    timer = CudaTimer(device, None, 90)
    setup, rng = Setup(timer.stream, kernels, clock, args.replays), np.random.default_rng(int(time.time()))
    report: dict = {"device": device.device_kind, "date": time.strftime("%F"), "cells": {}}
    layer = None
    try:
        ceilings = timer.ceilings()
        report |= ceilings._asdict()
        print(ceilings, f"spent {clock.spent:.0f} s", flush=True)
        for name in names:
            if clock.left < 15:
                print("stopped by the clock before", name)
                break
            if layer is None or layer.shape != CELLS[name][0]:
                layer = None  # the weights before are freed first
                layer = Layer(CELLS[name][0], rng, device, timer.l2_bytes)
            report["cells"][name] = measure_cell(setup, layer, name, rng, ceilings)
            args.json.write_text(json.dumps(report))
            print(f"{name} done, spent {clock.spent:.0f} s", flush=True)
    except Exception:
        traceback.print_exc(file=sys.stdout)
    processes.shutdown(wait=False, cancel_futures=True)
    args.json.write_text(json.dumps(report))
    print("\n".join(table(report["cells"])), flush=True)


if __name__ == "__main__":
    told(main)
