"""The Mosaic GPU kernels of the throughput path: in Pallas' interpreter, lowered for CUDA, and on a GPU."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ACTIVATIONS, routing
from interpreting import run_interpreted

pytest.importorskip("triton")

from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.pallas_kernels import compiled
from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.grouped_moe import ExpertWeights, MoEConfig
from moe_jax.pallas_kernels.grouped_moe.activation import activate
from moe_jax.pallas_kernels.prefill import mosaic, reference
from moe_jax.pallas_kernels.prefill.mosaic import blocks_spec, ffn, mosaic_tile_for, reference_blocks, refusal
from moe_jax.pallas_kernels.prefill.mosaic_kernel import STEP, MosaicTile, gated, grouped_matmul
from moe_jax.pallas_kernels.route import RouterConfig, Routing

SHAPES = {
    "qwen3": (4096, 2048, 768, 128, 8),
    "mixtral": (4096, 4096, 14336, 8, 2),
    "deepseek": (16384, 7168, 2048, 64, 8),
}
SMALL = MosaicTile(rows=32, sizes=(16, 32), stages=3, chunk=16, programs=2)
HALVES, INTERLEAVED, UNGATED = ACTIVATIONS[0], ACTIVATIONS[1], ACTIVATIONS[6]


def table(units: list[int], tile: MosaicTile) -> tuple[np.ndarray, np.ndarray]:
    """The table of blocks of experts with these numbers of units."""
    blocks, used = reference_blocks(np.asarray(units, np.int32), pairs=sum(units) * STEP, tile=tile)
    return np.asarray(blocks), np.asarray(used)


def interpreted(
    rng, units, depth, rows, *, activation, tile, bias=False, dtype="float16", x=None, weight=None, gathered=False
):
    """`grouped_matmul` in Pallas' interpreter, and what it must be; ``[places, outputs]`` each."""
    experts, places = len(units), sum(units) * STEP
    if x is None:
        x = rng.standard_normal((places, depth)).astype(dtype)
        weight = (rng.standard_normal((experts, rows, depth)) * depth**-0.5).astype(dtype)
    lines = rng.standard_normal((experts, rows)).astype(dtype) if bias else None
    blocks, used = table(units, tile)
    spare = np.zeros((2 * STEP, depth), x.dtype)
    options, ordered = {}, np.concatenate([x, spare])
    if gathered:
        # Two pairs share a row; padding is no row, and is computed as zeros.
        pair = rng.integers(0, 2 * places, places + 2 * STEP).astype(np.int32)
        pair[rng.random(pair.size) < 0.2] = -1
        options = {"pair": jnp.asarray(pair), "top_k": 2}
        ordered = x.copy()
        x = np.where((pair < 0)[:, None], 0, x[pair // 2])[:places].astype(x.dtype)
    interpreter.reset_gpu_interpret_mode_state()
    out = grouped_matmul(
        jnp.asarray(ordered),
        jnp.asarray(weight),
        None if lines is None else jnp.asarray(lines),
        jnp.asarray(blocks),
        jnp.asarray(used),
        activation=activation,
        tile=tile,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
        **options,
    )
    wanted, at = [], 0
    for expert, count in enumerate(units):
        part = x[at : at + count * STEP].astype(np.float32) @ np.asarray(weight[expert], np.float32).T
        part = part if lines is None else part + lines[expert].astype(np.float32)
        wanted.append(part if activation is None else np.asarray(activate(jnp.asarray(part), activation)))
        at += count * STEP
    out = np.asarray(out, np.float32)
    assert not interpreter.get_races().races_found
    assert np.isnan(out[len(x) :]).all()  # the last expert's tile may be taller than its rows, what it writes not
    return out[: len(x)], np.concatenate(wanted)


@pytest.mark.parametrize("activation", ACTIVATIONS[:6], ids=lambda a: f"{a.name}-{a.layout}-{a.limit_after}")
def test_gated_activations_are_the_ops(activation):
    rng = np.random.default_rng(0)
    gate, up = (jnp.asarray(rng.standard_normal((64, 40)) * 3, jnp.float32) for _ in range(2))
    together = jnp.stack([gate, up], 2).reshape(64, 80) if activation.layout == "interleaved" else None
    wanted = activate(jnp.concatenate([gate, up], 1) if together is None else together, activation)
    np.testing.assert_allclose(gated(gate, up, activation), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("activation", "depth", "rows", "bias", "options"),
    [
        (HALVES, 192, 144, True, {}),
        (INTERLEAVED, 64, 144, True, {"stages": 4}),
        (UNGATED, 64, 72, False, {"chunk": 32, "buffers": 1}),
        (None, 64, 264, True, {}),
        (None, 128, 384, False, {"share": True, "programs": 4}),
        (HALVES, 64, 272, True, {"share": True, "programs": 4}),
    ],
)
@pytest.mark.parametrize("gathered", [False, True], ids=["in order", "gathered"])
def test_C29_sizes_that_no_tile_divides_on_the_mosaic_path(activation, depth, rows, bias, options, gathered):
    tile = MosaicTile(**({"rows": 32, "sizes": (16, 32), "stages": 3, "chunk": 16, "programs": 2} | options))
    rng = np.random.default_rng(1)
    out, wanted = interpreted(
        rng, [3, 0, 7, 1], depth, rows, activation=activation, tile=tile, bias=bias, gathered=gathered
    )
    np.testing.assert_allclose(out, wanted, rtol=4e-3, atol=8e-3)


def test_a_pairs_bits_do_not_depend_on_other_experts():
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((12 * STEP, 64)).astype("float16"), rng.standard_normal((3, 80, 64))
    weight = (weight * 0.1).astype("float16")
    run = functools.partial(interpreted, rng, depth=64, rows=80, activation=HALVES, tile=SMALL)
    beside, _ = run([3, 7, 2], x=x, weight=weight)
    alone, _ = run([0, 7, 0], x=x[3 * STEP : 10 * STEP], weight=weight)
    np.testing.assert_array_equal(alone, beside[3 * STEP : 10 * STEP])


def test_no_expert_has_a_row():
    rng = np.random.default_rng(3)
    blocks, used = table([0, 0], SMALL)
    assert used[0] == 0
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.float16) for shape in ((16, 64), (2, 72, 64)))
    out = grouped_matmul(
        x, weight, None, jnp.asarray(blocks), jnp.asarray(used), activation=None, tile=SMALL,
        interpret=plgpu.InterpretGPUParams(),
    )  # fmt: skip
    assert out.shape == (16, 72)


