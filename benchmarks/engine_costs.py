"""What a step costs whose graph may not be launched again, and how long a fresh process takes to its first text.

    python benchmarks/engine_costs.py [--part refused|first-token|both] [--shape NAME] [--layers N] [--context N]
                                      [--cubins FOLDER] [--graphs on|simulate] [--json FILE] [--time-limit SECONDS]

**Refused.** Two engines decode one sequence each, the same tokens at the same positions, one with graphs and one
without. Something happens that the other's graph does not outlive, and both make the same step, one time this one first
and one time that one; then both go on until it is a replay again. `excess_us` is the median difference of such pairs.
`us` is by the host's clock with the token in hand; `host_us` is without launches and without waiting for the device, of
as many more steps with clocks around these calls. A refusal may exceed the direct step by the `host_us` of a replay.

**First token.** `moe-jax decode` of the shipped model in two processes, one after the other, with a folder for Triton's
cache that is empty at first: seconds from the start of the process to the first byte of text, and to its end.

`--cubins FOLDER` is what `decode_build.py FOLDER --rows 1` makes, with the same shape and context; the processes of the
first token compile anyway. `--graphs simulate` needs no GPU, has `tiny` as its shape, and its times say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from moe_jax.bench import decode, decode_engine
from moe_jax.bench.decode_cell import check_time
from moe_jax.bench.decode_model import config_of, cut, random_model
from moe_jax.bench.timing import Clock, median_and_spread
from moe_jax.cache import Runtime
from moe_jax.cli.measuring import check_folder, measured_device, runtime_of, write
from moe_jax.engine import Engine
from moe_jax.engine.step import NAMESPACE
from moe_jax.engine.weights import module_weights
from moe_jax.errors import CannotServe
from moe_jax.models.config import ModelConfig

WHERE = "engine_costs"
REPEATS = 30  # of a case, and as many with clocks inside; a sequence has room for 35
SETTLING = 4  # steps within which a graph is replayed again
NEW_TOKENS = 16
BAR_SECONDS = 15.0  # to the first text, with Triton's cache warm
COLUMNS = {
    **{"us": "µs", "direct_us": "direct µs", "excess_us": "excess µs", "allowed_us": "allowed", "host_us": "host µs"},
    **{"excess_host_us": "excess of it", "destroy_us": "destroying", "change_us": "the event itself"},
}


class Case(NamedTuple):
    """Something that a captured graph does not outlive: ``change`` before the step under test, ``undo`` after it."""

    name: str
    change: Callable[[], object]
    undo: Callable[[], object] = lambda: None


def cases(engine: Engine, norm: Array) -> tuple[Case, ...]:
    """The first is a replay, which the others are compared with; ``norm`` is the model's array of that name."""
    registry, memory = engine.registry, engine.memory
    manifest, _ = registry.manifest(NAMESPACE)
    assert manifest is not None
    return (
        Case("nothing", lambda: None),
        Case("Engine.update_weights", engine.update_weights),
        # Without the engine's sweep the step itself finds the difference and destroys the graph.
        Case("array replaced in the table", lambda: memory.update_weights({"norm": norm})),
        Case("manifest accepted again", lambda: registry.accept(manifest)),
        Case("owner generation advanced", lambda: registry.advance_owner(NAMESPACE)),
        Case(
            "admission closed",
            lambda: registry.close_admission(NAMESPACE, "for one step"),
            lambda: registry.open_admission(NAMESPACE),
        ),
    )


@contextlib.contextmanager
def watched(runtime: Runtime) -> Generator[defaultdict[str, float]]:
    """Seconds in a runtime's calls that launch and wait, by name, and in those that destroy a graph."""
    destroy = runtime.destroy
    with decode_engine.watched(runtime) as spent:

        def timed(graph: Any) -> None:
            start = time.perf_counter()
            destroy(graph)
            spent["destroy"] += time.perf_counter() - start

        vars(runtime)["destroy"] = timed
        try:
            yield spent
        finally:
            del vars(runtime)["destroy"]


def step(engine: Engine, spent: defaultdict[str, float]) -> tuple[float, float, list[int]]:
    """Microseconds of a step, those without launches and waiting, and its token."""
    spent.clear()
    start = time.perf_counter()
    tokens = engine.step()
    whole = time.perf_counter() - start
    elsewhere = sum(spent[name] for name in (*decode_engine.LAUNCHES, *decode_engine.WAITS))
    return whole * 1e6, (whole - elsewhere) * 1e6, list(tokens.values())


