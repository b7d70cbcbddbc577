"""The measurement: every contender on every cell, and the report that comes of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from moe_jax.bench.cases import Ceilings, Shape, distinct, flops, mean_floor_us, name_of
from moe_jax.bench.contenders import Contender
from moe_jax.bench.layer import Layer, Step
from moe_jax.bench.timing import Clock, Timer, median_and_spread
from moe_jax.errors import MoeJaxError
from moe_jax.pallas_kernels.errors import CudaError

ERROR_BOUND = 2e-2  # ‖out − reference‖ / ‖reference‖; bf16 rounding gives about 3e-3, a wrong routing 1
REFERENCE = "jit: reference"
OUT_OF_TIME = "not measured: out of time"
# That a chain takes at least, up to MOST_STEPS steps: a mean over several routings, and layers enough for a program's
# own start to count as little as it does in a model.
CHAIN_US = 4000.0
MOST_STEPS = 16


class Measured(NamedTuple):
    """The best configuration of a contender on one cell.

    Attributes:
        us, spread: median microseconds of a layer and half the distance between the quartiles.
        tried: configurations measured.
        method: ``"launches"``, ``"torch"`` or ``"jit"``, see `Work`.
        error: relative error of its result.
        faults: what went wrong with other configurations.
    """

    name: str
    us: float
    spread: float
    configuration: str
    tried: int
    method: str
    error: float
    builder: str | None
    note: str | None
    faults: list[str]


Progress = Callable[[int, int, str], None]
"""Takes cells times contenders done, their number, and what came of the last."""


def bench(
    cells: Sequence[tuple[Shape, Sequence[int]]],
    contenders: Sequence[Contender],
    timer: Timer,
    clock: Clock,
    *,
    device: jax.Device,
    seed: int,
    progress: Progress,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Measure every contender on every cell, as far as the time goes.

    The time left is shared evenly among the shapes that are left; within a shape our own kernels come first.

    Args:
        cells: shapes, each with its row counts.
        seed: of weights, rows and routings.
        progress: told after each contender of a cell.
        keep: given the report whenever a cell has grown, so that a run that is cut off leaves what it had.

    Returns:
        the report: ``read_tbs``, ``matmul_tflops``, ``seed``, ``stopped`` (why it is not complete, or None), ``cells``.

    Raises:
        CudaError: the device stopped working; what was measured has been handed to ``keep``.
    """
    ceilings = timer.ceilings()
    report: dict[str, Any] = {**ceilings._asdict(), "seed": seed, "stopped": None, "cells": []}
    total, done = sum(len(rows) for _, rows in cells) * len(contenders), 0
    progress(done, total, f"read {ceilings.read_tbs:.2f} TB/s, matmul {ceilings.matmul_tflops:.0f} TFLOP/s")
    rng = np.random.default_rng(seed)
    for number, (shape, rows) in enumerate(cells):
        mine = clock.part(1 / (len(cells) - number))
        layer = Layer(shape, rng, device, timer.l2_bytes)
        chains = {tokens: layer.steps(rng, tokens, steps_for(layer, tokens, ceilings)) for tokens in rows}
        found = {tokens: Cell(layer, chains[tokens], ceilings) for tokens in rows}
        report["cells"] += [cell.record() for cell in found.values()]
        at = len(report["cells"]) - len(rows)
        # The reference, which is slow and nobody's rival, takes what time is left.
        for contender in sorted(contenders, key=lambda c: (c.name == REFERENCE, not c.ours)):
            for i, tokens in enumerate(rows):
                cell = found[tokens]
                outcome = _measure(contender, layer, chains[tokens], timer, mine)
                text = cell.add(contender, outcome)
                done += 1
                report["cells"][at + i] = cell.record()
                if OUT_OF_TIME in ([outcome] if isinstance(outcome, str) else outcome.faults):
                    report["stopped"] = f"the time limit of {clock.limit:.0f} s"
                keep(report)
                progress(done, total, f"{name_of(shape)}, {tokens} rows, {contender.name}: {text}")
        del layer, chains, found
    return report


