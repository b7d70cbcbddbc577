"""Whole decode steps of a model, mode by mode: the loop and its report. The command is ``moe-jax bench decode``."""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from moe_jax.bench import decode_engine, decode_jit
from moe_jax.bench.cases import Ceilings
from moe_jax.bench.decode_cell import STEPS, Measured
from moe_jax.bench.decode_model import expected_experts, read_bytes
from moe_jax.bench.run import OUT_OF_TIME, Progress, one_line
from moe_jax.bench.timing import Clock, median_and_spread
from moe_jax.cache import Runtime, StickyError
from moe_jax.errors import InvalidArgument
from moe_jax.generation import bucket
from moe_jax.model import Model
from moe_jax.models.config import ModelConfig

MODES = ("engine", "engine-nographs", "jit", "jit-stock")
HEADINGS = ("mode", "rows", "context", "floor µs", "µs", "÷ floor", "tokens/s", "device µs", "host µs", "checks µs")


def parse_modes(text: str) -> tuple[str, ...]:
    """``"engine,jit"`` as names, each once, in the order given.

    Raises:
        InvalidArgument: a name that is none of `MODES`.
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not set(names) <= set(MODES):
        raise InvalidArgument("modes", where="--modes", got=repr(text), wanted=f"some of {','.join(MODES)}")
    return names


def bench(
    model: Model,
    rows: Sequence[int],
    context: int,
    modes: Sequence[str],
    runtime: Runtime,
    ceilings: Ceilings,
    clock: Clock,
    *,
    seed: int,
    steps: int = STEPS,
    progress: Progress,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Measure every mode at every number of rows, one mode after the other, as far as the time goes.

    Args:
        rows: sequences that are decoded together, each number apart.
        context: tokens of each sequence before the first step.
        runtime: of the engines.
        seed: of the tokens.
        steps: timed in each cell.
        progress: told after each cell.
        keep: given the report whenever there is a new cell, so that a run that is cut off leaves what it had.

    Returns:
        the report; docs/benchmarks.md has its fields.

    Raises:
        StickyError: the device stopped working; what was measured has been handed to ``keep``.
    """
    report: dict[str, Any] = {**ceilings._asdict(), "seed": seed, "context": context, "stopped": None}
    report |= {"launches": {}, "capture_ms": {}, "first_step_s": {}, "cells": []}
    total, config, rng = len(rows) * len(modes), model.config, np.random.default_rng(seed)
    prompts = {count: rng.integers(0, config.vocab_size, (count, context)).tolist() for count in rows}
    experts = {count: (expected_experts(count, config.moe.router), "uniform routing") for count in rows}
    for mode in modes:
        for count in rows:
            found: list[Measured] = []
            faults: list[str] = []
            try:
                _measure(_configurations(mode, model, prompts[count], runtime, clock, steps), clock, found, faults)
            except StickyError:
                report["stopped"] = "the device context is lost"
                raise
            finally:
                best = min(found, key=lambda measured: statistics.median(measured.us), default=None)
                if best is not None and best.experts is not None:
                    experts[count] = best.experts, f"counted, mode {mode}"
                number, source = experts[count]
                cell = {
                    **{"mode": mode, "rows": count, "context": context},
                    **record(best, count, read_bytes(config, count, context, number), ceilings),
                    **{"experts": number, "experts_from": source},
                    **{"configurations": len(found), "faults": faults},
                }
                report["cells"].append(cell)
                if mode == "engine":
                    for name in ("launches", "capture_ms", "first_step_s"):
                        report[name][str(count)] = cell[name]
                if clock.left <= 0 and (faults or len(report["cells"]) < total):
                    report["stopped"] = report["stopped"] or f"the time limit of {clock.limit:.0f} s is over"
                keep(report)
                progress(len(report["cells"]), total, f"{mode}, {count} rows: {in_words(cell)}")
    return report


def _measure(
    configurations: Iterable[Callable[[], Measured]], clock: Clock, found: list[Measured], faults: list[str]
) -> None:
    """Fill the two lists, one of which grows with every configuration.

    Raises:
        StickyError: the device stopped working.
    """
    for measure in configurations:
        if clock.left <= 0:
            faults.append(OUT_OF_TIME)
            return
        try:
            found.append(measure())
        except Exception as error:  # XLA may raise anything; the next mode may do
            faults.append(one_line(error))
            if isinstance(error, StickyError):
                raise
        finally:
            gc.collect()  # what an engine or a program held, before the next one asks for memory


def _configurations(
    mode: str, model: Model, prompts: Sequence[Sequence[int]], runtime: Runtime, clock: Clock, steps: int
) -> Iterator[Callable[[], Measured]]:
    """What is tried for a mode; the fastest counts."""
    if mode in ("jit", "jit-stock"):
        ways = decode_jit.stock_ways(len(prompts), model.config.moe.router)
        for stock in (None,) if mode == "jit" else ways:
            yield functools.partial(decode_jit.measure, model, prompts, clock, steps, stock)
        return
    graphs = "on" if mode == "engine" else "off"
    yield functools.partial(decode_engine.measure, model, prompts, graphs, runtime, clock, steps)


def record(found: Measured | None, rows: int, size: float, ceilings: Ceilings) -> dict[str, Any]:
    """The figures of a cell, None where there are none; ``size`` bytes are read at least."""
    floor = size / (ceilings.read_tbs * 1e6)
    figures: dict[str, Any] = dict.fromkeys(("step_us", "spread_us", "steps", "tokens_s", "ratio"))
    if found is not None:
        us, spread = median_and_spread(found.us)
        figures |= {"step_us": us, "spread_us": spread, "steps": len(found.us)}
        figures |= {"tokens_s": rows / us * 1e6, "ratio": us / floor}
    rest = {name: getattr(found, name, None) for name in Measured._fields if name not in ("us", "experts")}
    return {**figures, "floor_us": floor, "bytes": size, **rest}


def in_words(cell: Mapping[str, Any]) -> str:
    """A cell in one line."""
    if cell["step_us"] is None:
        return "; ".join(cell["faults"])
    text = f"{cell['step_us']:.1f} µs ± {cell['spread_us']:.1f} ({cell['ratio']:.2f} × floor)"
    return f"{text}, {cell['tokens_s']:.0f} tokens/s"


def rows_of(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row of text for each cell, under `HEADINGS`."""

    def number(value: float | None, digits: int = 1) -> str:
        return "–" if value is None else f"{value:,.{digits}f}"

    return [
        (
            *(cell["mode"], f"{cell['rows']}", f"{cell['context']}", number(cell["floor_us"]), number(cell["step_us"])),
            *(number(cell["ratio"], 2), number(cell["tokens_s"], 0)),
            *(number(cell[name]) for name in ("device_us", "host_us", "checks_us")),
        )
        for cell in report["cells"]
    ]


def markdown(report: Mapping[str, Any]) -> str:
    """The same as a Markdown table."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *rows_of(report)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def positions(steps: int = STEPS) -> int:
    """Tokens that a sequence comes to beyond its context."""
    return decode_engine.positions(steps)


def longest(config: ModelConfig, context: int) -> int:
    """Positions that keys and values are kept of for each row, in the mode that keeps most."""
    return bucket(context + positions(), config.max_positions)
