"""`moe-jax decode`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import numpy as np
from rich.console import Console

import moe_jax
from moe_jax import serving
from moe_jax.cli import device as devices
from moe_jax.cli import output
from moe_jax.errors import InvalidArgument
from moe_jax.pallas_kernels.checks import check_integer
from moe_jax.sampling import sampling


@dataclass
class Timings:
    """Seconds of one run.

    Attributes:
        load_seconds: reading the checkpoint.
        time_to_first_token_seconds: from the prompt to the first token, compiling included.
        decode_seconds: from the first token to the last.
        compile_seconds: compiling, wherever it fell.
        tokens_per_second: of the steps after the first token in which nothing was compiled; None without such.
    """

    load_seconds: float = 0.0
    time_to_first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0
    tokens_per_second: float | None = None


@dataclass
class Counters:
    """Counts of one run."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    compiled_programs: int = 0


@dataclass
class Steps:
    """The engine's steps of one run, prompts among them; all 0 where the jitted step made the tokens.

    Attributes:
        served_by: what made the tokens, and why.
        direct, captured, updated, replayed: steps by kind.
        reasons: of the direct ones.
        failures: of captures and replays, by the call that failed.
    """

    served_by: str = ""
    direct: int = 0
    captured: int = 0
    updated: int = 0
    replayed: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)


@dataclass
class Run:
    """One decoding: what came out, and at what cost."""

    tokens: list[int] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    counters: Counters = field(default_factory=Counters)
    graphs: Steps = field(default_factory=Steps)


def numbers(**texts: str) -> dict[str, Any]:
    """Options by name as numbers: of ``temperature`` and ``top_p`` any, of the others whole ones.

    Raises:
        InvalidArgument: a text that is none.
    """
    found: dict[str, Any] = {}
    for name, text in texts.items():
        kind, wanted = (float, "a number") if name in ("temperature", "top_p") else (int, "an integer")
        try:
            found[name] = kind(text)
        except ValueError as error:
            option = f"--{name.replace('_', '-')}"
            raise InvalidArgument(option, where="moe-jax decode", got=repr(text), wanted=wanted) from error
    return found


def run(
    path: str | None, prompt: str, options: Mapping[str, Any], *, device: devices.DeviceName, as_json: bool
) -> None:
    """Load, decode and report.

    Raises:
        InvalidArgument: an option's value, before anything is loaded; or one that the model cannot take.
    """
    console = output.log_console(plain=as_json)
    check_integer("moe-jax decode", "--max-new-tokens", options["max_new_tokens"], 1)
    sampling(options["temperature"], options["top_p"], options["seed"])
    chosen = devices.choose(device)
    _check_graphs(options["graphs"], chosen)
    record = Run()
    start = time.perf_counter()
    name = path or "the shipped model"
    with output.byte_progress(f"loading {name}", console) as progress:
        model = moe_jax.load(path, device=chosen, progress=progress)
    record.timings.load_seconds = time.perf_counter() - start
    if model.tokenizer is None:
        raise InvalidArgument(
            "no tokenizer", where="moe-jax decode", got=f"{name} without tokenizer.json", wanted="a folder with one"
        )
    ids = model.tokenizer.encode(prompt)
    record.counters.prompt_tokens = len(ids)
    text = model.tokenizer.stream()
    with output.waiting("compiling", console) as done_waiting:
        for token in _timed(model, ids, options, record):
            piece = text.push(token)
            if not as_json:
                done_waiting()
                if len(record.tokens) == 1:
                    _start_text(prompt, console)
                _write(piece)
    if not as_json:
        _write(text.flush() + "\n")
    where = {"platform": chosen.platform, "kind": chosen.device_kind}
    if as_json:
        result = {
            "model": path,
            "prompt": prompt,
            "text": model.tokenizer.decode(record.tokens),
            "tokens": record.tokens,
            "timings": asdict(record.timings),
            "counters": asdict(record.counters),
            "graphs": asdict(record.graphs),
            "device": where,
        }
        print(json.dumps(result))
        return
    output.table("decoded", _summary(name, chosen, record), console)


def _check_graphs(graphs: str | None, device: jax.Device) -> None:
    """As `moe_jax.Model.generate` will, of a model on this device alone."""
    if graphs not in (None, "simulate", "jit") and not serving.on_gpu(device):
        got, wanted = f"{graphs!r} on a {device.platform}", "a CUDA device, or simulate or jit"
        raise InvalidArgument("device", where="--graphs", got=got, wanted=wanted)


def _timed(model: moe_jax.Model, ids: list[int], options: Mapping[str, Any], record: Run) -> Iterator[int]:
    """The tokens of one prompt as they come; fills the record."""
    counters, timings = record.counters, record.timings
    steady_steps, steady_seconds = 0, 0.0
    programs = model.executables
    before = programs.stats()  # equal models share programs, so some may be there already
    start = first = last = time.perf_counter()
    compiled = 0
    for step in model.generate(np.asarray([ids], np.int32), stream=True, **options):
        token = int(step[0])
        now = time.perf_counter()
        record.tokens.append(token)
        known, compiled = compiled, programs.stats().misses - before.misses
        if len(record.tokens) == 1:
            first = now
            timings.time_to_first_token_seconds = now - start
        elif compiled == known:
            steady_steps += 1
            steady_seconds += now - last
        yield token
        last = time.perf_counter()
    timings.decode_seconds = last - first
    timings.compile_seconds = programs.stats().compile_seconds - before.compile_seconds
    counters.new_tokens, counters.compiled_programs = len(record.tokens), compiled
    record.graphs = _steps(model)
    if steady_steps:
        timings.tokens_per_second = steady_steps / steady_seconds


def _steps(model: moe_jax.Model) -> Steps:
    """Of the model's only generation."""
    served_by, stats = model.explain_generate(), model.engine_stats()
    if stats is None:
        return Steps(served_by)
    kinds = (stats[kind] for kind in ("direct", "captures", "updates", "replays"))
    return Steps(served_by, *kinds, reasons=stats["declines"], failures=stats["graph_error"])


def _start_text(prompt: str, console: Console) -> None:
    """Show what is being continued: before the text on a terminal, else apart from it on stderr."""
    if sys.stdout.isatty():
        _write(f"\033[1m{prompt}\033[0m")
    else:
        print(f"prompt: {prompt}", file=console.file, flush=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _summary(name: str, device: jax.Device, record: Run) -> list[tuple[str, str]]:
    timings, counters = record.timings, record.counters
    rate = timings.tokens_per_second
    return [
        ("model", f"{name}, loaded in {timings.load_seconds:.2f} s"),
        ("device", f"{device.device_kind} ({device.platform})"),
        ("tokens", f"{counters.prompt_tokens} in the prompt, {counters.new_tokens} new"),
        ("time to first token", f"{timings.time_to_first_token_seconds:.2f} s"),
        ("tokens/s", "not measured" if rate is None else f"{rate:.1f} (steps in which nothing was compiled)"),
        ("compiled programs", f"{counters.compiled_programs} in {timings.compile_seconds:.2f} s"),
        ("decoded by", record.graphs.served_by),
        *_graph_rows(record.graphs),
    ]


def _graph_rows(steps: Steps) -> list[tuple[str, str]]:
    """None where no engine ran."""
    kinds = {name: getattr(steps, name) for name in ("direct", "captured", "updated", "replayed")}
    if not any(kinds.values()):
        return []
    counted = {"graph steps": kinds, "direct because": steps.reasons, "graph failures": steps.failures}
    return [
        (name, ", ".join(f"{n} {what}" for what, n in parts.items() if n)) for name, parts in counted.items() if parts
    ]
