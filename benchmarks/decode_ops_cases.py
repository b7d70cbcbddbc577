"""Shapes and tiles of the benches of the decode kernels, and their cubins.

    python benchmarks/decode_ops_cases.py FOLDER [--jobs N]

compiles all of them for sm_90 into a folder, without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing
from pathlib import Path
from typing import NamedTuple

from moe_jax.pallas_kernels import attention, compiled, linear
from moe_jax.pallas_kernels.kv_append import kv_append_spec
from moe_jax.pallas_kernels.route import RouterConfig
from moe_jax.pallas_kernels.route import heuristics as route_tiles
from moe_jax.pallas_kernels.route.specs import route_spec
from moe_jax.pallas_kernels.sample import sample_specs
from moe_jax.pallas_kernels.spec import KernelSpec

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
BENCHED = (1, 4, 16, 64)
# Rows at which tiles are tried; the others time the shipped one.
SWEPT = (1, 16)
EPS = 1e-6
DTYPE = "bfloat16"
VOCABULARY = 151936
HEADS, KV_HEADS, DIM, PAGE = 32, 4, 128, 64
LONGEST = 32768
LENGTHS = (1024, 8192, 32768)


class Linear(NamedTuple):
    """A projection of the model: sizes, and what is fused with it."""

    inputs: int
    outputs: int
    options: tuple[tuple[str, object], ...]


LINEARS = {
    "qkv": Linear(2048, 5120, (("norm_eps", EPS),)),
    "out": Linear(4096, 2048, (("residual", True),)),
    "head": Linear(2048, VOCABULARY, (("norm_eps", EPS), ("out_dtype", "float32"))),
}
QWEN3 = RouterConfig(experts=128, top_k=8, renormalize=True)
# H, router, options
ROUTERS = {
    "qwen3": (2048, QWEN3, {}),
    "olmoe": (2048, RouterConfig(experts=64, top_k=8), {}),
    "mixtral": (4096, RouterConfig(experts=8, top_k=2, renormalize=True), {}),
    "gpt-oss": (2880, RouterConfig(experts=32, top_k=4, score="topk_softmax"), {"bias": DTYPE}),
    "deepseek-v3": (
        7168,
        RouterConfig(
            experts=256, top_k=8, score="sigmoid", renormalize=True, scaling_factor=2.5, groups=8, groups_kept=4
        ),
        {"selection_bias": True},
    ),
}


def linear_case(name: str, rows: int, tile: linear.Tile | None = None, pdl: bool = True) -> KernelSpec:
    shape = LINEARS[name]
    return linear.linear_spec(
        rows, shape.inputs, shape.outputs, dtype=DTYPE, tile=tile, pdl=pdl, **dict(shape.options)
    )  # fmt: skip


def linear_variants(name: str, rows: int) -> list[tuple[linear.Tile, bool]]:
    """Tile and programmatic launch; the shipped ones first. A change of the split is another arithmetic."""
    shape = LINEARS[name]
    base = linear.tile_for(rows, shape.inputs, shape.outputs, DTYPE)
    change = lambda **fields: dataclasses.replace(base, **fields)  # noqa: E731
    plain = change(early=False, block_m=64, num_warps=4, num_stages=4 if rows <= 8 else 3)
    found = [(base, True), (base, False)]
    if base.early:
        found += [(change(block_m=64, num_warps=4), True), (plain, False)]
        if rows in SWEPT:
            found += [(change(split=base.split * 2), True), (change(split=base.split // 2), True)]
    elif rows > 16:
        found += [(plain, False), (change(num_stages=3), False)]
    return list(dict.fromkeys(found))


def route_case(name: str, rows: int, tile: route_tiles.Tile | None = None, pdl: bool = True) -> KernelSpec:
    hidden, config, options = ROUTERS[name]
    return route_spec(rows, hidden, config, dtype=DTYPE, norm_eps=EPS, masked=True, tile=tile, pdl=pdl, **options)


def route_variants(rows: int) -> list[tuple[route_tiles.Tile, bool]]:
    base = route_tiles.tile_for(2048, 128, DTYPE)
    change = lambda **fields: dataclasses.replace(base, **fields)  # noqa: E731
    tiles = [change(split=8), change(block_k=256, split=8)]
    return [(base, True), (base, False)] + [(tile, True) for tile in tiles if rows in SWEPT]


def append_case(rows: int, pages: int) -> KernelSpec:
    return kv_append_spec(
        rows, HEADS, KV_HEADS, DIM, dtype=DTYPE, sequences=64, pages=pages, page_size=PAGE,
        max_pages=LONGEST // PAGE, positions=LONGEST, norm="head", eps=EPS, pdl=True,
    )  # fmt: skip


def attention_case(
    rows: int, pages: int, schedule: attention.Schedule | None = None, **options
) -> tuple[KernelSpec, ...]:
    options = {"pdl": True} | options
    return attention.attention_specs(
        rows, HEADS, KV_HEADS, DIM, dtype=DTYPE, sequences=64, pages=pages, page_size=PAGE,
        max_pages=LONGEST // PAGE, schedule=schedule, **options,
    )  # fmt: skip


# Pages of the pools: small for the checks, 64 sequences of the longest for the bench.
CHECK_PAGES, BENCH_PAGES = 2049, 64 * LONGEST // PAGE + 1
CHECKED_ATTENTION = (
    {"window": 1000, "sink": True},
    {"rows_of_sequence": 4},
)


def schedules(rows: int) -> list[tuple[attention.Schedule, bool]]:
    make = attention.Schedule
    found = [(attention.schedule_for(rows), True)]
    if rows in (1, 4):
        return found + [(make(num_stages=8 - found[0][0].num_stages), True)]
    return found + [(make(fill=512), True)]


@functools.cache
def specs() -> tuple[KernelSpec, ...]:
    """Everything the bench loads."""
    found: list[KernelSpec] = []
    for rows in BUCKETS:
        found += [linear_case(name, rows) for name in LINEARS]
        found += [route_case("qwen3", rows)]
        found += [append_case(rows, CHECK_PAGES), *attention_case(rows, CHECK_PAGES)]
    found += [route_case(name, 9) for name in ROUTERS] + [route_case("qwen3", 256)]
    for options in CHECKED_ATTENTION:
        found += [
            *attention_case(8, CHECK_PAGES, **options),
            *attention_case(1, CHECK_PAGES, **{"window": options.get("window"), "sink": options.get("sink", False)}),
        ]
    for rows in BENCHED:
        found += sample_specs(rows, VOCABULARY, pdl=True)
        for name in LINEARS:
            found += [linear_case(name, rows, *variant) for variant in linear_variants(name, rows)]
        found += [route_case("qwen3", rows, *variant) for variant in route_variants(rows)]
        found += [append_case(rows, BENCH_PAGES)]
        for schedule, pdl in schedules(rows):
            found += attention_case(rows, BENCH_PAGES, schedule, pdl=pdl)
    found += sample_specs(8, VOCABULARY, pdl=True)
    return tuple({spec.key: spec for spec in found}.values())


def build(job: tuple[Path, int]) -> str:
    folder, number = job
    spec = specs()[number]
    try:
        compiled.load(folder, spec, 90)
        return f"{number} {spec.name}: kept"
    except ValueError:
        kernel = compiled.compile_spec(spec, 90)
        compiled.save(folder, [kernel])
        return f"{number} {spec.name} {spec.grid}: {compiled.resources(kernel)} shared={kernel.shared}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    jobs = [(args.folder, number) for number in range(len(specs()))]
    with multiprocessing.Pool(args.jobs) as pool:
        for line in pool.imap_unordered(build, jobs):
            print(line, flush=True)
