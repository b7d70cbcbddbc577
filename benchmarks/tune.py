"""Search tiles on a GPU and write tuned data.

    python benchmarks/tune.py [--op expert_ffn|prefill] [--shape NAME|H,I,E,K …] [--rows N,N,…] [--seconds N]
                              [--cubins FOLDER] [--out FOLDER] [--log FILE] [--trials FILE]

A search that was killed goes on where it stopped if it is started again with the same --trials.
Kernels for at most 64 rows come from the folder of cubins (experts_build.py --tune builds them elsewhere, with the
Triton that users get); what it lacks is compiled into it first. `--log` keeps every trial.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
from experts_build import FAILED, build
from experts_cases import BUCKETS, Arithmetic, Planned, arithmetics, default_shapes, searched, tiles
from refusals import told

from moe_jax.bench import launches
from moe_jax.bench.cases import Ceilings, Shape, mean_floor_us, name_of, parse_rows, parse_shape
from moe_jax.bench.contenders import Work, chain
from moe_jax.bench.journal import Journal
from moe_jax.bench.launches import DTYPE
from moe_jax.bench.layer import Layer, Step
from moe_jax.bench.run import ERROR_BOUND, steps_for
from moe_jax.bench.search import Outcome, Trial, best_common, search
from moe_jax.bench.timing import Clock, CudaTimer, Timer, median_and_spread
from moe_jax.cli.measuring import measured_device
from moe_jax.errors import CannotServe, InvalidArgument
from moe_jax.pallas_kernels.device import capability_of_device
from moe_jax.pallas_kernels.route import Routing
from moe_jax.pallas_kernels.tuned import source_hash, store
from moe_jax.pallas_kernels.tuned.lookup import DATA

type Measure = Callable[[Any], tuple[float, float]]
PREFILL_ROWS = (256, 1024, 4096, 16384)


class Bench:
    """The device, its ceilings, and the layer that is being tuned."""

    def __init__(self, timer: Timer, device: jax.Device, seed: int, journal: Path | None = None):
        self.timer, self.device, self.journal = timer, device, journal
        self.rng = np.random.default_rng(seed)
        self.ceilings: Ceilings = timer.ceilings()
        self.trials: list[dict[str, Any]] = []

    def layer(self, shape: Shape) -> Layer:
        return Layer(shape, self.rng, self.device, self.timer.l2_bytes)

    def steps(self, layer: Layer, tokens: int) -> tuple[list[Step], float]:
        """A chain and its floor in microseconds."""
        steps = layer.steps(self.rng, tokens, steps_for(layer, tokens, self.ceilings))
        return steps, mean_floor_us(layer.shape, [step.host_ids for step in steps], self.ceilings)

    def measure(self, layer: Layer, steps: Sequence[Step], work: Work) -> tuple[float, float]:
        """Median and spread of a layer's microseconds; a wrong result is an error."""
        error = layer.error(jax.numpy.asarray(work.result()), steps)
        if not error <= ERROR_BOUND:
            raise InvalidArgument("relative error", where=work.configuration, got=error, wanted=ERROR_BOUND)
        return median_and_spread([us / len(steps) for us in self.timer.time(work).us])

    def remembered(self, op: str, shape: Shape, tokens: int, measure: Measure) -> Measure:
        """``measure``, asked only for what earlier searches with the same journal did not measure."""
        journal = Journal(self.journal, device=self.device.device_kind, source=source_hash(op))
        return journal.remember(measure, op=op, shape=list(shape), tokens=tokens)

    def keep(self, op: str, shape: Shape, tokens: int, outcome: Outcome, floor: float) -> None:
        """Log the trials of a search and say what it found."""
        for trial in outcome.trials:
            tile = dataclasses.asdict(trial.candidate)
            entry = {"op": op, "shape": list(shape), "tokens": tokens, "tile": tile, "floor_us": floor}
            self.trials.append(entry | {"us": trial.us, "spread": trial.spread})
        head = f"{op} {name_of(shape)} {tokens} rows, {len(outcome.trials)} tiles, {len(outcome.faults)} out"
        rest = "" if outcome.complete else ", out of time"
        found = "none"
        if outcome.best:
            found = (
                f"{outcome.best.us:.1f} µs ({outcome.best.us / floor:.3f} × floor), first {outcome.trials[0].us:.1f}"
            )
        print(f"{head}{rest}: {found}: {outcome.best and outcome.best.candidate}", flush=True)
        for candidate, fault in outcome.faults[:2]:
            print(f"  out: {candidate}: {fault}", flush=True)


def entry(shape: Shape, tokens: int, trial: Trial, floor: float) -> dict[str, Any]:
    """An entry of tuned data."""
    head = {"shape": list(shape), "dtype": DTYPE, "tokens": tokens, "tile": dataclasses.asdict(trial.candidate)}
    return head | {"us": round(trial.us, 2), "floor_us": round(floor, 2)}


def tune_experts(
    bench: Bench,
    shape: Shape,
    rows: Sequence[int],
    clock: Clock,
    work: Callable[[Layer, Sequence[Step], Planned], Work],
) -> list[dict[str, Any]]:
    """Entries of the expert kernel for a shape: one arithmetic for all row counts, the best tile of each with it."""
    layer = bench.layer(shape)
    chains = {tokens: bench.steps(layer, tokens) for tokens in rows}
    floors = {tokens: floor for tokens, (_, floor) in chains.items()}
    values = arithmetics(shape)
    found: dict[Arithmetic, dict[int, Trial]] = {}
    for i, value in enumerate(values):
        mine = clock.part(1 / (len(values) - i))
        for j, tokens in enumerate(rows):
            steps, floor = chains[tokens]

            def measure(tile: Any, tokens: int = tokens, steps: Sequence[Step] = steps) -> tuple[float, float]:
                return bench.measure(layer, steps, work(layer, steps, Planned(shape, tokens, tile, False)))

            known = bench.remembered("expert_ffn", shape, tokens, measure)
            outcome = search(tiles(shape, tokens, value), known, mine.part(1 / (len(rows) - j)))
            bench.keep("expert_ffn", shape, tokens, outcome, floor)
            if outcome.best:
                found.setdefault(value, {})[tokens] = outcome.best
    best = best_common(found, floors)
    print(f"expert_ffn {name_of(shape)}: {best}", flush=True)
    return (
        [] if best is None else [entry(shape, tokens, trial, floors[tokens]) for tokens, trial in found[best].items()]
    )


