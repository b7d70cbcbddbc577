"""A small run of every kernel, for NVIDIA's compute-sanitizer. See "Checked with compute-sanitizer" in docs/kernels.md.

    python3 benchmarks/sanitize.py                                     # compiles; the tool's runs then find the kernels
    compute-sanitizer --tool memcheck python3 benchmarks/sanitize.py
    compute-sanitizer --tool racecheck python3 benchmarks/sanitize.py experts
    compute-sanitizer --tool memcheck python3 benchmarks/sanitize.py mosaic

Kernels are launched raw and every array is an allocation of its own, so that the tool sees an access one byte beyond
it: inside XLA's pool it would see none. Only the Mosaic kernels run in ``jit``, with XLA's pool switched off.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
    # Raw launches need no JAX on the device, and the tool would watch all of its start.
    if "mosaic" not in sys.argv[1:]:
        os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np

from moe_jax.pallas_kernels import spec as _spec

FOLDER = Path(_spec.__file__).resolve().parent
TOKENS, TOP_K, EXPERTS, HIDDEN, INNER = 5, 3, 7, 72, 40


@dataclass(frozen=True)
class Launch:
    """A spec and, where they differ from its parameters' names, the buffers that it takes."""

    spec: Any
    buffers: Mapping[str, str] = field(default_factory=dict)

    def buffer(self, parameter: str) -> str:
        return self.buffers.get(parameter, parameter)


type Case = tuple[str, list[Launch], dict[str, np.ndarray]]


