"""A decode step of 24 layers in one jit: XLA captures all of it as one command buffer, and a call is cheap."""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from backends import layer, normal
from moe_jax.pallas_kernels.grouped_moe import ExpertWeights, explain, grouped_moe

pytestmark = pytest.mark.gpu

LAYERS, HIDDEN = 24, 512
CONFIG, _ = layer(8, 2, 1, 1, renormalize=True)
OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION",
    "xla_gpu_graph_min_graph_size": 1,
}


def step(x: jax.Array, arrays: list[jax.Array]) -> jax.Array:
    """Norm, router and experts, 24 times. Arrays come flat: so a call of a jitted function is cheapest."""
    for i in range(LAYERS):
        router, gate_up, down = arrays[3 * i : 3 * i + 3]
        wide = x.astype(jnp.float32)
        h = (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)
        logits = jax.lax.dot_general(h, router, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        x = x + grouped_moe(h, logits, ExpertWeights(gate_up=gate_up, down=down), CONFIG, backend="triton")
    return x


def arguments(rows: int) -> tuple[jax.Array, list[jax.Array]]:
    arrays = []
    for i in range(LAYERS):
        _, w = layer(8, 2, HIDDEN, 256, dtype=jnp.bfloat16, seed=i)
        arrays += [normal(i, (8, HIDDEN), jnp.bfloat16, HIDDEN**-0.5), w.gate_up, w.down]
    return normal(99, (rows, HIDDEN), jnp.bfloat16), arrays


def thunks(folder: Path) -> str:
    """What XLA will launch, one line each, what a command buffer holds indented under it."""
    for pattern in ("*thunk_sequence_after_thunk_passes*.txt", "*thunk_sequence.txt"):
        for path in sorted(folder.glob(pattern)):
            if "jit_step" in path.name:
                return path.read_text()
    raise AssertionError(f"no dump of thunks among {sorted(p.name for p in folder.iterdir())}")


def launches(text: str) -> list[str]:
    """What stands in the one command buffer that is all of the program, a line for each launch.

    Raises:
        AssertionError: there is more than that buffer.
    """
    lines = [(len(m[1]), m[2], m[0]) for m in re.finditer(r"^([ \t]*)(?:\d+: )?(k[A-Z]\w+).*$", text, re.MULTILINE)]
    outer = min(indent for indent, _, _ in lines)
    assert [kind for indent, kind, _ in lines if indent == outer] == ["kCommandBuffer"], text
    return [line for indent, kind, line in lines if indent > outer and kind != "kSequential"]


@pytest.mark.parametrize(
    ("rows", "ours"), [(1, ("route_logits", "expert_ffn")), (4, ("route_logits", "plan_blocks", "expert_ffn"))]
)
def test_one_command_buffer_holds_every_launch(rows: int, ours: tuple[str, ...], tmp_path: Path) -> None:
    x, arrays = arguments(rows)
    w = ExpertWeights(gate_up=arrays[1], down=arrays[2])
    assert explain(x, jnp.zeros((rows, 8)), w, CONFIG).backend == "triton"
    call = jax.jit(step, donate_argnums=0, compiler_options=OPTIONS | {"xla_dump_to": str(tmp_path)})
    call(x, arrays).block_until_ready()
    text = thunks(tmp_path)
    found = launches(text)
    # XLA launches our kernels as its own: by the names of their functions.
    named = Counter(m[1] for line in found if (m := re.search(r"\] (\w+) grid: ", line)))
    assert {name: named[name] for name in ours} == dict.fromkeys(ours, LAYERS), text
    # Beside the kernels: norm, router, zeros for the counters.
    print(f"\n{rows} rows: {len(found) / LAYERS:.1f} launches a layer")
    assert len(found) <= LAYERS * 7, text


@pytest.mark.alone
@pytest.mark.parametrize("rows", [1, 4])
def test_a_call_costs_at_most_250_microseconds_of_the_host(rows: int) -> None:
    x, arrays = arguments(rows)
    call = jax.jit(step, donate_argnums=0, compiler_options=OPTIONS)
    for _ in range(5):
        x = call(x, arrays)
    x.block_until_ready()
    times = []
    for _ in range(20):
        for _ in range(10):
            start = time.perf_counter()
            x = call(x, arrays)
            times.append(1e6 * (time.perf_counter() - start))
        x.block_until_ready()
    print(f"\n{rows} rows: {statistics.median(times):.0f} µs a call")
    assert statistics.median(times) <= 250, sorted(times)[:: len(times) // 10]