def lowered(activation, depth, rows, *, tile, experts=8, bias=False, dtype="bfloat16"):
    """The program of one launch, lowered for CUDA: layouts, copies and memory are all settled by then."""
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    run = jax.jit(functools.partial(grouped_matmul, activation=activation, tile=tile))
    given = struct((1024, depth)), struct((experts, rows, depth)), struct((experts, rows)) if bias else None
    table = jax.ShapeDtypeStruct((32, 5), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    return run.trace(*given, *table).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("pairs", [4096, 32768], ids=["alone", "shared"])
def test_shipped_tiles_lower_for_cuda(pairs):
    tile = mosaic_tile_for(pairs, 128)
    assert tile.share == (pairs == 32768)
    assert lowered(HALVES, 2048, 1536, tile=tile).count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("told", "tokens", "programs"), [(78, 4096, 78), (113, 4096, 112), (113, 128, 113), (None, 4096, 132)]
)
def test_there_is_a_program_for_each_multiprocessor(told, tokens, programs, monkeypatch):
    """In twos where they share weights, as they do for many rows."""
    device = SimpleNamespace(device_kind="NVIDIA H20", **({} if told is None else {"core_count": told}))
    monkeypatch.setattr(mosaic, "device_of", lambda _: device)
    x, ids = jax.ShapeDtypeStruct((tokens, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((tokens, 8), jnp.int32)
    tile = mosaic.chosen_tile(x, Routing(ids, ids), (128, 2048, 768)).tile
    assert (tile.programs, tile.share) == (programs, tokens == 4096)


@pytest.mark.parametrize(
    ("activation", "depth", "rows"),
    [
        (INTERLEAVED, 192, 640),
        (UNGATED, 320, 704),
        (ACTIVATIONS[4], 64, 384),
        (ACTIVATIONS[5], 64, 384),
        (None, 704, 192),
    ],
)
def test_every_layout_lowers_for_cuda_with_biases(activation, depth, rows):
    tile = MosaicTile(rows=64, sizes=(64,))
    assert "custom_call @mosaic_gpu" in lowered(activation, depth, rows, tile=tile, bias=True, dtype="float16")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("pairs", "experts"), [(32768, 128), (131072, 64), (1 << 20, 64), (1 << 24, 512)])
def test_the_table_of_blocks_compiles_without_spills(pairs, experts, capability):
    spec = blocks_spec(pairs, experts, mosaic_tile_for(pairs, experts))
    use = compiled.resources(compiled.compile_spec(spec, capability))
    assert (use.stack, use.local) == (0, 0)


@pytest.mark.slow
def test_table_of_blocks_in_tritons_interpreter():
    run_interpreted("interpreted_prefill.py", "table_of_blocks")


@pytest.mark.parametrize("options", [{}, {"share": True}])
@pytest.mark.parametrize("counts", [[300, 1, 0, 17], [0, 0, 0, 0], [8, 16, 24, 144]])
def test_every_unit_is_in_one_block_of_its_expert(options, counts):
    tile = MosaicTile(rows=48, sizes=(48,), **options)
    units = [-(-count // STEP) for count in counts]
    blocks, used = table(units, tile)
    seen, number = [], 0
    while number < used[0]:
        row, first, count, unit, length = blocks[number]
        assert first == number
        assert count % tile.group == 0
        shares = [length // count + (block < length % count) for block in range(count)]
        assert max(shares) * STEP <= tile.rows
        seen += [(row, unit + i) for i in range(sum(shares))]
        number += count
    assert seen == [(row, at) for at, row in enumerate(np.repeat(np.arange(len(units)), units))]


@pytest.mark.parametrize("rows", [0, 8, 40, 150])
def test_a_tile_of_rows_that_are_not_copied_together_is_refused(rows):
    with pytest.raises(InvalidArgument, match=f"rows.*{rows}.*multiple of 16"):
        MosaicTile(rows=rows, sizes=(rows,))


def test_a_tile_with_too_few_stages_to_gather_is_refused():
    with pytest.raises(InvalidArgument, match="stages: got 2, wanted 3 or more"):
        MosaicTile(rows=16, sizes=(16,), stages=2)


def arguments(tokens=65, hidden=64, inner=192, dtype="bfloat16"):
    array = functools.partial(SimpleNamespace, dtype=np.dtype(jnp.dtype(dtype)))
    weights = SimpleNamespace(down=array(shape=(4, hidden, inner)), gate_up=array(shape=(4, 2 * inner, hidden)))
    routed = SimpleNamespace(ids=SimpleNamespace(size=2 * tokens))
    config = MoEConfig(router=RouterConfig(experts=4, top_k=2), activation=HALVES)
    return array(shape=(tokens, hidden)), routed, weights, config


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"hidden": 72}, "multiples of 64"),
        ({"inner": 72}, "multiples of 64"),
        ({"tokens": 64}, "64 rows"),
        ({"tokens": 1 << 24}, "pairs"),
    ],
)
def test_what_it_declines_and_why(options, reason):
    assert refusal(*arguments()) is None
    assert reason in str(refusal(*arguments(**options)))


