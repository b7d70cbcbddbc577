"""What the bench of the decode kernels times: launches, their inputs and the bytes they must move. And their cubins.

    python benchmarks/decode_ops_cases.py FOLDER [--capability NN] [--jobs N]

compiles all of them into a folder, without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from refusals import check_capability, told

from moe_jax.errors import MoeJaxError
from moe_jax.pallas_kernels import attention, compiled, linear
from moe_jax.pallas_kernels.kv_append import kv_append_spec
from moe_jax.pallas_kernels.route import RouterConfig
from moe_jax.pallas_kernels.route import heuristics as route_tiles
from moe_jax.pallas_kernels.route.specs import route_logits_spec, route_spec
from moe_jax.pallas_kernels.sample import sample_specs
from moe_jax.pallas_kernels.spec import KernelSpec

OPERATIONS = ("linear", "route", "attention", "append", "sample")
ROWS = (1, 4, 16, 64)
EPS, DTYPE, ITEM = 1e-6, "bfloat16", 2
# What rotates through a chain of launches is at least this much, so that L2 is cold.
COLD_BYTES = 256 * 2**20
VOCABULARY = 151936
HEADS, KV_HEADS, DIM, PAGE, SEQUENCES = 32, 4, 128, 64, 64
LONGEST, LENGTHS = 32768, (1024, 8192, 32768)
PAGES = SEQUENCES * LONGEST // PAGE + 1
PAGED = {"dtype": DTYPE, "sequences": SEQUENCES, "pages": PAGES, "page_size": PAGE, "max_pages": LONGEST // PAGE}

Arrays = dict[str, jax.Array]
# The projections of Qwen3-30B-A3B: inputs, outputs, what is fused.
LINEARS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "qkv": (2048, 5120, {"norm_eps": EPS}),
    "out": (4096, 2048, {"residual": True}),
    "head": (2048, VOCABULARY, {"norm_eps": EPS, "out_dtype": "float32"}),
}
QWEN3 = RouterConfig(experts=128, top_k=8, renormalize=True)
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_p, flat": {"temperature": 0.8, "top_p": 0.9},
}


class Case(NamedTuple):
    """Launches in a row at one number of rows.

    Attributes:
        variant: how it differs from the one that is shipped; "" for that one.
        steps: inputs by argument name, one dictionary a step of the chain; what does not rotate is shared.
        moved: bytes that must be moved.
        bar_us: microseconds to reach, from those that the bytes take; None: no bar.
        checked: whether the last launch is compared with its reference.
    """

    operation: str
    name: str
    rows: int
    variant: str
    specs: tuple[KernelSpec, ...]
    steps: Callable[[np.random.Generator], list[Arrays]]
    moved: int
    bar_us: Callable[[float], float] | None
    checked: bool = True


def cases(operation: str) -> Iterator[Case]:
    """Every case of an operation, the shipped variant of each before the others."""
    return {
        "linear": _linears,
        "route": _routes,
        "attention": _attentions,
        "append": _appends,
        "sample": _samples,
    }[operation]()


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0, dtype: str = DTYPE) -> jax.Array:
    """Normal numbers, made on the device."""
    key = jax.random.key(int(rng.integers(2**31)))
    return jax.jit(lambda key: (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype))(key)


def int32(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.int32))


def _linears() -> Iterator[Case]:
    for name, (inputs, outputs, options) in LINEARS.items():
        size = inputs * outputs * ITEM
        count = max(2, math.ceil(COLD_BYTES / size))
        for rows in ROWS:
            base = linear.tile_for(rows, inputs, outputs, DTYPE)
            variants = {"": (base, True), "no pdl": (base, False)}
            if base.early:
                part = inputs // base.split
                variants |= {f"k {k}": (dataclasses.replace(base, block_k=k), True) for k in (256, 512) if k <= part}
            moved = size + rows * (inputs * ITEM + outputs * (4 if "out_dtype" in options else ITEM))

            def steps(rng, rows=rows, inputs=inputs, outputs=outputs, options=options, count=count) -> list[Arrays]:
                given = {"x_ptr": normal(rng, rows, inputs)}
                if "norm_eps" in options:
                    given["gain_ptr"] = normal(rng, inputs)
                if "residual" in options:
                    given["residual_ptr"] = normal(rng, rows, outputs)
                return [given | {"w_ptr": normal(rng, outputs, inputs, scale=inputs**-0.5)} for _ in range(count)]

            bar = (lambda floor: 1.06 * floor) if name == "head" else (lambda floor: floor + 2)
            for variant, (tile, pdl) in variants.items():
                spec = linear.linear_spec(rows, inputs, outputs, dtype=DTYPE, tile=tile, pdl=pdl, **options)
                yield Case("linear", name, rows, variant, (spec,), steps, moved, bar)


def _routes() -> Iterator[Case]:
    hidden, experts, count = 2048, QWEN3.experts, 256
    base = route_tiles.tile_for(hidden, experts, DTYPE)
    wide = dataclasses.replace(base, block_k=256, split=8)
    for rows in (*ROWS, 256):

        def steps(rng, rows=rows) -> list[Arrays]:
            given = {"x_ptr": normal(rng, rows, hidden, scale=3.0), "gain_ptr": normal(rng, hidden)}
            stacks = normal(rng, count, experts, hidden, scale=2 * hidden**-0.5)
            return [given | {"w_ptr": w} for w in stacks]

        def finished(rng, rows=rows) -> list[Arrays]:
            return [{"logits_ptr": normal(rng, rows, experts, dtype="float32")} for _ in range(64)]

        bar = (lambda floor: 5.0) if rows <= 64 else None
        for variant, tile, pdl in (("", base, True), ("no pdl", base, False), ("k 256 by 8", wide, True)):
            spec = route_spec(rows, hidden, QWEN3, dtype=DTYPE, norm_eps=EPS, tile=tile, pdl=pdl)
            yield Case("route", "rows", rows, variant, (spec,), steps, experts * hidden * ITEM, bar)
        logits = route_logits_spec(rows, QWEN3, pdl=True)
        yield Case("route", "logits", rows, "", (logits,), finished, 4 * rows * experts, None)


def _attentions() -> Iterator[Case]:
    for rows in ROWS:
        base = attention.schedule_for(rows)
        for length in LENGTHS:
            moved = rows * length * KV_HEADS * DIM * ITEM * 2

            def steps(rng, rows=rows, length=length, moved=moved) -> list[Arrays]:
                used, order = length // PAGE, rng.permutation(PAGES - 1) + 1
                given = {"position_ptr": int32([length - 1] * rows), "sequence_ptr": int32(range(rows))}
                given |= {f"{x}_pages_ptr": normal(rng, PAGES, KV_HEADS, PAGE, DIM) for x in "kv"}
                found = []
                for i in range(min(128, max(1, COLD_BYTES // moved))):
                    table = np.zeros((SEQUENCES, LONGEST // PAGE), np.int32)
                    start = i * rows * used % max(1, len(order) - rows * used + 1)
                    table[:rows, :used] = order[start : start + rows * used].reshape(rows, used)
                    q = normal(rng, rows, HEADS * DIM)
                    found.append(given | {"table_ptr": int32(table), "q_ptr": q})
                return found

            for variant, schedule, pdl in (
                *(("", base, True), ("no pdl", base, False)),
                ("splits of 8", dataclasses.replace(base, split=8, stretch=4), True),
                ("twice as many pieces", dataclasses.replace(base, fill=2 * base.fill), True),
            ):
                specs = attention.attention_specs(rows, HEADS, KV_HEADS, DIM, **PAGED, schedule=schedule, pdl=pdl)
                yield Case(
                    *("attention", str(length), rows, variant, specs, steps, moved),
                    bar_us=lambda floor: 1.15 * floor + 4,
                )


def _appends() -> Iterator[Case]:
    options = {"positions": LONGEST, "norm": "head", "eps": EPS}

    def steps(rng, rows: int) -> list[Arrays]:
        given = {f"{x}_gain_ptr": normal(rng, DIM) for x in "qk"}
        given |= {"cos_ptr": jnp.ones((LONGEST, DIM // 2)), "sin_ptr": jnp.zeros((LONGEST, DIM // 2))}
        given |= {f"{x}_pages_ptr": jnp.zeros((PAGES, KV_HEADS, PAGE, DIM), DTYPE) for x in "kv"}
        table = rng.permutation(PAGES - 1).reshape(SEQUENCES, -1) + 1
        given |= {"table_ptr": int32(table), "sequence_ptr": int32(range(rows))}
        width = (HEADS + 2 * KV_HEADS) * DIM
        return [
            given | {"qkv_ptr": normal(rng, rows, width), "position_ptr": int32(rng.integers(0, LONGEST, rows))}
            for _ in range(32)
        ]

    for rows in ROWS:
        moved = 2 * rows * (HEADS + 2 * KV_HEADS) * DIM * ITEM
        for variant, pdl in (("", True), ("no pdl", False)):
            spec = kv_append_spec(rows, HEADS, KV_HEADS, DIM, **PAGED, **options, pdl=pdl)
            # It changes what it is given: its tests compare it with the reference.
            make = lambda rng, rows=rows: steps(rng, rows)  # noqa: E731
            yield Case("append", "heads", rows, variant, (spec,), make, moved, None, checked=False)


def _samples() -> Iterator[Case]:
    for name, options in SAMPLING.items():
        for rows in ROWS:
            moved = 4 * rows * VOCABULARY

            def steps(rng, name=name, rows=rows, options=options, moved=moved) -> list[Arrays]:
                full = lambda key, other, dtype: jnp.full((rows,), options.get(key, other), dtype)  # noqa: E731
                given = {
                    "temperature_ptr": full("temperature", 0, jnp.float32),
                    "top_k_ptr": full("top_k", 0, jnp.int32),
                    "top_p_ptr": full("top_p", 1, jnp.float32),
                    "seed_ptr": int32(rng.integers(-(2**31), 2**31, (rows, 2))),
                    "sequence_ptr": int32(range(rows)),
                }
                found = []
                for _ in range(min(64, max(2, COLD_BYTES // moved))):
                    logits = normal(rng, rows, VOCABULARY, scale=2.0, dtype="float32")
                    if "flat" not in name:
                        # Peaked as a language model's: a few tokens hold most of the probability.
                        logits = logits.at[:, ::1001].add(8)
                    found.append(given | {"logits_ptr": logits, "position_ptr": int32(rng.integers(0, 1000, rows))})
                return found

            for variant, pdl in (("", True), ("no pdl", False)):
                specs = sample_specs(rows, VOCABULARY, pdl=pdl)
                yield Case("sample", name, rows, variant, specs, steps, moved, None)


def specs() -> tuple[KernelSpec, ...]:
    """Every launch of every case, each once."""
    found = [spec for operation in OPERATIONS for case in cases(operation) for spec in case.specs]
    return tuple({spec.key: spec for spec in found}.values())


def build(job: tuple[Path, int, int]) -> str:
    """Compile one spec by its number, unless the folder has it; a line that says what it takes."""
    folder, number, capability = job
    spec = specs()[number]
    try:
        compiled.load(folder, spec, capability)
        return f"{number} {spec.name}: kept"
    except MoeJaxError:
        kernel = compiled.compile_spec(spec, capability)
        compiled.save(folder, [kernel])
        return f"{number} {spec.name} {spec.grid}: {compiled.resources(kernel)} shared={kernel.shared}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    check_capability(args.capability)
    jobs = [(args.folder, number, args.capability) for number in range(len(specs()))]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for line in pool.imap_unordered(build, jobs):
            print(line, flush=True)


if __name__ == "__main__":
    told(main)
