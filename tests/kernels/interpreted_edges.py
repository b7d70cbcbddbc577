"""Run by test_chained_dots.py and test_offsets_gpu.py where Triton interprets instead of compiling."""

from __future__ import annotations

import mmap
from dataclasses import replace

import numpy as np
import pytest
from arena import interpreted
from cases import ACTIVATIONS
from chains import many_rows_are_exact, one_launch_is_exact, prefill_tiles, tiles
from edges import EDGES, PATHS, Edge, compare, given, made

from moe_jax.pallas_kernels.experts import expert_ffn_spec, tile_for
from moe_jax.pallas_kernels.interpret import interpret
from moe_jax.pallas_kernels.plan.reference import plan_blocks
from moe_jax.pallas_kernels.prefill import combine_spec, down_spec, gate_up_spec, prefill_tile_for
from moe_jax.pallas_kernels.spec import KernelSpec


@pytest.mark.parametrize("edge", EDGES, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_C30_the_interpreter_agrees_with_the_reference_at_the_edges(path: str, edge: Edge) -> None:
    compare(interpreted, path, edge, "float32", 0)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_C31_interpreted_tiles_of_one_launch_give_8192(dtype: str) -> None:
    """The interpreter has no bf16, whose tiles are those of f16; and what it does not model makes no other tile."""
    distinct = {(t.block_m, t.block_k, t.block_n, rows == 1): (rows, t) for rows, t in tiles(dtype)}
    for rows, tile in distinct.values():
        if not tile.ring:  # that kernel is none of Triton's: test_row_gluon.py
            one_launch_is_exact(interpreted, rows, tile, np.dtype(dtype).type)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_C31_interpreted_tiles_of_many_rows_give_8192(dtype: str) -> None:
    distinct = {(t.main, t.tail, t.extend, t.gate_up.block_m, t.gate_up.block_k): t for t in prefill_tiles(dtype)}
    for tile in distinct.values():
        many_rows_are_exact(interpreted, tile, np.dtype(dtype).type)


HIDDEN, INNER, EXPERTS = 64, 40, 4
SLOTS = 2**31 // (HIDDEN * INNER) + 100
# On both sides of 2**31 elements of gate-up weights and of down weights, and the last.
PLACES = np.array(
    [2**31 // (2 * HIDDEN * INNER) + 1, 2**31 // (2 * HIDDEN * INNER) - 1, SLOTS - 90, SLOTS - 1], np.int32
)
WEIGHTS = {"gate_up_ptr", "down_ptr", "weight_ptr"}


def unwritten(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An array that takes memory only where it is written; elsewhere it is 0."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    no_reserve = 0x4000  # MAP_NORESERVE of Linux, which Python 3.12 has no name for
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype).reshape(shape)


def with_slots(spec: KernelSpec, inputs: dict[str, np.ndarray], slots: int, places: np.ndarray) -> np.ndarray:
    """A launch with each expert's weights at its place in stacks of that many slots."""
    buffers = {}
    for a in spec.arguments:
        if a.name in WEIGHTS:
            buffers[a.name] = unwritten((slots, *a.shape[1:]), a.dtype)
            buffers[a.name][places] = inputs[a.name]
        elif a.name in inputs:
            buffers[a.name] = inputs[a.name]
        else:
            buffers[a.name] = np.zeros(a.shape, a.dtype)
    interpret(spec, buffers)
    return buffers["out_ptr"]


@pytest.mark.parametrize("tokens", [1, 3])
def test_C10_one_launch_reads_experts_beyond_2_to_the_31(tokens: int) -> None:
    edge = Edge(tokens=tokens, top_k=EXPERTS, experts=EXPERTS, hidden=HIDDEN, inner=INNER)
    inputs = given(made(edge, "float16", 0)[0])
    base = tile_for(tokens, EXPERTS, EXPERTS, HIDDEN, INNER, "float16")
    tile = replace(base, block_m=32, block_k=32, block_n=8, programs=5)
    outputs = []
    for slots, places in ((EXPERTS, np.arange(EXPERTS, dtype=np.int32)), (SLOTS, PLACES)):
        spec = expert_ffn_spec(
            tokens, EXPERTS, EXPERTS, HIDDEN, INNER, dtype="float16", activation=ACTIVATIONS[0], slots=slots, tile=tile
        )
        blocks = dict(
            zip(
                ("used_ptr", "block_row_ptr", "block_pair_ptr"),
                plan_blocks(inputs["ids_ptr"], places, EXPERTS, tile.block_n),
                strict=True,
            )
        )
        more = {"weight_row_ptr": places} if tokens == 1 else blocks
        outputs.append(with_slots(spec, inputs | more, slots, places))
    assert np.abs(outputs[0]).max() > 0.1
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("part", ["gate_up", "down"])
def test_C10_many_rows_read_experts_beyond_2_to_the_31(part: str) -> None:
    edge = Edge(tokens=5, top_k=2, experts=EXPERTS, hidden=HIDDEN, inner=INNER)
    arrays = made(edge, "float16", 1)[0]
    shape = (5, 2, EXPERTS, HIDDEN, INNER)
    tile = prefill_tile_for(*shape, "float16")
    outputs = []
    for slots, places in ((EXPERTS, np.arange(EXPERTS, dtype=np.int32)), (SLOTS, PLACES)):
        used, row, pair = plan_blocks(arrays["ids"], places, EXPERTS, tile.block)
        blocks = {"used_ptr": used, "block_row_ptr": row, "block_pair_ptr": pair, "weight_ptr": arrays[part]}
        if part == "gate_up":
            spec = gate_up_spec(*shape, dtype="float16", activation=ACTIVATIONS[0], tile=tile, slots=slots)
            x = arrays["x"]
        else:
            spec = down_spec(*shape, dtype="float16", tile=tile, slots=slots)
            x = np.random.default_rng(2).standard_normal((pair.size, INNER)).astype(np.float16)
        outputs.append(with_slots(spec, blocks | {"x_ptr": x}, slots, places))
    assert np.abs(outputs[0]).max() > 0.1
    np.testing.assert_array_equal(*outputs)


def test_C08_the_sum_reads_pairs_beyond_2_to_the_31() -> None:
    """The reported size: 37,600 rows of 7168 with 8 experts each, of which three rows are summed."""
    hidden, places = 7168, 37600 * 8
    crossing = 2**31 // hidden
    place = np.array([[0, crossing - 1], [crossing, crossing + 1], [places - 1, 7]], np.int32)
    spec = combine_spec(3, 2, places, hidden, dtype="float16")
    pairs = unwritten((places, hidden), "float16")
    rng = np.random.default_rng(3)
    pairs[place] = rng.standard_normal((3, 2, hidden))
    scale = rng.random((3, 2)).astype(np.float32)
    out = np.full((3, hidden), np.nan, np.float16)
    residual = np.zeros(1, np.float16)
    names = ("pair_ptr", "place_ptr", "scale_ptr", "residual_ptr", "out_ptr")
    interpret(spec, dict(zip(names, (pairs, place, scale, residual, out), strict=True)))
    want = (pairs[place].astype(np.float32) * scale[:, :, None]).sum(1)
    np.testing.assert_allclose(out.astype(np.float32), want, rtol=1e-2, atol=1e-2)
