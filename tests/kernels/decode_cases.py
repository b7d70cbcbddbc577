"""Tiles and random buffers shared by the tests of the decode kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.pallas_kernels.compiled import compile_spec, disassembly, resources
from moe_jax.pallas_kernels.linear import Tile
from moe_jax.pallas_kernels.spec import KernelSpec

BUCKETS = (1, 2, 4, 8, 16, 32, 64)


def small_linear_tile(rows: int, split: int) -> Tile:
    """Several steps and parts even for short reductions."""
    return Tile(
        block_m=16, block_k=16, split=split, num_warps=4, block_n=max(8, 1 << (rows - 1).bit_length()), num_stages=2
    )


def kv_case(rng, *, rows: int, sequences: int, pages: int, page_size: int, max_pages: int, positions: int) -> dict:
    """Block table without shared pages, and rows at different places of their sequences, one of them not there."""
    table = (rng.permutation(pages - 1)[: sequences * max_pages] + 1).astype(np.int32).reshape(sequences, max_pages)
    places = rng.permutation(sequences * min(positions, max_pages * page_size))[:rows]
    position, sequence = (places // sequences).astype(np.int32), (places % sequences).astype(np.int32)
    if rows > 2:
        position[1] = -1
    return {"table_ptr": table, "position_ptr": position, "sequence_ptr": sequence}


def sample_case(rng, rows: int, vocabulary: int, kind: str) -> dict[str, np.ndarray]:
    """Inputs of the sampling kernels, in the reference's order."""
    with_k, with_p = kind in ("top_k", "both"), kind in ("top_p", "both")
    position = rng.integers(0, 1000, rows).astype(np.int32)
    if rows > 2:
        position[2] = -1
    return {
        "logits_ptr": (3 * rng.standard_normal((rows, vocabulary))).astype(np.float32),
        "position_ptr": position,
        "sequence_ptr": rng.integers(0, 1000, rows).astype(np.int32),
        "seed_ptr": rng.integers(-(2**31), 2**31, (rows, 2)).astype(np.int32),
        "temperature_ptr": np.zeros(rows, np.float32)
        if kind == "greedy"
        else rng.uniform(0.3, 2, rows).astype(np.float32),
        "top_k_ptr": rng.integers(1, 30, rows).astype(np.int32) if with_k else np.zeros(rows, np.int32),
        "top_p_ptr": rng.uniform(0.05, 0.95, rows).astype(np.float32) if with_p else np.ones(rows, np.float32),
    }


def run_interpreted(name: str) -> None:
    """Run the tests of one operation in interpreted_decode.py, where Triton interprets from its import on."""
    here = Path(__file__).parent
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(here / "interpreted_decode.py"),
        "-k",
        name,
    ]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def check_compiled(spec: KernelSpec, capability: int) -> None:
    """No spills, no stack, and with programmatic launch nothing is read before the wait but what may be."""
    kernel = compile_spec(spec, capability)
    use = resources(kernel)
    assert use.stack == use.local == 0, f"{spec.name} sm_{capability}: {use}"
    assert use.registers * kernel.threads <= 65536 and kernel.shared <= (163 if capability == 80 else 227) * 1024, use
    if spec.pdl:
        lines = disassembly(kernel).splitlines()
        wait = [number for number, line in enumerate(lines) if "ACQBULK" in line]
        assert wait, f"{spec.name} never waits for the kernel before"
        early = [line for line in lines[: wait[0]] if re.search(r"\b(LD|LDG|LDGSTS|ST|STG|ATOM|ATOMG|RED)\b", line)]
        # Weights, which no kernel of a step writes, are the one thing that is read before the wait.
        reads_weights = spec.name == "route" or dict(spec.constexprs).get("EARLY")
        wrong = [line for line in early if not (reads_weights and re.search(r"\bLDG\b", line))]
        assert not wrong, f"{spec.name}: {wrong[0]}"


def on_device(specs: tuple[KernelSpec, ...], given: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Launch kernels in a row on the GPU, outputs poisoned; results of all of them."""
    from cuda.core import Device

    from moe_jax.pallas_kernels.launcher import load_kernel

    device = Device()
    device.set_current()
    major, minor = device.compute_capability
    stream, buffers = device.create_stream(), dict(given)
    for a in (a for spec in specs for a in spec.arguments if a.name not in buffers):
        poison = 0 if a.role in ("in", "state") else -7 if a.dtype == "int32" else np.nan
        buffers[a.name] = jnp.full(a.shape, poison, a.dtype)
    jax.block_until_ready(buffers)
    for spec in specs:
        kernel = load_kernel(spec, compile_spec(spec, 10 * major + minor))
        kernel.launch(stream, [buffers[a.name].unsafe_buffer_pointer() for a in spec.arguments])
    stream.sync()
    for a in (a for spec in specs for a in spec.arguments if a.role == "state"):
        assert not np.asarray(buffers[a.name]).any()
    return {name: np.asarray(value) for name, value in buffers.items()}


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


def positions_of(rows: int) -> set[int]:
    return {0, 1 % rows, rows // 2, rows - 1}
