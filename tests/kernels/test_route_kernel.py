"""The routing kernels: interpreted, compiled for two capabilities, and on a GPU."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest
from interpreting import run_interpreted

pytest.importorskip("triton")

from decode_cases import BUCKETS, check_compiled, on_a_gpu, positions_of, same_bits
from route_sample_cases import ROUTERS, route_oracle

from moe_jax.pallas_kernels.compiled import compile_spec, disassembly
from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.route import RouterConfig
from moe_jax.pallas_kernels.route.heuristics import BLOCK_ROWS, tile_for
from moe_jax.pallas_kernels.route.specs import route_logits_spec, route_spec


def spec_for(name: str, rows: int, dtype: str = "bfloat16", **more):
    hidden, config, options = ROUTERS[name]
    return route_spec(rows, hidden, config, dtype=dtype, norm_eps=1e-6, masked=True, **options, **more)


def logits_spec_for(name: str, rows: int, **more):
    _, config, options = ROUTERS[name]
    return route_logits_spec(rows, config, selection_bias="selection_bias" in options, **more)


@pytest.mark.slow
def test_interpreted():
    run_interpreted("interpreted_route_sample.py", "route or C01 or C12 or C13 or ties_go")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ROUTERS)
def test_compiles_without_spills(name, capability):
    check_compiled(spec_for(name, 16, pdl=capability == 90), capability)
    check_compiled(logits_spec_for(name, 16, pdl=capability == 90), capability)


@pytest.mark.parametrize("capability", [80, 90])
def test_float32_compiles_without_spills(capability):
    check_compiled(spec_for("deepseek-v3", 64, "float32"), capability)


@pytest.mark.parametrize("capability", [80, 90])
def test_parts_are_released_before_the_arrival_and_read_after_it(capability):
    """The machine code of the hand-over: all stores of parts, fence, count, invalidation, barrier, reads past L1."""
    code = disassembly(compile_spec(spec_for("qwen3", 4), capability))
    pattern = r"\b(STG|MEMBAR\.\w+\.GPU|ATOMG\.E\.ADD\.STRONG\.GPU|CCTL\.IVALL|BAR\.SYNC|LDG\.E\S*STRONG\.GPU)"
    order = " ".join(found.split(".")[0] for found in re.findall(pattern, code))
    assert order.count("ATOMG") == 1
    before, after = order.split("ATOMG")
    assert re.search(r"STG( BAR)+ MEMBAR $", before)
    assert re.match(r" CCTL( BAR)+( STG)*( LDG)+", after)


def test_the_arithmetic_does_not_look_at_rows():
    for name, (hidden, config, _) in ROUTERS.items():
        tile = tile_for(hidden, config.experts, "bfloat16")
        for rows in BUCKETS:
            spec = spec_for(name, rows)
            constants = dict(spec.constexprs)
            assert (constants["BLOCK_M"], constants["BLOCK_K"]) == (tile.block_m, tile.block_k)
            assert (constants["BLOCK_ROWS"], spec.num_warps) == (BLOCK_ROWS, tile.num_warps)


@pytest.mark.parametrize(
    ("rows", "hidden", "config", "options", "message"),
    [
        (257, 64, RouterConfig(experts=8, top_k=2), {}, "rows: got 257, wanted 1 to 256"),
        (0, 64, RouterConfig(experts=8, top_k=2), {}, "rows: got 0"),
        (1, 0, RouterConfig(experts=8, top_k=2), {}, "hidden size: got 0"),
        (1, 64, RouterConfig(experts=8, top_k=2), {"dtype": "float64"}, "dtype: got float64"),
        (1, 64, RouterConfig(experts=8, top_k=2), {"bias": "int8"}, "bias: got int8"),
        (1, 64, RouterConfig(experts=513, top_k=2), {}, "experts: got 513 in 1 groups, wanted at most 512"),
        (1, 64, RouterConfig(experts=330, top_k=2, groups=33, groups_kept=2), {}, "experts: got 330 in 33 groups"),
        (1, 64, RouterConfig(experts=64, top_k=33), {}, "top_k: got 33, wanted 1 to 32"),
    ],
)
def test_refusals(rows, hidden, config, options, message):
    with pytest.raises(InvalidArgument, match=message):
        route_spec(rows, hidden, config, **({"dtype": "bfloat16"} | options))


def test_refusals_of_finished_logits():
    with pytest.raises(InvalidArgument, match="rows: got 0"):
        route_logits_spec(0, RouterConfig(experts=8, top_k=2))
    with pytest.raises(InvalidArgument, match="experts: got 1000"):
        route_logits_spec(1, RouterConfig(experts=1000, top_k=2))


def inputs_of(rng, spec):
    arrays = {}
    for a in spec.inputs:
        arrays[a.name] = np.arange(a.shape[0], dtype=np.int32) if a.dtype == "int32" else rng.standard_normal(a.shape)
    arrays["w_ptr"] *= 2 * arrays["w_ptr"].shape[1] ** -0.5
    return arrays


def as_given(spec, arrays):
    return {a.name: jnp.asarray(arrays[a.name], a.dtype) for a in spec.inputs}


def check_against_the_oracle(config, given, out):
    """Each choice is as good as the exact one from the kernel's own normed rows, up to near ties of f32."""
    choice, weights = route_oracle(config, given, out["normed_ptr"], out["ids_ptr"])
    best = -np.sort(-choice, axis=1)[:, : config.top_k]
    taken = np.take_along_axis(choice, out["ids_ptr"], 1)
    np.testing.assert_allclose(taken, best, rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == config.top_k for row in out["ids_ptr"].tolist())
    np.testing.assert_allclose(out["scale_ptr"], weights, rtol=2e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ROUTERS)
