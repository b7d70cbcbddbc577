"""Check and time the Mosaic GPU prefill kernels, beside the ceiling and JAX's own example, in one run.

    python benchmarks/mosaic_sweep.py [--seconds N] [--shapes qwen,mixtral,deepseek] [--tiles NAME,…] [--peer]
        [--dry] [--json FILE]

Kernel times are CUPTI's, per launch, medians over fresh calls; "ffn" is calls queued back to back by the host's clock.
Weights are far larger than L2, so every call reads them anew. --dry lowers everything for CUDA and runs nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from refusals import some_of, told

from moe_jax.cli.measuring import measured_device
from moe_jax.pallas_kernels.grouped_moe import Activation, ExpertWeights, MoEConfig
from moe_jax.pallas_kernels.grouped_moe.activation import activate
from moe_jax.pallas_kernels.prefill.mosaic import ffn
from moe_jax.pallas_kernels.prefill.mosaic_kernel import MosaicTile
from moe_jax.pallas_kernels.route import RouterConfig, Routing

SHAPES = {
    "qwen": (4096, 2048, 768, 128, 8),
    "mixtral": (4096, 4096, 14336, 8, 2),
    "deepseek": (16384, 7168, 2048, 64, 8),
}
BARS = {"qwen": 540, "mixtral": 680, "deepseek": 680}
SWIGLU = Activation(name="swiglu", layout="halves")
NEAR_144 = (32, 64, 96, 112, 120, 128, 136, 144)
TILES = {
    "shared": MosaicTile(rows=144, sizes=NEAR_144, share=True),
    "alone": MosaicTile(rows=144, sizes=NEAR_144),
    "wide": MosaicTile(rows=176, sizes=(*NEAR_144, 160, 176), stages=3, chunk=88, buffers=1, share=True),
}


def random_ids(seed: int, tokens: int, experts: int, top_k: int) -> np.ndarray:
    """k distinct experts for each token."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(key, shape, scale):
    """bf16 normals made slice by slice, so that no f32 copy of a whole stack exists."""
    return jax.lax.map(
        lambda k: (jax.random.normal(k, shape[1:], jnp.float32) * scale).astype(jnp.bfloat16),
        jax.random.split(key, shape[0]),
    )


def median_time(f, *args, times=10, repeats=5):
    """Seconds a call takes when calls are queued back to back, and the spread of the repeats over their median."""
    jax.block_until_ready(f(*args))
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        out = [f(*args) for _ in range(times)]
        jax.block_until_ready(out)
        found.append((time.perf_counter() - begin) / times)
        del out
    middle = statistics.median(found)
    return middle, (max(found) - min(found)) / middle


def launches(f, *args, times=5):
    """``{kernel: median microseconds}`` of one call, by CUPTI."""
    from jax.experimental.mosaic.gpu import profiler

    _, found = profiler.Cupti(finalize=False).measure(f, aggregate=False, iterations=times)(*args)
    names = [name for name, _ in found[0]]
    times_us = [statistics.median(run[i][1] * 1e3 for run in found) for i in range(len(names))]
    return [(name[:40], round(us, 2)) for name, us in zip(names, times_us, strict=True)]


@jax.jit
def expected(x, ids, scale, weights):
    """FFN of a few tokens, an expert at a time, in f32 with the inner value rounded to bf16."""

    def one(total, given):
        expert, gate_up, down = given
        part = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
        inner = activate(part(x, gate_up.T), SWIGLU).astype(x.dtype)
        share = jnp.where(ids == expert, scale, 0).sum(1)
        return total + share[:, None] * part(inner, down.T), None

    experts = jnp.arange(weights.down.shape[0])
    total, _ = jax.lax.scan(one, jnp.zeros(x.shape, jnp.float32), (experts, weights.gate_up, weights.down))
    return total


