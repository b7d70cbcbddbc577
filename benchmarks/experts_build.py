"""Compile every kernel of the expert bench for sm_90 into a folder, without a GPU.

python benchmarks/experts_build.py FOLDER [--jobs N]
"""

from __future__ import annotations

import argparse
import multiprocessing
from pathlib import Path

from experts_cases import BENCHED, BUCKETS, SHAPES, plan_for, spec_for, variants

from moe_jax.pallas_kernels import compiled


def cases() -> list[tuple]:
    found = [(shape, tokens, None, False) for shape in SHAPES for tokens in BUCKETS]
    for shape in SHAPES:
        for tokens in BENCHED:
            found += [(shape, tokens, tile, pdl) for tile, pdl in variants(shape, tokens)]
    return list(dict.fromkeys(found))


def build(job: tuple) -> str:
    folder, (shape, tokens, tile, pdl) = job
    spec = spec_for(shape, tokens, tile, pdl=pdl)
    lines = []
    for part in (spec, plan_for(shape, spec, pdl=pdl)):
        if part is None:
            continue
        try:
            compiled.load(folder, part, 90)
        except ValueError:
            kernel = compiled.compile_spec(part, 90)
            compiled.save(folder, [kernel])
            use = compiled.resources(kernel)
            lines.append(f"{part.name} {use} shared={kernel.shared}")
    return f"{shape} {tokens} {tile} pdl={pdl}: {'; '.join(lines) or 'kept'}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    jobs = [(args.folder, case) for case in cases()]
    with multiprocessing.Pool(args.jobs) as pool:
        for line in pool.imap_unordered(build, jobs):
            print(line, flush=True)
