"""What each kernel costs a decode step of the engine: the step without it, and it alone.

    python benchmarks/decode_profile.py [--shape NAME] [--layers N] [--rows N,N,…] [--context N] [--cubins FOLDER]
                                        [--json FILE]

Graphs of parts of one step are replayed back to back, so results are those of no model; times are the device's. With
programmatic launch kernels overlap: what a kernel adds is not what it takes alone. `advance` stays out, so that the
sequences stay where they are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
from refusals import told

from moe_jax.bench import decode_engine
from moe_jax.bench.cases import parse_rows
from moe_jax.bench.decode_model import config_of, cut, random_model
from moe_jax.cli.measuring import check_folder, measured_device, runtime_of
from moe_jax.engine import Engine

REPLAYS, REPEATS = 40, 5


class Parts:
    """The launches of an engine's next step, of which some are captured and timed."""

    def __init__(self, engine: Engine):
        self.runtime, self.stream = engine.runtime, engine.graphs.stream
        launches, _, table = decode_engine.arguments(engine)
        engine.graphs.drain()
        self.calls: list[tuple[str, Any, Sequence[int]]] = []
        for launch in launches.launches:
            addresses = [table.get(operand.buffer).address + operand.offset for operand in launch.operands]
            name = launch.spec.name
            if name == "linear":
                outputs, inputs = next(a.shape for a in launch.spec.arguments if a.name == "w_ptr")
                name = f"linear {inputs}>{outputs}"
            if name != "advance":
                self.calls.append((name, self.runtime.load(launch.spec), addresses))

    def us(self, chosen: Callable[[str], bool]) -> float:
        """Microseconds of a replay of the launches whose names are chosen."""
        runtime, stream = self.runtime, self.stream
        calls = [(kernel, addresses) for name, kernel, addresses in self.calls if chosen(name)]
        graph, captured = decode_engine.graph_of(runtime, stream, calls)
        times = []
        for _ in range(1 + REPEATS):
            start = time.perf_counter()
            for _ in range(REPLAYS):
                runtime.launch_graph(graph, stream)
            runtime.synchronize(stream)
            times.append((time.perf_counter() - start) * 1e6 / REPLAYS)
        runtime.destroy(graph)
        runtime.destroy(captured)
        return statistics.median(times[1:])

    def report(self) -> dict[str, Any]:
        whole = self.us(lambda name: True)
        kernels = {}
        for name, count in Counter(name for name, _, _ in self.calls).items():
            without, alone = (
                self.us(lambda other, name=name: other != name),
                self.us(lambda other, name=name: other == name),
            )
            kernels[name] = {"count": count, "adds_us": (whole - without) / count, "alone_us": alone / count}
            print(
                f"  {name:24s} x {count:3d}: adds {(whole - without) / count:7.2f} µs, alone {alone / count:7.2f}",
                flush=True,
            )
        return {"step_us": whole, "kernels": kernels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--cubins", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    counts, config = parse_rows(args.rows), cut(config_of(args.shape), args.layers)
    check_folder("--json", args.json)
    device, _ = measured_device("decode_profile", simulated=False)
    runtime, rng = runtime_of(device, args.cubins, simulated=False), np.random.default_rng()
    model = random_model(config, int(rng.integers(1 << 31)), device)
    tokens, report = args.context + decode_engine.positions(60), {}
    for rows in counts:
        with Engine(model, max_sequences=rows, max_tokens=tokens, long_prompts=None, runtime=runtime) as engine:
            engine.prefill(rng.integers(0, config.vocab_size, (rows, args.context)).tolist())
            for _ in range(3):
                engine.step()
            print(f"{rows} rows", flush=True)
            report[rows] = Parts(engine).report()
            print(f"  step {report[rows]['step_us']:.1f} µs", flush=True)
        if args.json:
            head = {"device": device.device_kind, "date": time.strftime("%F"), "compiler": runtime.compiler}
            args.json.write_text(json.dumps(head | {"layers": args.layers, "context": args.context, "rows": report}))


if __name__ == "__main__":
    told(main)