def settle(engine: Engine, direct: Engine) -> None:
    """Make steps until one is a replay, and as many without graphs.

    Raises:
        CannotServe: none is.
    """
    for _ in range(SETTLING):
        engine.step()
        direct.step()
        if engine.explain_last_step().startswith("replay"):
            return
    raise CannotServe("replay", where=WHERE, got=engine.explain_last_step(), wanted=f"one within {SETTLING} steps")


def pairs(
    case: Case, engine: Engine, direct: Engine, prompt: Sequence[int], spent: defaultdict[str, float], clock: Clock
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Figures of each pair of steps, by name; and how the steps under test ran, with what the engine says of one.

    Raises:
        CannotServe: the two steps gave different tokens, or the time is over.
    """
    where, both = f"{WHERE}, {case.name}", (engine, direct)
    numbers = [one.prefill([prompt], max_new_tokens=decode.positions())[0] for one in both]
    settle(engine, direct)
    found, ran = defaultdict(list), {}
    for number in range(REPEATS):
        check_time(where, clock)
        start = time.perf_counter()
        case.change()
        change = time.perf_counter() - start
        # Who comes first finds what the change has left of the host's caches.
        order = (engine, direct) if number % 2 else (direct, engine)
        steps = {one: (*step(one, spent), spent["destroy"]) for one in order}
        (direct_us, direct_host, wanted, _), (us, host, tokens, destroy) = steps[direct], steps[engine]
        if tokens != wanted:
            raise CannotServe("tokens", where=where, got=tokens, wanted=f"{wanted}, as without graphs")
        figures = {"us": us, "direct_us": direct_us, "excess_us": us - direct_us, "change_us": change * 1e6}
        figures |= {"host_us": host, "direct_host_us": direct_host, "excess_host_us": host - direct_host}
        for name, value in {**figures, "destroy_us": destroy * 1e6}.items():
            found[name].append(value)
        last = engine.graphs.last
        assert last is not None
        ran[last.kind if last.reason is None else f"{last.kind} ({last.reason})"] = engine.explain_last_step()
        case.undo()
        settle(engine, direct)
    for one, number in zip(both, numbers, strict=True):
        one.release(number)
    return found, ran


def measure(case: Case, engine: Engine, direct: Engine, prompt: Sequence[int], clock: Clock) -> dict[str, Any]:
    """Medians and spreads of a case; errors as those of `pairs`."""
    found, ran = pairs(case, engine, direct, prompt, defaultdict(float), clock)
    with watched(engine.runtime) as spent:
        inside, _ = pairs(case, engine, direct, prompt, spent, clock)
    found |= {name: values for name, values in inside.items() if "host" in name or name == "destroy_us"}
    figures: dict[str, Any] = {"case": case.name, "step": ", ".join(ran), "explained": [*ran.values()]}
    figures |= {"repeats": REPEATS, "spread": {}}
    for name, values in found.items():
        figures[name], figures["spread"][name] = median_and_spread(values)
    return figures


def refused(
    args: argparse.Namespace, config: ModelConfig, device: jax.Device, clock: Clock, report: dict[str, Any]
) -> None:
    """Fill ``replayed`` and ``refused`` of the report, which is written after each case; errors as those of `pairs`."""
    runtime = runtime_of(device, args.cubins, simulated=args.graphs == "simulate")
    config = cut(config, min(args.layers or config.layers, config.layers))
    rng = np.random.default_rng()
    model = random_model(config, int(rng.integers(1 << 31)), device)
    prompt = rng.integers(0, config.vocab_size, args.context).tolist()
    report |= {"shape": args.shape, "layers": config.layers, "context": args.context, "compiler": runtime.compiler}
    # Sizes as in `moe-jax bench decode`, so that a folder of cubins serves both.
    sizes = {"max_sequences": 1, "max_tokens": args.context + decode.positions()}
    with (
        Engine(model, **sizes, long_prompts=None, graphs=args.graphs, runtime=runtime) as engine,
        Engine(model, **sizes, long_prompts=None, graphs="off", runtime=runtime) as direct,
    ):
        for case in cases(engine, module_weights(WHERE, model.module)["norm"]):
            figures = measure(case, engine, direct, prompt, clock)
            if "replayed" in report:
                figures["allowed_us"] = report["replayed"]["host_us"]
                figures["holds"] = figures["excess_us"] <= figures["allowed_us"]
                report["refused"].append(figures)
            else:
                report |= {"replayed": figures, "refused": []}
            write(args.json, report)
            print(f"{clock.spent:4.0f} s  {case.name}: {figures['step']}", flush=True)


def command(graphs: str) -> list[str]:
    """What the processes of the first token run."""
    device = "cpu" if graphs == "simulate" else "cuda"
    options = ("--device", device, "--graphs", graphs, "--max-new-tokens", str(NEW_TOKENS))
    return [sys.executable, "-m", "moe_jax", "decode", *options]


def one_process(words: Sequence[str], environment: dict[str, str], limit: float) -> dict[str, Any]:
    """Seconds from a process's start to its first byte on stdout and to its end, and what it says of itself.

    Raises:
        CannotServe: it failed, wrote nothing, or was stopped after ``limit`` seconds.
    """
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, env=environment, bufsize=0) as process:
            timer = threading.Timer(limit, process.kill)
            timer.daemon = True  # an interrupt does not wait for it
            timer.start()
            assert process.stdout is not None
            text = process.stdout.read(1)
            first = time.perf_counter() - start
            process.communicate()
            end = time.perf_counter() - start
            timer.cancel()
        errors.seek(0)
        said = errors.read().decode(errors="replace").splitlines()
    if process.returncode or not text:
        got = f"exit code {process.returncode} after {end:.1f} s; {' '.join(said[-3:])}"
        raise CannotServe("process", where=f"{WHERE}, first token", got=got, wanted=f"text within {limit:.0f} s")
    return {"first_byte_s": first, "end_s": end, "summary": said}


def first_token(graphs: str, clock: Clock, report: dict[str, Any]) -> None:
    """Fill ``first_token`` of the report; errors as those of `one_process`."""
    words = command(graphs)
    found: dict[str, Any] = {"command": ["python", *words[1:]], "bar_s": BAR_SECONDS}
    report["first_token"] = found
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "warm"):
            found[name] = one_process(words, {**os.environ, "TRITON_CACHE_DIR": folder}, clock.left)
            print(f"{clock.spent:4.0f} s  first token, {name}: {found[name]['first_byte_s']:.1f} s", flush=True)
    found["holds"] = found["warm"]["first_byte_s"] <= BAR_SECONDS


def show(report: dict[str, Any]) -> None:
    """What was measured of both parts, in short."""
    if "replayed" in report:
        print(f"| what happened | step | {' | '.join(COLUMNS.values())} |\n|{' --- |' * (2 + len(COLUMNS))}")
        for figures in (report["replayed"], *report["refused"]):
            numbers = (f"{figures[name]:,.1f}" if name in figures else "–" for name in COLUMNS)
            print(f"| {figures['case']} | {figures['step']} | {' | '.join(numbers)} |")
    for name in ("cold", "warm"):
        if found := report.get("first_token", {}).get(name):
            print(f"first token, {name}: {found['first_byte_s']:.2f} s, end {found['end_s']:.2f} s")
    if report["stopped"]:
        print(f"Not complete: {report['stopped']}")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("refused", "first-token", "both"), default="both")
    parser.add_argument("--shape", help="qwen3-30b-a3b if left out, tiny with --graphs simulate")
    parser.add_argument("--layers", type=int, help="the first ones only")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--cubins", type=Path)
    parser.add_argument("--graphs", choices=("on", "simulate"), default="on")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--time-limit", type=float, default=540.0)
    args = parser.parse_args(words)
    args.shape = args.shape or ("tiny" if args.graphs == "simulate" else "qwen3-30b-a3b")
    config = config_of(args.shape)
    check_folder("--json", args.json)
    clock = Clock(args.time_limit)
    report: dict[str, Any] = {"stopped": None}
    try:
        if args.part != "refused":  # before this process takes memory of the device
            first_token(args.graphs, clock, report)
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        device, head = measured_device(WHERE, simulated=args.graphs == "simulate")
        report |= head
        if args.part != "first-token":
            refused(args, config, device, clock, report)
    except CannotServe as error:
        report["stopped"] = str(error)
    write(args.json, report)
    show(report)
    sys.exit(report["stopped"] is not None)


if __name__ == "__main__":
    from refusals import told  # beside this file, which is its place only when it runs as a script

    told(main)
