"""How the time of one captured chain of launches depends on what XLA ran before it.

    python benchmarks/settling.py [--shape NAME|H,I,E,K] [--rows N] [--cubins FOLDER] [--json FILE]

The chain is the expert layer's, as `moe-jax bench kernels` times it. Before each timing a program runs that leaves the
device in the fast state or in the slow one (a pass over memory, the bench's check of a result), then one program of a
list. `moe_jax.bench.timing.CudaTimer` settles the device before it times anything because of what this shows.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from refusals import told

from moe_jax.bench import launches
from moe_jax.bench.cases import Shape, parse_shape
from moe_jax.bench.layer import Layer
from moe_jax.bench.run import steps_for
from moe_jax.bench.timing import CudaTimer
from moe_jax.cli.measuring import check_folder, measured_device, write
from moe_jax.pallas_kernels.device import capability_of_device

WHERE = "settling"
REPLAYS = 25
type Program = Callable[[], object]


def programs(device: jax.Device) -> dict[str, Program]:
    """Programs of XLA by name, compiled; each waits for its end."""
    key = jax.device_put(jax.random.key(0), device)
    words = jax.random.bits(key, (2**28,), jnp.uint32)  # 1 GiB
    table = words.reshape(-1, 512)
    at = jax.random.randint(key, (2**17,), 0, len(table))
    square = jnp.ones((2048, 2048), jnp.float32, device=device)
    half = jnp.ones((4096, 4096), jnp.bfloat16, device=device)
    made: dict[str, tuple[Callable[..., object], tuple[jax.Array, ...]]] = {
        "a word": (lambda x: x + 1, (jnp.ones((), jnp.float32, device=device),)),
        "add 1 to 1 GiB": (lambda x: x + 1, (words,)),
        "sum of 1 GiB": (jnp.sum, (words,)),
        "sum of 64 MiB": (lambda x: jnp.sum(x[: 2**24]), (words,)),
        "gather of 256 MiB": (lambda x, i: x[i], (table, at)),
        "transpose of 1 GiB": (lambda x: x.T.copy(), (table,)),
        "sort of 16 MiB": (lambda x: jnp.sort(x[: 2**22]), (words,)),
        "float32 matmul, 2048": (lambda x: x @ x, (square,)),
        "bfloat16 matmul, 4096": (lambda x: x @ x, (half,)),
    }

    def runs(function: Callable[..., object], arguments: tuple[jax.Array, ...]) -> Program:
        compiled = jax.jit(function).lower(*arguments).compile()
        return lambda: jax.block_until_ready(compiled(*arguments))

    found: dict[str, Program] = {name: runs(*each) for name, each in made.items()}
    found["64 MiB to the host"] = lambda: np.asarray(words[: 2**24])
    for program in found.values():
        program()
    return found


def measure(shape: Shape, rows: int, folder: Path | None) -> dict[str, object]:
    """Microseconds of a layer after each program, from the fast state and from the slow one.

    Raises:
        CannotServe: there is no GPU.
    """
    device, report = measured_device(WHERE, simulated=False)
    from moe_jax.pallas_kernels.launcher import capture, replay_times  # needs what was looked for just now

    capability = capability_of_device(device)
    timer = CudaTimer(device, folder, capability)
    seed = secrets.randbelow(2**31)
    rng = np.random.default_rng(seed)
    layer = Layer(shape, rng, device, timer.l2_bytes)
    steps = layer.steps(rng, rows, steps_for(layer, rows, timer.ceilings()))
    tile, _ = launches.shipped_tile(shape, rows, device.device_kind, capability)
    work = launches.work(layer, steps, launches.layer_launches(shape, rows, tile), folder, capability, "")
    result = jax.block_until_ready(jnp.asarray(work.result()))
    found = programs(device) | {"check of a result": lambda: layer.error(result, steps)}
    graph = capture(timer.stream, work.run)

    def microseconds() -> float:
        return statistics.median(replay_times(graph, timer.stream, REPLAYS, warmup=1)) / len(steps)

    report |= {"shape": list(shape), "rows": rows, "seed": seed, "builder": work.builder, "after": {}}
    try:
        for start in ("sum of 1 GiB", "check of a result"):
            for name, program in found.items():
                found[start]()
                before = microseconds()
                program()
                after = microseconds()
                report["after"][f"{start}, {name}"] = [before, after]
                print(f"{start} {before:.2f} µs, then {name} {after:.2f} µs", flush=True)
    finally:
        graph.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--cubins", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    check_folder("--json", args.json)
    write(args.json, measure(parse_shape(args.shape), args.rows, args.cubins))


if __name__ == "__main__":
    told(main)
