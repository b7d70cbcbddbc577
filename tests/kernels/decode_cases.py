"""Random buffers, runs and oracles shared by the tests of linear, attention and kv_append."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

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


def kv_case(
    rng: np.random.Generator, *, rows: int, sequences: int, pages: int, page_size: int, max_pages: int, positions: int
) -> dict[str, np.ndarray]:
    """Block table without shared pages, and rows at different places of their sequences, one of them not there."""
    table = (rng.permutation(pages - 1)[: sequences * max_pages] + 1).astype(np.int32).reshape(sequences, max_pages)
    places = rng.permutation(sequences * min(positions, max_pages * page_size))[:rows]
    position, sequence = (places // sequences).astype(np.int32), (places % sequences).astype(np.int32)
    if rows > 2:
        position[1] = -1
    return {"table_ptr": table, "position_ptr": position, "sequence_ptr": sequence}


# -- oracles in f64, written row by row -------------------------------------------------------------------------------


def linear_oracle(x, w, gain=None, bias=None, residual=None, eps: float = 1e-6) -> np.ndarray:
    x, w = np.float64(x), np.float64(w)
    if gain is not None:
        x = x / np.sqrt((x**2).mean(1, keepdims=True) + eps) * np.float64(gain)
    return x @ w.T + (0 if bias is None else np.float64(bias)) + (0 if residual is None else np.float64(residual))


def attention_oracle(q, k_pages, v_pages, table, position, sequence, sink=None, scale=None, window=None) -> np.ndarray:
    """``[T, heads, D]``, key by key through the table."""
    q, k_pages, v_pages = (np.asarray(a).astype(np.float64) for a in (q, k_pages, v_pages))
    out, (_, kv_heads, page, dim) = np.zeros(q.shape), k_pages.shape
    for t, (last, s) in enumerate(zip(position.tolist(), sequence.tolist(), strict=True)):
        if last < 0:
            continue
        keys = range(0 if window is None else max(0, last - window + 1), last + 1)
        at = [(int(table[s, key // page]), key % page) for key in keys]
        for head in range(q.shape[1]):
            of = head // (q.shape[1] // kv_heads)
            k, v = (np.array([pool[n, of, i] for n, i in at]) for pool in (k_pages, v_pages))
            score = k @ q[t, head] * (dim**-0.5 if scale is None else scale)
            if sink is not None:
                score = np.append(score, np.float64(sink[head]))
            p = np.exp(score - score.max())
            out[t, head] = p[: len(at)] @ v / p.sum()
    return out


def append_oracle(
    qkv, cos, sin, k_pages, v_pages, table, position, sequence, norm=None, q_gain=None, k_gain=None, eps=1e-6, clip=None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(q [T, heads, D], k_pages, v_pages)``, row by row."""
    (number, kv_heads, page, dim), new = k_pages.shape, [np.array(p, np.float64) for p in (k_pages, v_pages)]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    queries = np.zeros((qkv.shape[0], heads, dim))

    def normed(x, gain):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * np.float64(gain)

    def turned(x, p):
        low, high = x[:, : dim // 2], x[:, dim // 2 :]
        return np.concatenate([low * cos[p] - high * sin[p], high * cos[p] + low * sin[p]], 1)

    for t, (p, s) in enumerate(zip(position.tolist(), sequence.tolist(), strict=True)):
        if not 0 <= p < cos.shape[0]:
            continue
        q, k, v = np.split(np.float64(qkv[t]), [heads * dim, (heads + kv_heads) * dim])
        if norm == "projection":
            q, k = normed(q, q_gain), normed(k, k_gain)
        q, k, v = (np.clip(a, -(clip or np.inf), clip or np.inf).reshape(-1, dim) for a in (q, k, v))
        if norm == "head":
            q, k = normed(q, q_gain), normed(k, k_gain)
        queries[t] = turned(q, p)
        target = table[s, p // page] if 0 <= s < table.shape[0] and p // page < table.shape[1] else -1
        if 0 <= target < number:
            new[0][target, :, p % page], new[1][target, :, p % page] = turned(k, p), v
    return queries, *new


# -- runs -------------------------------------------------------------------------------------------------------------


def check_compiled(spec: KernelSpec, capability: int) -> None:
    """No spills, no stack; with programmatic launch what may be read before the wait is, and nothing else."""
    kernel = compile_spec(spec, capability)
    use = resources(kernel)
    assert use.stack == use.local == 0, f"{spec.name} sm_{capability}: {use}"
    assert (kernel.global_scratch, kernel.profile_scratch) == (0, 0)
    assert use.registers * kernel.threads <= 65536 and kernel.shared <= (163 if capability == 80 else 227) * 1024, use
    if spec.pdl:
        lines = disassembly(kernel).splitlines()
        wait, launch = ([n for n, line in enumerate(lines) if name in line] for name in ("ACQBULK", "PREEXIT"))
        assert wait, f"{spec.name} never waits for the kernel before"
        assert launch and (launch[0] > wait[0]) == spec.opens, f"{spec.name} lets the next launch start at {launch}"
        touches = re.compile(r"\b(LD|LDG|LDGSTS|ST|STG|ATOM|ATOMG|RED|REDG|UBLKPF)\b")
        early = [line for line in lines[: wait[0]] if touches.search(line)]
        # What of it is read, `interpreting.run_early` shows.
        wrong = [line for line in early if not (spec.early and re.search(r"\b(LDG|LDGSTS)\b", line))]
        assert not wrong, f"{spec.name}: {wrong[0]}"
        assert bool(early) == bool(spec.early), f"{spec.name} reads nothing before it waits, and might"


def on_a_gpu(specs: tuple[KernelSpec, ...], given: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Outputs and changed inputs of some kernels in a row, launched raw and inside jit, which must have equal bits."""
    changed = [a.name for spec in specs for a in spec.arguments if a.role == "inout"]
    names = [*changed, *(a.name for a in specs[-1].outputs)]
    # Raw launches write into the arrays they are given.
    raw = _raw(specs, {name: jnp.copy(value) if name in changed else value for name, value in given.items()})
    inside = _inside_jit(specs, given)
    for name in names:
        same_bits(raw[name], inside[name])
    return {name: raw[name] for name in names}


def _raw(specs: tuple[KernelSpec, ...], given: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
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
        kernel = load_kernel(spec, _compiled(spec.key, lambda spec=spec: compile_spec(spec, 10 * major + minor)))
        kernel.launch(stream, [buffers[a.name].unsafe_buffer_pointer() for a in spec.arguments])
    stream.sync()
    for a in (a for spec in specs for a in spec.arguments if a.role == "state"):
        assert not np.asarray(buffers[a.name]).any(), f"{a.name} is not left at zero"
    return {name: np.asarray(value) for name, value in buffers.items()}


def _inside_jit(specs: tuple[KernelSpec, ...], given: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    from moe_jax.pallas_kernels.in_jit import call

    def run(given):
        buffers = dict(given)
        for spec in specs:
            for a in spec.inputs:
                buffers.setdefault(a.name, jnp.zeros(a.shape, a.dtype))
            refs = {a.name: jax.new_ref(buffers[a.name]) for a in spec.inputs if a.role == "inout"}
            out = call(spec, [refs.get(a.name, buffers[a.name]) for a in spec.inputs])
            buffers |= {name: jax.freeze(ref) for name, ref in refs.items()}
            buffers |= {a.name: value for a, value in zip(spec.outputs, out, strict=True)}
        return buffers

    jitted = _compiled("jit " + " ".join(spec.key for spec in specs), lambda: jax.jit(run))
    # What XLA gives the kernels for scratch and outputs is memory that held NaN just now.
    written = [a for spec in specs for a in spec.arguments if a.role in ("out", "scratch")]
    words = sum(math.prod(a.shape) for a in written) + 4096
    jax.block_until_ready([jnp.full((words,), np.nan, jnp.float32) for _ in range(2)])
    return {name: np.asarray(value) for name, value in jitted(dict(given)).items()}


@functools.cache
def _made() -> dict[str, Any]:
    return {}


def _compiled(key: str, make: Callable[[], Any]) -> Any:
    """Made once for each key: a test runs the same kernel on many inputs."""
    if key not in _made():
        _made()[key] = make()
    return _made()[key]


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


def relative_error(out: Any, wanted: np.ndarray) -> float:
    out = np.asarray(out).astype(np.float64)
    return float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))


def positions_of(rows: int) -> set[int]:
    return {0, 1 % rows, rows // 2, rows - 1}