def tune_prefill(
    bench: Bench, shape: Shape, rows: Sequence[int], clock: Clock, modules: dict[str, tuple[Any, Callable[..., Any]]]
) -> dict[str, list[dict[str, Any]]]:
    """Entries by operation: each prefill back end's tile, and under ``"prefill"`` which of them is faster.

    Args:
        modules: by operation the module with ``ffn(x, routing, weights, config, tile=…)``, and the list of tiles for a
            shape and row count, the heuristic's first.
    """
    layer = bench.layer(shape)
    found: dict[str, list[dict[str, Any]]] = {}
    for j, tokens in enumerate(rows):
        steps, floor = bench.steps(layer, tokens)
        mine = clock.part(1 / (len(rows) - j))
        best: dict[str, Trial] = {}
        for i, (op, (module, candidates)) in enumerate(modules.items()):

            def measure(tile: Any, module: Any = module, steps: Sequence[Step] = steps) -> tuple[float, float]:
                return bench.measure(layer, steps, prefill_work(layer, steps, module, tile))

            known = bench.remembered(op, shape, tokens, measure)
            outcome = search(candidates(shape, tokens), known, mine.part(1 / (len(modules) - i)))
            bench.keep(op, shape, tokens, outcome, floor)
            if outcome.best:
                best[op] = outcome.best
                found.setdefault(op, []).append(entry(shape, tokens, outcome.best, floor))
        if len(best) == len(modules) > 1:
            winner = min(best, key=lambda op: best[op].us)
            chosen = {"shape": list(shape), "dtype": DTYPE, "tokens": tokens, "us": round(best[winner].us, 2)}
            tile = {"backend": winner.removeprefix("prefill_")}
            found.setdefault("prefill", []).append(chosen | {"tile": tile})
    return found


def prefill_work(layer: Layer, steps: Sequence[Step], module: Any, tile: Any) -> Work:
    given = [(Routing(step.scale, step.ids), layer.weights(i)) for i, step in enumerate(steps)]

    def one(x: Any, given: Any) -> Any:
        return module.ffn(x, *given, layer.config, tile=tile)

    return Work(str(tile), "jit", *chain(one, [step.x for step in steps], given))


def prefill_modules() -> Iterator[tuple[str, tuple[Any, Callable[..., Any]]]]:
    """The prefill back ends that are there, with their lists of candidates."""
    for name in ("triton", "mosaic"):
        module = importlib.import_module(f"moe_jax.pallas_kernels.prefill.{name}")
        if hasattr(module, "candidates"):
            yield f"prefill_{name}", (module, module.candidates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=("expert_ffn", "prefill"), default="expert_ffn")
    parser.add_argument("--shape", action="append", default=[])
    parser.add_argument("--rows")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--cubins", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--trials", type=Path)
    args = parser.parse_args()
    clock = Clock(args.seconds)
    shapes = [parse_shape(text) for text in args.shape] or default_shapes()
    rows = parse_rows(args.rows) if args.rows else BUCKETS if args.op == "expert_ffn" else PREFILL_ROWS
    device, _ = measured_device("tune", simulated=False)
    capability = capability_of_device(device)
    folder = args.cubins or Path(tempfile.mkdtemp())
    written = None
    if args.op == "expert_ffn":
        for line in build(folder, [x for s in shapes for n in rows for x in searched(s, n)], capability, args.jobs):
            if FAILED in line:
                print(line, flush=True)
        print(f"built, {clock.spent:.0f} s", flush=True)
    bench = Bench(CudaTimer(device, None, capability), device, int(time.time()), args.trials)
    print(bench.ceilings, flush=True)
    builders: set[str] = set()

    def launch_work(layer: Layer, steps: Sequence[Step], planned: Planned) -> Work:
        bound = launches.layer_launches(*planned[:3], pdl=planned.pdl)
        work = launches.work(layer, steps, bound, folder, capability, str(planned.tile))
        builders.add(work.builder or "")
        return work

    def write(op: str, entries: list[dict[str, Any]]) -> None:
        nonlocal written
        if len(builders) > 1:
            raise CannotServe("builders", where="tune", got=sorted(builders), wanted="cubins of one Triton")
        builder = next(iter(builders)) if builders else f"triton {importlib.import_module('triton').__version__}"
        date = time.strftime("%Y-%m-%d")
        written = store.write(args.out, device.device_kind, op, source_hash(op), builder, date, entries)

    for i, shape in enumerate(shapes):
        mine = clock.part(1 / (len(shapes) - i))
        if args.op == "expert_ffn":
            found = {"expert_ffn": tune_experts(bench, shape, rows, mine, launch_work)}
        else:
            found = tune_prefill(bench, shape, rows, mine, dict(prefill_modules()))
        for op, entries in found.items():
            if entries:
                write(op, entries)
        if args.log:
            args.log.write_text(json.dumps({"ceilings": bench.ceilings._asdict(), "trials": bench.trials}) + "\n")
    print(f"wrote {written}, {clock.spent:.0f} s", flush=True)


if __name__ == "__main__":
    told(main)
