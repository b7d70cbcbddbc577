"""What a call of `planned_jit` costs the calling thread, beside `jax.jit` and `nnx.jit`; on any machine.

    python benchmarks/planned_jit_calls.py [--json FILE]

Processor time of the calling thread until the call returns, so that other processes do not count: the least of ten
averages over many calls.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import moe_jax

LAYERS = 32


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Of one call, the least of ten averages."""
    for _ in range(3):
        call()
    averages = []
    for _ in range(10):
        start = time.thread_time()
        for _ in range(calls):
            call()
        averages.append((time.thread_time() - start) / calls * 1e6)
    return round(min(averages), 1)


def add_all(*arrays: jax.Array) -> jax.Array:
    return sum(arrays[1:], arrays[0])


class Stack(nnx.Module):
    """Layers of two linear maps: four variables each."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2 * LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def run_stack(model: Stack, x: jax.Array) -> jax.Array:
    return model(x)


def rows() -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for count in (1, 128):
        arrays = [jnp.ones(8) for _ in range(count)]
        planned, jitted = moe_jax.planned_jit(add_all, plan=("add", count)), jax.jit(add_all)
        alone = jitted.lower(*arrays).compile()
        cases = {"planned_jit": planned, "compiled alone": alone, "jax.jit": jitted}
        times = {name: microseconds(lambda f=f, arrays=arrays: f(*arrays), 300) for name, f in cases.items()}
        found.append({"arguments": f"{count} array{'s' * (count > 1)}", "us": times})
    model, x = Stack(nnx.Rngs(0)), jnp.ones((1, 4))
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    alone = jax.jit(lambda leaves, x: nnx.merge(graph, tree.unflatten(leaves))(x)).lower(leaves, x).compile()
    planned, nnx_jitted = moe_jax.planned_jit(run_stack, plan="stack"), nnx.jit(run_stack)
    times = {
        "planned_jit": microseconds(lambda: planned(model, x), 200),
        "compiled alone": microseconds(lambda: alone(leaves, x), 200),
        "nnx.jit": microseconds(lambda: nnx_jitted(model, x), 20),
    }
    found.append({"arguments": f"NNX module, {len(leaves)} variables", "us": times})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "device": f"{jax.default_backend()}, host {platform.machine()}",
        "versions": {name: version(name) for name in ("jax", "flax", "numpy")} | {"python": platform.python_version()},
        "rows": rows(),
    }
    for row in report["rows"]:
        print(row["arguments"], row["us"], flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
