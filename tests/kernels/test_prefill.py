"""The prefill kernels: in Triton's interpreter, compiled for both capabilities, inside jit and on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ACTIVATIONS
from interpreting import run_interpreted

pytest.importorskip("triton")

from prefill_cases import ids_of, layer_in_f64, random_layer, relative, run_layer, run_plan, small_tile

from moe_jax.pallas_kernels import compiled
from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.grouped_moe import ExpertWeights, MoEConfig
from moe_jax.pallas_kernels.grouped_moe import reference as grouped_moe_reference
from moe_jax.pallas_kernels.prefill import (
    MAX_PAIRS,
    combine_spec,
    down_spec,
    gate_up_spec,
    plan_specs,
    prefill_tile_for,
)
from moe_jax.pallas_kernels.prefill.heuristics import candidates
from moe_jax.pallas_kernels.prefill.reference import plan_pairs
from moe_jax.pallas_kernels.route import RouterConfig, Routing

QWEN3 = (8, 128, 2048, 768)
MIXTRAL = (2, 8, 4096, 14336)


@pytest.mark.slow
def test_kernels_in_tritons_interpreter():
    run_interpreted("interpreted_prefill.py", "not row_copy")


def matmuls(tokens, shape, dtype, capability, activation=ACTIVATIONS[0], **options):
    top_k, experts, hidden, inner = shape
    tile = prefill_tile_for(tokens, top_k, experts, hidden, inner, dtype, capability=capability)
    sizes = (tokens, top_k, experts, hidden, inner)
    first = gate_up_spec(*sizes, dtype=dtype, activation=activation, tile=tile, **options)
    return first, down_spec(*sizes, dtype=dtype, tile=tile, **options)


SHIPPED = {  # every form of tile that the heuristic gives
    "8 pairs an expert": (128, QWEN3, "bfloat16", {}),
    "16 pairs an expert, slots, biases": (
        256,
        QWEN3,
        "bfloat16",
        {"activation": ACTIVATIONS[3], "slots": 160, "bias": True},
    ),
    "32 pairs an expert": (128, MIXTRAL, "float16", {}),
    "64 pairs an expert": (256, MIXTRAL, "bfloat16", {}),
    "many pairs an expert": (4096, QWEN3, "bfloat16", {}),
    "many pairs an expert, no gate": (4096, MIXTRAL, "bfloat16", {"activation": ACTIVATIONS[6]}),
    "odd sizes": (257, (2, 8, 1001, 321), "bfloat16", {"bias": True}),
    "float32, 8 pairs": (128, QWEN3, "float32", {}),
    "float32, many pairs": (4096, QWEN3, "float32", {"activation": ACTIVATIONS[5], "bias": True}),
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_tiles_compile_without_spills(name, capability):
    tokens, shape, dtype, options = SHIPPED[name]
    for spec in matmuls(tokens, shape, dtype, capability, **options):
        kernel = compiled.compile_spec(spec, capability)
        use = compiled.resources(kernel)
        assert (use.stack, use.local) == (0, 0), spec.name
        # What every device from sm_80 on has, but for sm_90, whose tiles are its own.
        assert kernel.shared <= (99 if capability == 80 else 227) * 1024
        assert (kernel.global_scratch, kernel.profile_scratch) == (0, 0)
        if capability == 90 and dtype != "float32":
            assert "HGMMA" in compiled.disassembly(kernel)


OTHERS = {
    "plan, one launch": plan_specs(256, 8, 128, 32),
    "plan, one launch, most pairs": plan_specs(4096, 8, 32, 8),
    "plan, one launch, large blocks": plan_specs(256, 8, 384, 288),
    "plan, three launches": plan_specs(4096, 8, 384, 288, slots=400),
    "plan, three launches, small blocks": plan_specs(4096, 8, 128, 8),
    "plan, three launches, most pairs": plan_specs(MAX_PAIRS // 8, 8, 64, 8),
    "plan, one expert": plan_specs(65, 3, 1, 16),
    "plan, 2048 experts": plan_specs(4096, 8, 2048, 32),
    "combine": (combine_spec(4096, 8, 40000, 2048, dtype="bfloat16", residual=True),),
    "combine, 16 ranks": (combine_spec(4096, 16, 70000, 2880, dtype="float32", residual=True),),
    "combine, many ranks": (combine_spec(65, 60, 3900, 320, dtype="bfloat16"),),
    "combine, odd size": (combine_spec(129, 2, 400, 72, dtype="float32"),),
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", OTHERS)
def test_grouping_and_sum_compile_without_spills(name, capability):
    for spec in OTHERS[name]:
        kernel = compiled.compile_spec(spec, capability)
        use = compiled.resources(kernel)
        assert (use.stack, use.local) == (0, 0), spec.name
        assert (kernel.global_scratch, kernel.profile_scratch) == (0, 0)


@pytest.mark.parametrize("residual", [False, True])
def test_the_sum_asks_for_all_vectors_before_it_adds(residual):
    """What the branch in the kernel is for: without it some loads wait for the first sums."""
    spec = combine_spec(4096, 8, 40000, 2048, dtype="bfloat16", residual=residual)
    for capability in (80, 90):
        code = compiled.disassembly(compiled.compile_spec(spec, capability))
        before = code[: code.index("FMUL")]
        assert before.count("LDG.E.128") == 8


@pytest.mark.parametrize("shape", [QWEN3, MIXTRAL], ids=["many experts", "few experts"])
def test_candidates_for_tuning_start_with_the_heuristics_and_are_distinct(shape):
    top_k, experts, hidden, inner = shape
    for tokens in (128, 256, 1024, 4096):
        found = candidates((hidden, inner, experts, top_k), tokens)
        assert found[0] == prefill_tile_for(tokens, top_k, experts, hidden, inner, "bfloat16")
        assert 3 <= len(set(found)) == len(found) <= 8


def test_refusals_name_got_and_wanted():
    tile = small_tile()
    with pytest.raises(InvalidArgument, match=r"pairs: got 0, wanted 1 to"):
        plan_specs(0, 2, 4, 16)
    with pytest.raises(InvalidArgument, match=str(MAX_PAIRS)):
        plan_specs(MAX_PAIRS, 2, 4, 16)
    with pytest.raises(InvalidArgument, match="block: got 12, wanted a multiple of 8"):
        plan_specs(65, 2, 4, 12)
    with pytest.raises(InvalidArgument, match="float64"):
        down_spec(65, 2, 4, 64, 64, dtype="float64", tile=tile)
    with pytest.raises(InvalidArgument, match=r"tile.main: got 24, wanted a power of two"):
        down_spec(65, 2, 4, 64, 64, dtype="float32", tile=small_tile(24))


@pytest.mark.parametrize(("tokens", "launches"), [(65, 4), (4096, 6)])
def test_inside_jit_a_layer_is_four_launches_or_six(tokens, launches):
    from moe_jax.pallas_kernels.prefill.triton import ffn

    top_k, experts, hidden, inner = QWEN3
    config = MoEConfig(router=RouterConfig(experts=experts, top_k=top_k), activation=ACTIVATIONS[3])
    x = jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16)
    routing = Routing(
        jax.ShapeDtypeStruct((tokens, top_k), jnp.float32), jax.ShapeDtypeStruct((tokens, top_k), jnp.int32)
    )
    weights = weight_shapes(experts, hidden, inner)
    jaxpr = jax.make_jaxpr(lambda *args: ffn(*args, config, args[0]))(x, routing, weights)
    (out,) = jaxpr.out_avals
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    assert str(jaxpr).count(" kernel_call[") == launches


def weight_shapes(experts, hidden, inner):
    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    return ExpertWeights(
        gate_up=shape(experts, 2 * inner, hidden),
        down=shape(experts, hidden, inner),
        gate_up_bias=shape(experts, 2 * inner),
        down_bias=shape(experts, hidden),
    )


# -- On a GPU ---------------------------------------------------------------------------------------------------------

SIZES = [(72, 192), (192, 72), (320, 704), (704, 320), (1408, 320), (2880, 192), (320, 2880), (192, 1408)]
GRID = [(257, experts) for experts in (1, 3, 5, 8, 60, 64, 128, 160, 256, 384)]
GRID += [(tokens, experts) for tokens in (65, 4096) for experts in (1, 8, 128)]


def on_device(tree):
    return jax.tree.map(jnp.asarray, tree)


def runner(activation, experts, top_k):
    from moe_jax.pallas_kernels.prefill.triton import ffn

    config = MoEConfig(router=RouterConfig(experts=experts, top_k=top_k), activation=activation)
    return jax.jit(lambda x, routing, weights, residual: ffn(x, routing, weights, config, residual)), config


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(len(GRID)), ids=lambda i: f"{GRID[i][0]} rows, {GRID[i][1]} experts")
def test_errors_are_at_most_twice_those_of_the_same_dtype(case):
    """Two new inputs each; sizes, dtypes, activations, biases and kinds of routing take turns over the grid."""
    rng = np.random.default_rng()
    tokens, experts = GRID[case]
    hidden, inner = SIZES[case % len(SIZES)]
    dtype = ("bfloat16", "float16", "float32")[case % 3]
    act, top_k = ACTIVATIONS[case % len(ACTIVATIONS)], min(experts, 1 + case % 4)
    run, config = runner(act, experts, top_k)
    for kind in ("random", "one" if case % 2 else "random"):
        made = random_layer(rng, tokens, top_k, experts, hidden, inner, dtype, act, bias=case % 2 == 0, kind=kind)
        x, routing, weights = made
        residual = rng.standard_normal(x.shape, np.float32).astype(x.dtype)
        given = on_device((x, routing, weights))
        out = run(*given, jnp.asarray(residual))
        same = grouped_moe_reference.grouped_moe(*given, config).astype(jnp.float32) + residual.astype(np.float32)
        exact = layer_in_f64(x, routing, weights, act, residual)
        bound = relative(same.astype(x.dtype), exact)
        assert relative(out, exact) <= 2 * max(bound, 1e-7), kind


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ten_inputs_give_the_same_bits_twice(dtype):
    run, _ = runner(ACTIVATIONS[0], 64, 4)
    rng, outs = np.random.default_rng(), []
    weights = None
    inputs = []
    for _ in range(10):
        x, routing, weights = random_layer(rng, 700, 4, 64, 320, 704, dtype, ACTIVATIONS[0])
        inputs.append(on_device((x, routing, weights, x)))
    for given in (*inputs, *reversed(inputs)):
        outs.append(np.asarray(run(*given)))
    for a, b in zip(outs[:10], reversed(outs[10:]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len({out.tobytes() for out in outs}) == 10


@pytest.mark.gpu
@pytest.mark.parametrize(("main", "tail", "extend"), [(16, 0, False), (16, 16, True), (32, 16, True), (128, 32, False)])
def test_a_pair_does_not_depend_on_its_company(main, tail, extend):
    """Each launch alone, arrays surrounded by NaN: waves of experts, half of the rows, one pair among few or many."""
    from arena import launched

    rng, act = np.random.default_rng(), ACTIVATIONS[1]
    tile = small_tile(main, tail, extend, block_m=128)
    x, routing, weights = random_layer(rng, 300, 2, 6, 192, 320, "bfloat16", act, bias=True)
    _, whole, _ = run_layer(launched, x, routing, weights, act, tile)
    parts = [np.where(wave, routing.ids, -1).astype(np.int32) for wave in (routing.ids < 3, routing.ids >= 3)]
    parts.append(np.where(np.arange(300)[:, None] % 37 == 5, routing.ids, -1).astype(np.int32))
    for ids in parts:
        _, vectors, plan = run_layer(launched, x, Routing(routing.weights, ids), weights, act, tile)
        there = plan.place >= 0
        np.testing.assert_array_equal(vectors[there], whole[there])
    half = Routing(routing.weights[150:], routing.ids[150:])
    _, vectors, plan = run_layer(launched, x[150:], half, weights, act, tile)
    there = plan.place >= 0
    np.testing.assert_array_equal(vectors[there], whole[150:][there])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "block"),
    [
        (65, 4, 384, 16),
        (513, 8, 128, 80),
        (4096, 8, 60, 288),
        (4096, 8, 32, 8),
        (1024, 8, 600, 8),
        (20000, 4, 8, 128),
        (70000, 8, 64, 8),
    ],
)
def test_the_plan_is_numpys(tokens, top_k, experts, block):
    from arena import launched

    rng = np.random.default_rng()
    for kind in ("random", "random", "one", "none"):
        ids = ids_of(rng, tokens, top_k, experts, kind)
        slots = experts + 3
        rows = rng.permutation(slots)[:experts].astype(np.int32) if kind == "random" else None
        wanted = plan_pairs(ids, rows, experts, block)
        for name, a, b in zip(
            wanted._fields, run_plan(launched, ids, experts, block, rows, slots), wanted, strict=True
        ):
            np.testing.assert_array_equal(a, b, name)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "experts"), [(70_000, 64, 16_384, 2), (65, 32_768, 8192, 5)], ids=["rows", "weights"]
)
def test_more_than_two_to_the_31_elements(tokens, hidden, inner, experts):
    """Intermediate rows, or the stack of gate-up weights; the last rows or experts are compared."""
    run, config = runner(ACTIVATIONS[0], experts, 2)
    keys = jax.random.split(jax.random.key(int(np.random.default_rng().integers(2**31))), 4)
    weights = ExpertWeights(
        gate_up=jax.random.normal(keys[0], (experts, 2 * inner, hidden), jnp.bfloat16) * jnp.bfloat16(hidden**-0.5),
        down=jax.random.normal(keys[1], (experts, hidden, inner), jnp.bfloat16) * jnp.bfloat16(inner**-0.5),
    )
    assert max(2 * tokens * inner, weights.gate_up.size) > 2**31
    x = jax.random.normal(keys[2], (tokens, hidden), jnp.bfloat16)
    ids = jnp.tile(jnp.array([[experts - 1, experts - 2]], jnp.int32), (tokens, 1))
    routing = Routing(jax.random.uniform(keys[3], ids.shape), ids)
    out = run(x, routing, weights, x)[-64:]
    part = Routing(routing.weights[-64:], ids[-64:])
    wanted = grouped_moe_reference.grouped_moe(x[-64:], part, weights, config).astype(jnp.float32)
    assert relative(out, np.asarray(wanted + x[-64:].astype(jnp.float32), np.float64)) < 1e-2