def peer(name, x, weight, sizes):
    """JAX's ragged_dot_mgpu on unpadded sorted rows, best of a few tiles."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    best = None
    for block_m, block_n in ((128, 128), (64, 128)):
        run = jax.jit(
            functools.partial(
                ragged_dot, block_m=block_m, block_n=block_n, block_k=64, max_concurrent_steps=4, grid_block_n=4,
                transpose_rhs=True,
            )
        )  # fmt: skip
        ((_, us),) = launches(lambda a, b, g, run=run: run(a, b, group_sizes=g), x, weight, sizes)
        best = min(best or us, us)
    return best


def measure(name, tiles, deadline, options, cells):
    tokens, hidden, inner, experts, top_k = SHAPES[name]
    config = MoEConfig(router=RouterConfig(experts=experts, top_k=top_k), activation=SWIGLU)
    keys = jax.random.split(jax.random.key(len(name)), 4)
    x = normal(keys[0], (8, tokens // 8, hidden), 1.0).reshape(tokens, hidden)
    weights = ExpertWeights(
        gate_up=normal(keys[1], (experts, 2 * inner, hidden), hidden**-0.5),
        down=normal(keys[2], (experts, hidden, inner), inner**-0.5),
    )
    ids = random_ids(1, tokens, experts, top_k)
    scale = jax.random.uniform(keys[3], (tokens, top_k), jnp.float32) + 0.1
    routing = Routing(ids=jnp.asarray(ids), weights=scale)
    jax.block_until_ready(weights)
    flops_up, flops_down = tokens * top_k * 4 * hidden * inner, tokens * top_k * 2 * hidden * inner
    few = np.random.default_rng(2).choice(tokens, 256, replace=False)
    wanted = np.asarray(expected(x[few], routing.ids[few], scale[few], weights))

    for tile_name in tiles:
        if time.monotonic() > deadline:
            cells.append({"shape": name, "tile": tile_name, "skipped": "time"})
            continue
        cell = {"shape": name, "tile": tile_name}
        cells.append(cell)
        begin = time.monotonic()
        try:
            traced = jax.jit(lambda x, r, w, tile=TILES[tile_name]: ffn(x, r, w, config, tile=tile))
            # As prefill runs: a command buffer would be recorded anew whenever an address changes.
            run = traced.lower(x, routing, weights).compile(compiler_options={"xla_gpu_enable_command_buffer": ""})
            out = np.asarray(run(x, routing, weights)[few], np.float32)
            cell["error"] = float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))
            cell["compile_s"] = round(time.monotonic() - begin, 1)
            seconds, spread = median_time(run, x, routing, weights)
            cell["us"], cell["spread"] = round(seconds * 1e6, 1), round(spread, 3)
            cell["tflops"] = round((flops_up + flops_down) / seconds / 1e12, 1)
            cell["recorded_us"] = round(median_time(traced, x, routing, weights, repeats=3)[0] * 1e6, 1)
            found = launches(run, x, routing, weights)
            cell["launches"] = found
            by = {n: us for n, us in found}
            up = next(us for n, us in by.items() if "gate_up" in n)
            down = next(us for n, us in by.items() if "down" in n)
            cell["up_tflops"], cell["down_tflops"] = round(flops_up / up / 1e6, 1), round(flops_down / down / 1e6, 1)
            cell["rest_us"] = round(sum(us for _, us in found) - up - down, 1)
        except Exception as problem:
            cell["problem"] = f"{type(problem).__name__}: {str(problem)[:300]}"
            traceback.print_exc()
        print(json.dumps(cell), flush=True)
    if options.peer and time.monotonic() < deadline:
        sizes = jnp.asarray(np.bincount(ids.reshape(-1), minlength=experts).astype(np.int32))
        rows = jnp.take(x, jnp.asarray(np.argsort(ids.reshape(-1), kind="stable") // top_k), axis=0)
        try:
            us = peer(name, rows, weights.gate_up, sizes)
            cells.append({"shape": name, "tile": "ragged_dot_mgpu", "up_tflops": round(flops_up / us / 1e6, 1)})
        except Exception as problem:
            cells.append({"shape": name, "tile": "ragged_dot_mgpu", "problem": str(problem)[:300]})
        print(json.dumps(cells[-1]), flush=True)


def dry(tiles, shapes):
    """Lower every program for CUDA."""
    for name in shapes:
        tokens, hidden, inner, experts, top_k = SHAPES[name]
        config = MoEConfig(router=RouterConfig(experts=experts, top_k=top_k), activation=SWIGLU)
        struct = jax.ShapeDtypeStruct
        weights = ExpertWeights(
            gate_up=struct((experts, 2 * inner, hidden), jnp.bfloat16),
            down=struct((experts, hidden, inner), jnp.bfloat16),
        )
        routing = Routing(ids=struct((tokens, top_k), jnp.int32), weights=struct((tokens, top_k), jnp.float32))
        for tile_name in tiles:
            run = jax.jit(functools.partial(ffn, config=config, tile=TILES[tile_name]))
            run.trace(struct((tokens, hidden), jnp.bfloat16), routing, weights)
            print(name, tile_name, "traced", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tiles", default="shared,alone")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--json", default="mosaic_sweep.json")
    options = parser.parse_args()
    begin = time.monotonic()
    tiles, shapes = some_of("--tiles", options.tiles, TILES), some_of("--shapes", options.shapes, SHAPES)
    if options.dry:
        dry(tiles, shapes)
        return
    device, _ = measured_device("mosaic_sweep", simulated=False)
    cells: list[dict] = []
    results = {"device": device.device_kind, "jax": jax.__version__, "cells": cells}
    a, b = (normal(jax.random.key(i), (8, 1024, 8192), 1.0).reshape(8192, 8192) for i in (1, 2))
    seconds, _ = median_time(jax.jit(jnp.dot), a, b)
    results["ceiling_tflops"] = round(2 * 8192**3 / seconds / 1e12, 1)
    print("ceiling", results["ceiling_tflops"], "at", round(time.monotonic() - begin, 1), "s", flush=True)
    del a, b
    target = Path(os.environ.get("OUT", ".")) / options.json
    for name in shapes:
        try:
            measure(name, tiles, begin + options.seconds, options, cells)
        except Exception:
            traceback.print_exc()
        target.write_text(json.dumps(results, indent=1))
    print(f"ceiling {results['ceiling_tflops']} TFLOP/s, {time.monotonic() - begin:.0f} s")
    head = (
        "shape",
        "tile",
        "us",
        "recorded_us",
        "tflops",
        "up_tflops",
        "down_tflops",
        "rest_us",
        "error",
        "spread",
        "compile_s",
    )
    print(" ".join(f"{h:>12}" for h in head))
    for cell in cells:
        print(" ".join(f"{str(cell.get(h, '-'))[:12]:>12}" for h in head), cell.get("problem", "")[:80])
    sys.stdout.flush()


if __name__ == "__main__":
    told(main)
