"""A decode step with other tiles and schedules, compared in turn on the same memory.

    python benchmarks/step_variants.py VARIANT… [--shape NAME] [--layers N] [--rows N,N,…] [--context N]
                                       [--cubins FOLDER [--build]] [--graphs on|simulate] [--json FILE]

A variant is ``part.field=value``, several with commas between them: ``attention.at_once=2,attention.linger=0``. Parts
are *attention* (a `Schedule`), *experts* and the projections *qkv*, *out* and *head* (each a `Tile`). What a step is as
it stands comes first by itself. The same step costs 2 or 3 % more or less from one process to the next, so only figures
of one run are comparable: the variants' graphs are replayed in turn, and the median of the rounds counts.
`advance` stays out, so that the sequences stay where they are; "other bits" are logits that differ from the first's.

``--build`` compiles everything into the folder and measures nothing, which needs no GPU. ``--graphs simulate`` needs
none either, and its times say nothing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np

from moe_jax.bench import decode, decode_engine
from moe_jax.bench.cases import parse_rows
from moe_jax.bench.decode_model import config_of, cut, random_model
from moe_jax.cache import Buffer, LaunchList, row_buckets
from moe_jax.cli.measuring import check_folder, measured_device, runtime_of, write
from moe_jax.engine import Engine, step
from moe_jax.engine.host import compiled_reference
from moe_jax.errors import InvalidArgument
from moe_jax.pallas_kernels import compiled
from moe_jax.pallas_kernels.attention.heuristics import schedule_for
from moe_jax.pallas_kernels.linear.heuristics import tile_for

WHERE = "step_variants"
REPLAYS, ROUNDS = 25, 7  # the first round is not counted
PARTS = ("attention", "experts", "qkv", "out", "head")

Variant = Mapping[str, Mapping[str, Any]]


def parse_variant(text: str) -> Variant:
    """Fields by part.

    Raises:
        argparse.ArgumentTypeError: what was wanted instead.
    """
    found: dict[str, dict[str, Any]] = {}
    for word in text.split(","):
        name, equals, value = word.partition("=")
        part, dot, field = name.partition(".")
        if not (equals and dot) or part not in PARTS:
            raise argparse.ArgumentTypeError(f"got {word!r}, wanted part.field=value with a part of {', '.join(PARTS)}")
        try:
            found.setdefault(part, {})[field] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise argparse.ArgumentTypeError(f"got {value!r} for {name}, wanted a number, True or False") from None
    return found


@contextlib.contextmanager
def applied(variant: Variant, hidden: int, vocabulary: int) -> Generator[None]:
    """Launch lists that are built inside have the variant's tiles and schedules."""
    old = {name: getattr(step, name) for name in ("linear_spec", "decode_attention_specs", "tuned_tile_for")}

    def linear(rows: int, inputs: int, outputs: int, **options: Any) -> Any:
        part = "head" if outputs == vocabulary else "out" if outputs == hidden else "qkv"
        base = tile_for(rows, inputs, outputs, options["dtype"], capability=options["capability"])
        tile = dataclasses.replace(base, **variant.get(part, {}))
        return old["linear_spec"](rows, inputs, outputs, tile=tile, **options)

    def attention(rows: int, heads: int, kv_heads: int, dim: int, **options: Any) -> Any:
        # The queries of a key head, and its new key and value.
        together, capability = heads // kv_heads + 2, options["capability"]
        base = schedule_for(rows, dim, options["dtype"], together=together, capability=capability)
        schedule = dataclasses.replace(base, **variant["attention"])
        return old["decode_attention_specs"](rows, heads, kv_heads, dim, schedule=schedule, **options)

    def experts(*sizes: Any, **options: Any) -> Any:
        chosen = old["tuned_tile_for"](*sizes, **options)
        return chosen._replace(tile=dataclasses.replace(chosen.tile, **variant["experts"]))

    new: dict[str, Callable[..., Any]] = {}
    if variant.keys() & {"qkv", "out", "head"}:
        new["linear_spec"] = linear
    if "attention" in variant:
        new["decode_attention_specs"] = attention
    if "experts" in variant:
        new["tuned_tile_for"] = experts
    try:
        for name, function in new.items():
            setattr(step, name, function)
        yield
    finally:
        for name, function in old.items():
            setattr(step, name, function)