def steps_for(layer: Layer, tokens: int, ceilings: Ceilings) -> int:
    """Steps of a chain: long enough to time, each weight set at least once."""
    all_experts = layer.shape.experts * layer.shape.expert_bytes / (ceilings.read_tbs * 1e6)
    some = min(tokens * layer.shape.top_k, layer.shape.experts) / layer.shape.experts
    about = max(all_experts * some, flops(layer.shape, tokens) / (ceilings.matmul_tflops * 1e6))
    return max(len(layer.sets), min(MOST_STEPS, math.ceil(CHAIN_US / about)))


def _measure(contender: Contender, layer: Layer, steps: Sequence[Step], timer: Timer, clock: Clock) -> Measured | str:
    """The best configuration that gives right results, or why there is none."""
    best, tried, faults = None, 0, []
    if clock.left <= 0:
        return OUT_OF_TIME
    try:
        for work in contender.prepare(layer, steps):
            if clock.left <= 0:
                faults.append(OUT_OF_TIME)
                break
            try:
                error = layer.error(jax.numpy.asarray(work.result()), steps)
                if not error <= ERROR_BOUND:
                    faults.append(f"{work.configuration}: wrong, relative error {error:.1e}")
                    continue
                timing = timer.time(work)
            except CudaError:
                raise
            except Exception as error:  # a peer may raise anything; the next configuration may do
                faults.append(f"{work.configuration}: {one_line(error)}")
                continue
            tried += 1
            us, spread = median_and_spread([t / len(steps) for t in timing.us])
            if best is None or us < best.us:
                kind, builder = work.kind, work.builder
                best = Measured(
                    contender.name, us, spread, work.configuration, 0, kind, error, builder, timing.note, faults
                )
    except CudaError:
        raise
    except Exception as error:
        faults.append(one_line(error))
    if best is None:
        return "; ".join(faults) or "no configuration fits"
    return best._replace(tried=tried)


def one_line(error: BaseException) -> str:
    """An error as one line."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return (line if isinstance(error, MoeJaxError) else f"{type(error).__name__}: {line}")[:300]


class Cell:
    """What was measured on one shape and row count."""

    def __init__(self, layer: Layer, steps: Sequence[Step], ceilings: Ceilings):
        routings = [step.host_ids for step in steps]
        shape = self.shape = layer.shape
        self.tokens, self.ceilings, self.steps, self.cold = len(routings[0]), ceilings, len(steps), layer.cold
        self.floor_us = mean_floor_us(shape, routings, ceilings)
        self.distinct = float(np.mean([distinct(ids, shape.experts) for ids in routings]))
        self.ours: list[Measured] = []
        self.peers: list[Measured] = []
        self.declined: dict[str, str] = {}

    def add(self, contender: Contender, found: Measured | str) -> str:
        """Keep what came of a contender; says it in words."""
        if isinstance(found, str):
            self.declined[contender.name] = found
            return found
        (self.ours if contender.ours else self.peers).append(found)
        return f"{found.us:.1f} µs ± {found.spread:.1f} ({found.us / self.floor_us:.2f} × floor)"

    def record(self) -> dict[str, Any]:
        """The cell as it stands in the report; the figures of the fastest of our back ends are its own."""
        best = min(self.ours, key=lambda m: m.us, default=None)
        work = flops(self.shape, self.tokens)
        return {
            "op": "ffn",
            "shape": list(self.shape),
            "tokens": self.tokens,
            "us": best and best.us,
            "spread": best and best.spread,
            "floor_us": self.floor_us,
            "ratio": best and best.us / self.floor_us,
            "tflops": best and work / best.us / 1e6,
            "backend": best and best.name,
            "builder": best and best.builder,
            "peers": {m.name: m.us for m in self.peers},
            "configurations": {m.name: m.tried for m in [*self.ours, *self.peers]},
            "flops": work,
            "bytes": self.distinct * self.shape.expert_bytes,
            "steps": self.steps,
            "cold_l2": self.cold,
            "ceilings": self.ceilings._asdict(),
            "measured": [m._asdict() for m in [*self.ours, *self.peers]],
            "declined": dict(self.declined),
        }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Installed versions of packages, those that are there."""
    import importlib.metadata

    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def today() -> str:
    return time.strftime("%Y-%m-%d")
