"""Compile the kernels of the engines that `moe-jax bench decode` measures into a folder of cubins, without a GPU.

    python benchmarks/decode_build.py FOLDER [--shape NAME] [--rows N,N,…] [--context N] [--jobs N]

`moe-jax bench decode --cubins FOLDER` takes them from there.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

from refusals import check_capability, told

from moe_jax.bench.cases import parse_rows
from moe_jax.bench.decode import positions
from moe_jax.bench.decode_model import config_of
from moe_jax.bench.read import read_specs
from moe_jax.cache import row_buckets
from moe_jax.engine.options import PAGE_SIZE
from moe_jax.engine.step import Geometry, build
from moe_jax.engine.weights import module_places
from moe_jax.models.config import ModelConfig
from moe_jax.models.decoder import abstract_decoder
from moe_jax.pallas_kernels import compiled
from moe_jax.pallas_kernels.linear.heuristics import MAX_ROWS
from moe_jax.pallas_kernels.spec import KernelSpec


def geometry(config: ModelConfig, rows: int, context: int, device_kind: str, capability: int) -> Geometry:
    """Of the engine that the bench makes for this many sequences."""
    places = module_places(abstract_decoder(config))
    shapes = {name: getattr(*place).get_value() for name, place in places.items()}
    return Geometry.of(
        config, shapes, max_sequences=rows, max_tokens=context + positions(), page_size=PAGE_SIZE, pages=None,
        chunk=MAX_ROWS, device_kind=device_kind, capability=capability,
    )  # fmt: skip


def specs_of(geometry: Geometry) -> Iterator[KernelSpec]:
    """Every kernel of the engine's launch lists."""
    steps = build(geometry, row_buckets(geometry.max_sequences), row_buckets(MAX_ROWS))
    for lists in (steps.decode, steps.prompt):
        for launches in lists.values():
            yield from launches.specs


# What a worker is told of a kernel is its number: specs hold functions that no pickle takes along.
_jobs: tuple[list[KernelSpec], Path, int] | None = None


def _prepare(folder: Path, shape: str, rows: tuple[int, ...], context: int, device_kind: str, capability: int) -> None:
    global _jobs
    config = config_of(shape)
    found = {spec.key: spec for spec in read_specs()}
    for count in rows:
        found |= {spec.key: spec for spec in specs_of(geometry(config, count, context, device_kind, capability))}
    _jobs = list(found.values()), folder, capability


def _compile(number: int) -> str:
    assert _jobs is not None
    specs, folder, capability = _jobs
    spec = specs[number]
    try:
        compiled.load(folder, spec, capability)
    except ValueError:  # not there, or stale
        kernel = compiled.compile_spec(spec, capability)
        compiled.save(folder, [kernel])
        return f"{spec.name} {compiled.resources(kernel)}"
    return f"{spec.name} kept"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--device", default="NVIDIA H200", help="kind whose tuned tiles are built")
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    check_capability(args.capability)
    options = args.folder, args.shape, parse_rows(args.rows), args.context, args.device, args.capability
    _prepare(*options)
    args.folder.mkdir(parents=True, exist_ok=True)
    assert _jobs is not None
    count = len(_jobs[0])
    with multiprocessing.get_context("spawn").Pool(args.jobs, _prepare, options) as pool:
        for done, line in enumerate(pool.imap_unordered(_compile, range(count)), 1):
            print(f"{done} of {count}: {line}", flush=True)


if __name__ == "__main__":
    told(main)
