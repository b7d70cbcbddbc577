"""Compile the expert layer's launches into a folder of cubins, without a GPU.

    python benchmarks/experts_build.py FOLDER [--shape NAME|H,I,E,K …] [--rows N,N,…] [--device KIND]
                                      [--tune] [--jobs N]

`moe-jax bench kernels --cubins FOLDER` measures them, `benchmarks/tune.py --cubins FOLDER` searches among them.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from experts_cases import Planned, default_shapes, searched, shipped
from refusals import check_capability, told

from moe_jax.bench.cases import default_rows, parse_rows, parse_shape
from moe_jax.bench.read import read_specs
from moe_jax.pallas_kernels import compiled
from moe_jax.pallas_kernels.experts import MAX_ROWS

FAILED = "FAILED: "  # in a line of `build`, before the reason


def build(folder: Path, planned: Iterable[Planned], capability: int, jobs: int) -> Iterator[str]:
    """Compile what the folder lacks; a line for each launch."""
    work = [(folder, launch, capability) for launch in dict.fromkeys(planned)]
    with multiprocessing.get_context("spawn").Pool(min(jobs, max(1, len(work)))) as pool:
        yield from pool.imap_unordered(_build, work)


def _build(job: tuple[Path, Planned | None, int]) -> str:
    """``None`` stands for the kernels that the read rate is measured with."""
    folder, launch, capability = job
    lines = []
    for spec in read_specs() if launch is None else launch.specs():
        try:
            compiled.load(folder, spec, capability)
        except ValueError:  # not there, stale, or being written by another process
            try:
                kernel = compiled.compile_spec(spec, capability)
            except Exception as error:  # a tile that the compiler cannot take is no reason to stop
                lines.append(f"{spec.name} {FAILED}{type(error).__name__}: {str(error)[:120]}")
                continue
            compiled.save(folder, [kernel])
            lines.append(f"{spec.name} {compiled.resources(kernel)} shared={kernel.shared}")
    return f"{launch or 'stream read'}: {'; '.join(lines) or 'kept'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", action="append", default=[])
    parser.add_argument("--rows")
    parser.add_argument("--device", default="NVIDIA H200", help="kind whose tuned tiles are built")
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--tune", action="store_true", help="also every tile that tuning may time")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    check_capability(args.capability)
    shapes = [parse_shape(text) for text in args.shape] or default_shapes()
    planned = []
    for shape in shapes:
        for tokens in parse_rows(args.rows) if args.rows else default_rows(shape):
            planned += shipped(shape, tokens, args.device, args.capability)
            planned += searched(shape, tokens) if args.tune and tokens <= MAX_ROWS else []
    failures = 0
    reading = _build((args.folder, None, args.capability))
    for line in itertools.chain((reading,), build(args.folder, planned, args.capability, args.jobs)):
        print(line, flush=True)
        failures += line.count(FAILED)
    if failures:
        sys.exit(f"error: {failures} kernels failed to compile")


if __name__ == "__main__":
    told(main)