def test_on_a_gpu(name, dtype):
    """One row's bits at every number of rows, in every place and company; new inputs at every call."""
    rng = np.random.default_rng(0)
    spec = spec_for(name, 1, dtype)
    alone = inputs_of(rng, spec)
    first = on_a_gpu((spec,), as_given(spec, alone))
    for rows in BUCKETS:
        spec = spec_for(name, rows, dtype)
        for position in positions_of(rows):
            arrays = alone | {k: v for k, v in inputs_of(rng, spec).items() if k in ("x_ptr", "position_ptr")}
            arrays["x_ptr"][position] = alone["x_ptr"][0]
            given = as_given(spec, arrays)
            out = on_a_gpu((spec,), given)
            for key in ("ids_ptr", "scale_ptr", "normed_ptr"):
                same_bits(out[key][position], first[key][0])
            check_against_the_oracle(ROUTERS[name][1], given, out)


@pytest.mark.gpu
def test_many_new_inputs_on_a_gpu():
    """A part that is read before it is written shows in few calls of many; so do rows of NaN and rows not there."""
    rng = np.random.default_rng(1)
    for rows in (3, 64, 256):
        spec = spec_for("qwen3", rows)
        weights = inputs_of(rng, spec)
        for _ in range(60):
            arrays = weights | {"x_ptr": rng.standard_normal(weights["x_ptr"].shape)}
            arrays["position_ptr"] = np.where(np.arange(rows) == 1, -1, 5).astype(np.int32)
            arrays["x_ptr"][2] = np.nan
            given = as_given(spec, arrays)
            out = on_a_gpu((spec,), given)
            assert (out["ids_ptr"][1] == -1).all() and not out["scale_ptr"][1].any()
            assert out["ids_ptr"][2].tolist() == list(range(8))
            rest = [row for row in range(rows) if row not in (1, 2)]
            if rest:
                chosen = {name: value[np.array(rest)] for name, value in out.items()}
                check_against_the_oracle(ROUTERS["qwen3"][1], given, chosen)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUTERS)
def test_finished_logits_on_a_gpu(name):
    rng, config = np.random.default_rng(2), ROUTERS[name][1]

    def call(rows, logits, bias):
        spec = logits_spec_for(name, rows)
        values = {"logits_ptr": logits, "selection_bias_ptr": bias}
        return spec, on_a_gpu((spec,), as_given(spec, values))

    bias = 0.1 * rng.standard_normal(logits_spec_for(name, 1).inputs[1].shape)
    row = rng.standard_normal((1, config.experts))
    first = call(1, row, bias)[1]
    for rows in (*BUCKETS, 1000):
        for position in positions_of(rows):
            logits = rng.standard_normal((rows, config.experts))
            logits[position] = row[0]
            spec, out = call(rows, logits, bias)
            for key in first:
                same_bits(out[key][position], first[key][0])
        scale, ids = spec.reference(jnp.asarray(logits, jnp.float32), jnp.asarray(bias, jnp.float32))
        assert (out["ids_ptr"] == np.asarray(ids)).all(1).mean() > 0.99
        np.testing.assert_allclose(np.sort(out["scale_ptr"]), np.sort(scale), rtol=1e-4)