class Compared:
    """Graphs of an engine's next step, one for each variant, on the memory that the engine has."""

    def __init__(self, engine: Engine, variants: Sequence[Variant], rows: int):
        self.engine, self.runtime, self.stream = engine, engine.runtime, engine.graphs.stream
        _, _, self.table = decode_engine.arguments(engine)
        engine.graphs.drain()
        self._own: list[Any] = []
        self.graphs = [self._graph(self._of(variant, rows)) for variant in variants]

    def close(self) -> None:
        for executable, captured in self.graphs:
            self.runtime.destroy(executable)
            self.runtime.destroy(captured)
        self._own.clear()

    def microseconds(self) -> list[list[float]]:
        """Of a replay, for each graph in each counted round."""
        found: list[list[float]] = [[] for _ in self.graphs]
        for _ in range(ROUNDS):
            for (executable, _), us in zip(self.graphs, found, strict=True):
                start = time.perf_counter()
                for _ in range(REPLAYS):
                    self.runtime.launch_graph(executable, self.stream)
                self.runtime.synchronize(self.stream)
                us.append((time.perf_counter() - start) * 1e6 / REPLAYS)
        return [us[1:] for us in found]

    def logits(self, rows: int) -> list[bytes]:
        """What each graph leaves."""
        found = []
        for executable, _ in self.graphs:
            self.runtime.launch_graph(executable, self.stream)
            found.append(self.engine.memory.read("logits", rows).tobytes())
        return found

    def _of(self, variant: Variant, rows: int) -> LaunchList:
        geometry = self.engine._geometry
        with applied(variant, geometry.config.hidden_size, geometry.config.vocab_size):
            options = {"transform": compiled_reference} if self.runtime.simulated else {}
            return step.build(geometry, (rows,), (), **options).decode[rows]

    def _graph(self, launches: LaunchList) -> tuple[Any, Any]:
        at = {buffer.name: self._address(buffer) for buffer in launches.buffers}
        calls = [
            (self.runtime.load(each.spec), [at[operand.buffer] + operand.offset for operand in each.operands])
            for each in launches.launches
            if each.spec.name != "advance"
        ]
        return decode_engine.graph_of(self.runtime, self.stream, calls)

    def _address(self, buffer: Buffer) -> int:
        """The engine's memory; its own where another tile has another amount of it (counters and scratch)."""
        resource, size = self.table.get(buffer.name), buffer.layout.bytes
        if resource is not None and resource.bytes >= size:
            return resource.address
        address, capsule = self.runtime.allocate(size)
        self.runtime.write(address, np.zeros(size, np.uint8), self.stream)
        self._own.append(capsule)
        return address


def build(variants: Sequence[Variant], args: argparse.Namespace) -> None:
    """Compile the kernels of all engines and variants into the folder."""
    from decode_build import geometry
    from refusals import check_capability

    check_capability(args.capability)
    config = cut(config_of(args.shape), args.layers)
    specs: dict[str, Any] = {}
    for rows in args.rows:
        of_rows = geometry(config, rows, args.context, args.device, args.capability)
        for i, variant in enumerate(variants):
            with applied(variant, config.hidden_size, config.vocab_size):
                buckets, chunks = (row_buckets(rows), row_buckets(of_rows.rows)) if i == 0 else ((rows,), ())
                made = step.build(of_rows, buckets, chunks)
            for launches in (*made.decode.values(), *made.prompt.values()):
                specs |= {spec.key: spec for spec in launches.specs}
    args.cubins.mkdir(parents=True, exist_ok=True)
    for done, spec in enumerate(specs.values(), 1):
        try:
            compiled.load(args.cubins, spec, args.capability)
        except ValueError:  # not there, or stale
            compiled.save(args.cubins, [compiled.compile_spec(spec, args.capability)])
        print(f"{done} of {len(specs)}: {spec.name}", file=sys.stderr, flush=True)


def measure(names: Sequence[str], variants: Sequence[Variant], args: argparse.Namespace) -> None:
    """Microseconds by rows and variant, and which give other bits: printed, and in the report.

    Raises:
        CannotServe: there is no GPU.
    """
    config, simulated = cut(config_of(args.shape), args.layers), args.graphs == "simulate"
    device, report = measured_device(WHERE, simulated=simulated)
    runtime = runtime_of(device, args.cubins, simulated=simulated)
    rng = np.random.default_rng()
    model = random_model(config, int(rng.integers(1 << 31)), device)
    report |= {"shape": args.shape, "layers": config.layers, "context": args.context, "compiler": runtime.compiler}
    report["rows"] = {}
    for rows in args.rows:
        tokens = args.context + decode.positions()  # as `decode_build.geometry` has it
        with Engine(
            model, max_sequences=rows, max_tokens=tokens, long_prompts=None, graphs=args.graphs, runtime=runtime
        ) as engine:
            engine.prefill(rng.integers(0, config.vocab_size, (rows, args.context)).tolist())
            for _ in range(3):
                engine.step()
            compared = Compared(engine, variants, rows)
            logits, times = compared.logits(rows), compared.microseconds()
            compared.close()
        found = {
            name: {"us": statistics.median(us), "rounds_us": us, "other_bits": bits != logits[0]}
            for name, us, bits in zip(names, times, logits, strict=True)
        }
        report["rows"][str(rows)] = found
        write(args.json, report)
        print(f"{rows} rows")
        for name, cell in found.items():
            low, high = min(cell["rounds_us"]), max(cell["rounds_us"])
            print(
                f"  {name:44s} {cell['us']:9.1f} µs [{low:.1f}, {high:.1f}]{' other bits' * cell['other_bits']}",
                flush=True,
            )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="VARIANT")
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rows", default="1")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--cubins", type=Path)
    parser.add_argument("--build", action="store_true", help="compile into the folder, measure nothing")
    parser.add_argument("--device", default="NVIDIA H200", help="kind whose tuned tiles are built")
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--graphs", choices=("on", "simulate"), default="on")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(words)
    args.rows = parse_rows(args.rows)
    try:
        variants = [{}, *map(parse_variant, args.variants)]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if args.build:
        if args.cubins is None:
            parser.error("--build wants --cubins FOLDER")
        build(variants, args)
        return
    try:
        check_folder("--json", args.json)
    except InvalidArgument as error:
        parser.error(str(error))
    measure(["as it is", *args.variants], variants, args)


if __name__ == "__main__":
    from refusals import told  # beside this file, which is its place only when it runs as a script

    told(main)