GPU = [pytest.mark.gpu, pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA GPU")]


def gpu_case(rng, sizes, activation, dtype, bias):
    tokens, hidden, inner, experts, top_k = sizes

    def made(*shape, scale=1.0):
        return jnp.asarray(rng.standard_normal(shape) * scale, dtype)

    ids, scale = routing(rng, tokens, experts, top_k)
    ids[1], ids[2, 0] = -1, experts
    rows = activation.rows(inner)
    weights = ExpertWeights(
        gate_up=made(experts, rows, hidden, scale=hidden**-0.5),
        down=made(experts, hidden, inner, scale=inner**-0.5),
        gate_up_bias=made(experts, rows) if bias else None,
        down_bias=made(experts, hidden) if bias else None,
    )
    config = MoEConfig(router=RouterConfig(experts=experts, top_k=top_k), activation=activation)
    return made(tokens, hidden), Routing(ids=jnp.asarray(ids), weights=jnp.asarray(scale)), weights, config


def error(out, x, routed, weights, config, residual=None):
    """Relative distance from the path's reference, which is f32 but for the inner value and each pair's vector."""
    top_k, experts = routed.ids.shape[1], weights.down.shape[0]
    plan = reference.plan_pairs(np.asarray(routed.ids), None, experts, 64)
    nothing = jnp.zeros(1, x.dtype)

    def or_absent(array):
        return nothing if array is None else array

    blocks = plan.used, plan.block_row, plan.block_pair
    inner = reference.gate_up(
        x, *blocks, weights.gate_up, or_absent(weights.gate_up_bias), activation=config.activation, top_k=top_k
    )
    pair = reference.down(inner, *blocks, weights.down, or_absent(weights.down_bias))
    wanted = reference.combine(pair, plan.place, routed.weights, or_absent(residual))
    wanted = np.asarray(wanted, np.float64)
    return np.linalg.norm(np.asarray(out, np.float64) - wanted) / np.linalg.norm(wanted)


class TestOnAGpu:
    pytestmark = GPU

    @pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: f"{a.name}-{a.layout}-{a.limit_after}")
    @pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 8e-3), ("float16", 1e-3)])
    def test_ffn(self, activation, dtype, bound):
        for sizes in ((257, 192, 64, 5, 3), (1500, 320, 704, 8, 2), (600, 1408, 192, 3, 3)):
            rng = np.random.default_rng(sum(sizes))
            x, routed, weights, config = gpu_case(rng, sizes, activation, dtype, bias=True)
            residual = jnp.asarray(rng.standard_normal(x.shape), dtype)
            out = jax.jit(functools.partial(ffn, config=config))(x, routed, weights, residual=residual)
            assert error(out, x, routed, weights, config, residual) < bound

    def test_ten_fresh_inputs_each_give_the_same_bits_twice(self):
        for seed in range(10):
            sizes = (1024, 512, 384, 16, 4)
            x, routed, weights, config = gpu_case(np.random.default_rng(seed), sizes, HALVES, "bfloat16", bias=False)
            run = jax.jit(functools.partial(ffn, config=config))
            first = np.asarray(run(x, routed, weights).astype(jnp.float32))
            poison = [jnp.full((1 << 24,), jnp.nan, jnp.float32) for _ in range(4)]
            jax.block_until_ready(poison)
            del poison  # the next outputs are likely to stand where this was
            np.testing.assert_array_equal(np.asarray(run(x, routed, weights).astype(jnp.float32)), first)
            assert error(first, x, routed, weights, config) < 8e-3