def ids(rng: np.random.Generator, tokens: int, experts: int = EXPERTS, k: int = TOP_K) -> dict[str, np.ndarray]:
    """A routing with an absent row, an absent slot and an expert of most rows."""
    chosen = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k].astype(np.int32)
    chosen[tokens // 2 :, 0] = experts - 1
    if tokens > 2:
        chosen[1], chosen[2, -1] = -1, experts
    return {"ids_ptr": chosen, "scale_ptr": (rng.random(chosen.shape) + 0.1).astype(np.float32)}


def paged(rng: np.random.Generator, rows: int, sequences: int, max_pages: int, pages: int, last: int) -> dict[str, Any]:
    """Pages of sequences, and rows at some of their positions, one of them not there."""
    position = rng.integers(0, last, rows).astype(np.int32)
    position[0], position[1] = last - 1, -1
    return {
        "table_ptr": rng.permutation(pages)[: sequences * max_pages].reshape(sequences, max_pages).astype(np.int32),
        "position_ptr": position,
        "sequence_ptr": (np.arange(rows) % sequences).astype(np.int32),
    }


def experts(rng: np.random.Generator) -> Iterator[Case]:
    from moe_jax.pallas_kernels.experts import expert_ffn_spec, tile_for
    from moe_jax.pallas_kernels.grouped_moe import Activation
    from moe_jax.pallas_kernels.plan import plan_spec

    swiglu, relu2 = Activation(name="swiglu", layout="halves"), Activation(name="relu2", layout=None)
    everything = {"gate_up_bias": True, "down_bias": True, "residual": True, "slots": 9}
    # One row has a kernel of its own, at sizes larger than these unless its tile is given. It takes multiples of 64.
    cases: list[tuple[int, int, int, str, Any, dict[str, int], dict[str, Any]]] = [
        (1, HIDDEN, INNER, "float16", swiglu, {}, {}),
        (1, 192, 320, "float16", swiglu, {"ring": 3, "ahead": 1}, everything),
        (1, 128, 64, "float16", relu2, {"ring": 2, "ahead": 0}, {}),
        (TOKENS, HIDDEN, INNER, "float16", swiglu, {}, everything),
        (33, HIDDEN, INNER, "float32", relu2, {}, {}),
        (33, HIDDEN, INNER, "bfloat16", swiglu, {}, {}),
    ]
    for tokens, hidden, inner, dtype, activation, changes, options in cases:
        given, launches = ids(rng, tokens), []
        tile = replace(tile_for(tokens, TOP_K, EXPERTS, hidden, inner, dtype), **changes)
        if "slots" in options:
            given["weight_row_ptr"] = rng.permutation(9)[:EXPERTS].astype(np.int32)
        if tokens > 1:
            launches.append(Launch(plan_spec(tokens, TOP_K, EXPERTS, tile.block_n, slots=options.get("slots"))))
        ffn = expert_ffn_spec(
            tokens, TOP_K, EXPERTS, hidden, inner, dtype=dtype, activation=activation, tile=tile, **options
        )
        # The plan has read the table of slots for two rows or more.
        launches.append(Launch(ffn, {} if tokens == 1 else {"weight_row_ptr": "nothing"}))
        yield f"{tokens} rows {dtype} {changes or ''}", launches, given


def prefill(rng: np.random.Generator) -> Iterator[Case]:
    from moe_jax.pallas_kernels.grouped_moe import Activation
    from moe_jax.pallas_kernels.prefill import (
        combine_spec,
        down_spec,
        gate_up_spec,
        plan_specs,
        prefill_tile_for,
    )

    swiglu = Activation(name="swiglu", layout="halves")
    sizes: list[tuple[int, int, int, str]] = [
        (70, TOP_K, EXPERTS, "bfloat16"),
        (70, TOP_K, EXPERTS, "float32"),
        (300, 2, 2, "float16"),
    ]
    for tokens, k, count, dtype in sizes:
        shape = (tokens, k, count, HIDDEN, INNER)
        tile = prefill_tile_for(*shape, dtype)
        first = gate_up_spec(*shape, dtype=dtype, activation=swiglu, tile=tile, bias=True)
        second = down_spec(*shape, dtype=dtype, tile=tile, bias=True)
        places = second.outputs[0].shape[0]
        launches = [Launch(spec) for spec in plan_specs(tokens, k, count, tile.block)]
        launches += [
            Launch(first, {"out_ptr": "inner", "weight_ptr": "gate_up", "bias_ptr": "gate_up_bias"}),
            Launch(second, {"x_ptr": "inner", "out_ptr": "pair_ptr", "weight_ptr": "down", "bias_ptr": "down_bias"}),
            Launch(combine_spec(tokens, k, places, HIDDEN, dtype=dtype)),
        ]
        yield f"{tokens} rows {dtype}", launches, ids(rng, tokens, count, k)
    # More pairs than one launch groups: counts, scan and places.
    yield "grouping 20000 pairs", [Launch(spec) for spec in plan_specs(2500, 8, 64, 64)], ids(rng, 2500, 64, 8)


def blocks_for_mosaic(rng: np.random.Generator) -> Iterator[Case]:
    from moe_jax.pallas_kernels.prefill import plan_specs
    from moe_jax.pallas_kernels.prefill.mosaic import STEP, blocks_spec, mosaic_tile_for

    tile = mosaic_tile_for(70 * TOP_K, EXPERTS)
    launches = [Launch(spec) for spec in plan_specs(70, TOP_K, EXPERTS, STEP)]
    table = blocks_spec(70 * TOP_K, EXPERTS, tile)
    launches.append(Launch(table, {"units_ptr": "expert_blocks_ptr", "used_ptr": "used_blocks"}))
    yield "70 rows", launches, ids(rng, 70)


def route(rng: np.random.Generator) -> Iterator[Case]:
    from moe_jax.pallas_kernels.route import RouterConfig
    from moe_jax.pallas_kernels.route.specs import route_logits_spec, route_spec

    config = RouterConfig(experts=EXPERTS, top_k=TOP_K, renormalize=True)
    position = {"position_ptr": np.array([0, 4, -1, 2, 9], np.int32)}
    for dtype in ("float16", "bfloat16"):
        yield (
            f"{TOKENS} rows {dtype}",
            [Launch(route_spec(TOKENS, HIDDEN, config, dtype=dtype, norm_eps=1e-6, masked=True))],
            position,
        )
    yield "logits of 33 rows", [Launch(route_logits_spec(33, config))], {}


def linear(rng: np.random.Generator) -> Iterator[Case]:
    from moe_jax.pallas_kernels.linear import linear_spec

    options = {"norm_eps": 1e-6, "bias": True, "residual": True}
    for rows, inputs, outputs, dtype in (
        (1, 1024, 70, "float16"),
        (TOKENS, HIDDEN, 130, "float32"),
        (17, 200, 70, "bfloat16"),
    ):
        spec = linear_spec(rows, inputs, outputs, dtype=dtype, **options)
        yield f"{rows} rows of {inputs} to {outputs} {dtype}", [Launch(spec)], {}


def kv_append(rng: np.random.Generator) -> Iterator[Case]:
    from moe_jax.pallas_kernels.kv_append import kv_append_spec

    sizes = {"sequences": 2, "pages": 9, "page_size": 16, "max_pages": 3}
    for norm in (None, "head"):
        spec = kv_append_spec(TOKENS, 4, 2, 64, dtype="float16", positions=48, norm=norm, **sizes)
        yield f"{TOKENS} rows, norm {norm}", [Launch(spec)], paged(rng, TOKENS, 2, 3, 9, 48)


def attention(rng: np.random.Generator) -> Iterator[Case]:
    from moe_jax.pallas_kernels.attention import attention_specs

    sizes = {"sequences": 2, "pages": 40, "page_size": 16, "max_pages": 11}
    for options in ({}, {"window": 20, "sink": True}):
        specs = attention_specs(TOKENS, 4, 2, 64, dtype="float16", **sizes, **options)
        yield f"{TOKENS} rows {options or ''}", [Launch(s) for s in specs], paged(rng, TOKENS, 2, 11, 40, 170)


def decode_attention(rng: np.random.Generator) -> Iterator[Case]:
    """Each row a sequence of its own, one of them not there."""
    from moe_jax.pallas_kernels.attention import decode_attention_specs

    sizes = {"sequences": TOKENS, "pages": 11 * TOKENS, "page_size": 16, "max_pages": 11, "positions": 170}
    for options in ({"norm": "head"}, {"norm": "projection", "window": 20, "sink": True}):
        specs = decode_attention_specs(TOKENS, 4, 2, 64, dtype="float16", **sizes, **options)
        given = paged(rng, TOKENS, TOKENS, 11, 11 * TOKENS, 170)
        yield f"{TOKENS} rows {options}", [Launch(s) for s in specs], given


def sample(rng: np.random.Generator) -> Iterator[Case]:
    from moe_jax.pallas_kernels.sample import sample_specs

    given = {
        "position_ptr": np.array([3, -1, 0, 7], np.int32),
        "sequence_ptr": np.arange(4, dtype=np.int32),
        "seed_ptr": rng.integers(-(2**31), 2**31, (4, 2)).astype(np.int32),
        "temperature_ptr": np.array([0, 1, 0.7, 1.3], np.float32),
        "top_k_ptr": np.array([0, 5, 20, 0], np.int32),
        "top_p_ptr": np.array([1, 0.5, 0.9, 0.3], np.float32),
    }
    yield "4 rows of 5000", [Launch(spec) for spec in sample_specs(4, 5000)], given


def embed(rng: np.random.Generator) -> Iterator[Case]:
    from moe_jax.pallas_kernels.embed import embed_spec

    for dtype in ("float16", "float32"):
        spec = embed_spec(TOKENS, 37, HIDDEN, dtype=dtype)
        yield f"{TOKENS} rows {dtype}", [Launch(spec)], {"ids_ptr": np.array([36, -1, 0, 37, 2**31 - 1], np.int32)}


def advance(rng: np.random.Generator) -> Iterator[Case]:
    """Sequences that go on, stop, end, ended before or are not there; a row of a chunk; one past what is recorded."""
    from moe_jax.pallas_kernels.advance import advance_spec

    given = {
        "token_ptr": [5, 9, 3, 4, -1, 6, 7, 8, 2],
        "sequence_ptr": [0, 1, 2, 3, 4, -1, 5, 2**31 - 1, 6],
        "following_ptr": [4, 4, 4, 4, 4, 4, -1, 4, 30],
        "limit_ptr": [8, 8, 4, 8, 8, 8, 40],
        "stop_ptr": [9, -1],
        "finished_ptr": [0, 0, 0, 1, 0, 0, 0],
        "reached_ptr": [3] * 7,
        "newest_ptr": [1] * 7,
        "tokens_ptr": [[-1] * 9] * 7,
    }
    arrays = {name: np.array(values, np.int32) for name, values in given.items()}
    yield "9 rows", [Launch(advance_spec(9, 7, 2, max_tokens=9))], arrays


def mosaic(rng: np.random.Generator) -> Iterator[Case]:
    """The Mosaic kernels, inside one ``jit``; nothing to launch raw."""
    import jax
    import jax.numpy as jnp

    from moe_jax.pallas_kernels.grouped_moe import Activation, ExpertWeights, MoEConfig
    from moe_jax.pallas_kernels.prefill.mosaic import ffn
    from moe_jax.pallas_kernels.route import RouterConfig, Routing

    hidden, inner = 192, 64  # its copies take multiples of 64
    for tokens, dtype, layout in ((70, "bfloat16", "halves"), (300, "float16", "interleaved")):
        activation = Activation(name="swiglu", layout=layout)
        config = MoEConfig(router=RouterConfig(experts=EXPERTS, top_k=TOP_K), activation=activation)
        shapes = (tokens, hidden), (EXPERTS, 2 * inner, hidden), (EXPERTS, hidden, inner)
        x, gate_up, down = (jnp.asarray(rng.standard_normal(shape) * 0.3, dtype) for shape in shapes)
        chosen = ids(rng, tokens)
        routing = Routing(jnp.asarray(chosen["scale_ptr"]), jnp.asarray(chosen["ids_ptr"]))
        run = jax.jit(functools.partial(ffn, config=config))
        out = run(x, routing, ExpertWeights(gate_up=gate_up, down=down))
        assert np.isfinite(np.asarray(out).astype(np.float32)).all(), f"{tokens} rows {dtype}"
        print(f"mosaic: {tokens} rows {dtype}: finite")
    yield from ()


# Steps, and the functions that make what they launch.
STEPS: dict[str, tuple[Callable[[np.random.Generator], Iterable[Case]], set[str]]] = {
    "experts": (experts, {"plan.plan_spec", "experts.expert_ffn_spec"}),
    "prefill": (
        prefill,
        {"prefill.plan_specs", "prefill.gate_up_spec", "prefill.down_spec", "prefill.combine_spec"},
    ),
    "blocks_for_mosaic": (blocks_for_mosaic, {"prefill.blocks_spec"}),
    "route": (route, {"route.route_spec", "route.route_logits_spec"}),
    "linear": (linear, {"linear.linear_spec"}),
    "kv_append": (kv_append, {"kv_append.kv_append_spec"}),
    "attention": (attention, {"attention.attention_specs"}),
    "decode_attention": (decode_attention, {"attention.decode_attention_specs"}),
    "sample": (sample, {"sample.sample_specs"}),
    "embed": (embed, {"embed.embed_spec"}),
    "advance": (advance, {"advance.advance_spec"}),
    "mosaic": (mosaic, set()),
}


def makers() -> set[str]:
    """Functions of `pallas_kernels` that give kernels to launch, as ``folder.name``: read, not imported."""
    found = set()
    for path in FOLDER.glob("*/*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.returns and not node.name.startswith("_"):
                annotation = ast.unparse(node.returns)
                if "KernelSpec" in annotation:
                    found.add(f"{path.parent.name}.{node.name}")
    return found


def wanted(launch: Launch, buffers: Mapping[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Contents of the buffers that a launch needs and nobody has made yet: inputs random, state 0, the rest NaN.

    Raises:
        KeyError: an index array that only the case can give.
    """
    made = {}
    for a in launch.spec.arguments:
        name = launch.buffer(a.name)
        if name in buffers:
            continue
        if a.role in ("out", "scratch"):
            made[name] = np.full(a.shape, np.nan if a.dtype != "int32" else -1, a.dtype)
        elif a.role == "state" or a.shape == (1,):
            made[name] = np.zeros(a.shape, a.dtype)
        elif a.dtype == "int32":
            raise KeyError(f"{launch.spec.name}: {name}")
        else:
            made[name] = (rng.standard_normal(a.shape) * 0.3).astype(a.dtype)
    return made


def error(spec: Any, before: list[np.ndarray], after: list[np.ndarray]) -> float | None:
    """Largest difference to the reference where the kernel wrote, of all float outputs; None: no reference."""
    if spec.reference is None:
        return None
    results = spec.reference(*before)
    results = results if isinstance(results, tuple) else (results,)
    updated = [a for a in spec.arguments if a.role == "inout"]
    worst = 0.0
    for a, want, got in zip([*updated, *spec.outputs], results, after, strict=True):
        if a.dtype != "int32" and a.shape == np.shape(want):
            got, want = got.astype(np.float64), np.asarray(want).astype(np.float64)
            written = np.isfinite(got) & np.isfinite(want)
            assert written.any(), f"{spec.name} left {a.name} unwritten"
            worst = max(worst, float(np.abs(got[written] - want[written]).max()))
    return worst


class Device:
    """Launches on the GPU; each buffer is an allocation of exactly its size."""

    def __init__(self) -> None:
        from cuda.core import Device

        self.device = Device(0)
        self.device.set_current()
        self.stream = self.device.create_stream()
        major, minor = self.device.compute_capability
        self.capability = 10 * major + minor

    def run(self, launch: Launch, buffers: dict[str, np.ndarray]) -> None:
        from cuda.bindings import driver

        from moe_jax.pallas_kernels.compiled import compile_spec
        from moe_jax.pallas_kernels.launcher import load_kernel

        def checked(result: tuple[Any, ...]) -> Any:
            assert result[0] == driver.CUresult.CUDA_SUCCESS, result[0]
            return result[1] if len(result) > 1 else None

        kernel = load_kernel(launch.spec, compile_spec(launch.spec, self.capability))
        arrays = [np.ascontiguousarray(buffers[launch.buffer(a.name)]) for a in launch.spec.arguments]
        memory = [checked(driver.cuMemAlloc(array.nbytes)) for array in arrays]
        scratch = [checked(driver.cuMemAlloc(size)) if size else 0 for size in kernel.scratch_bytes]
        for address, array in zip(memory, arrays, strict=True):
            checked(driver.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
        kernel.launch(self.stream, [int(address) for address in memory], (int(scratch[0]), int(scratch[1])))
        self.stream.sync()
        for a, address, array in zip(launch.spec.arguments, memory, arrays, strict=True):
            if a.role != "in":
                checked(driver.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes))
                buffers[launch.buffer(a.name)] = array
        for address in (*memory, *(s for s in scratch if s)):
            checked(driver.cuMemFree(address))


def run_step(name: str, run: Callable[[Launch, dict[str, np.ndarray]], None]) -> int:
    """All launches of a step, each compared with its reference; how many there were."""
    rng, count = np.random.default_rng(0), 0
    for title, launches, given in STEPS[name][0](rng):
        buffers = dict(given)
        for launch in launches:
            buffers |= wanted(launch, buffers, rng)
            spec = launch.spec
            before = [buffers[launch.buffer(a.name)].copy() for a in spec.inputs]
            run(launch, buffers)
            count += 1
            updated = [a for a in spec.arguments if a.role == "inout"]
            worst = error(spec, before, [buffers[launch.buffer(a.name)] for a in (*updated, *spec.outputs)])
            print(f"{name}: {title}: {spec.name}, grid {spec.grid}: error {'–' if worst is None else f'{worst:.1e}'}")
            assert worst is None or worst < 3e-2, f"{spec.name} is wrong"
            assert not any(buffers[launch.buffer(a.name)].any() for a in spec.arguments if a.role == "state"), spec.name
    return count


def main(names: list[str]) -> None:
    covered = set().union(*(made for _, made in STEPS.values()))
    if makers() != covered:
        sys.exit(f"without a step here: {sorted(makers() - covered)}; not in the tree: {sorted(covered - makers())}")
    import triton

    device = Device()
    print(f"{device.device.name}, sm_{device.capability}, triton {triton.__version__}")
    total = sum(run_step(name, device.run) for name in names or [name for name in STEPS if name != "mosaic"])
    print(f"{total} raw launches")


if __name__ == "__main__":
    main(sys.argv[1:])
