"""Compile every kernel of the expert bench for sm_90 into a folder, without a GPU.

    python benchmarks/experts_build.py FOLDER [--jobs N]
"""

from __future__ import annotations

import argparse
import multiprocessing
from pathlib import Path

from experts_cases import BENCHED, BUCKETS, SHAPES, spec_for, variants

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
    try:
        compiled.load(folder, spec, 90)
        return f"kept  {shape} {tokens}"
    except ValueError:
        kernel = compiled.compile_spec(spec, 90)
    if kernel.shared > 227 * 1024:
        return f"too much shared memory {shape} {tokens} {tile}"
    compiled.save(folder, [kernel])
    use = compiled.resources(kernel)
    return f"built {shape} {tokens} {tile} pdl={pdl} {use} shared={kernel.shared}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    jobs = [(args.folder, case) for case in cases()]
    with multiprocessing.Pool(args.jobs) as pool:
        for line in pool.imap_unordered(build, jobs):
            print(line, flush=True)
