"""The small-row matmul: interpreted, compiled for two capabilities, and on a GPU."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreting import run_interpreted

pytest.importorskip("triton")

from decode_cases import (
    BUCKETS,
    check_compiled,
    linear_oracle,
    on_a_gpu,
    positions_of,
    relative_error,
    same_bits,
)

from moe_jax.pallas_kernels.compiled import compile_spec, disassembly
from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.linear import api, linear_spec, tile_for

SHAPES = {
    "qkv": (2048, 5120, {"norm_eps": 1e-6}),
    "out": (4096, 2048, {"residual": True}),
    "odd": (704, 1410, {"bias": True}),
}


def spec_for(name: str, rows: int, dtype: str = "bfloat16", **more):
    inputs, outputs, options = SHAPES[name]
    return linear_spec(rows, inputs, outputs, dtype=dtype, **options, **more)


@pytest.mark.slow
def test_interpreted():
    run_interpreted("interpreted_decode.py", "linear")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_compiles_without_spills(name, rows, capability):
    check_compiled(spec_for(name, rows, pdl=capability == 90), capability)


@pytest.mark.parametrize("capability", [80, 90])
def test_float32_compiles_without_spills(capability):
    check_compiled(spec_for("qkv", 64, "float32"), capability)


@pytest.mark.parametrize("capability", [86, 89, 120])
def test_devices_with_little_shared_memory_get_tiles_that_fit(capability, monkeypatch):
    spec = linear_spec(64, 2048, 151936, dtype="bfloat16", capability=capability)
    if capability == 89:
        assert compile_spec(spec, capability).shared <= 99 * 1024
    full = linear_spec(64, 2048, 151936, dtype="bfloat16")
    assert spec.num_stages < full.num_stages
    assert (spec.constexprs, spec.grid, spec.num_warps) == (full.constexprs, full.grid, full.num_warps)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 2048), (151936, 2048)))
    monkeypatch.setattr(api, "capability_of", lambda array: capability)
    assert api._spec(x, w, None, None, None, 1e-6, "bfloat16").key == spec.key


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["qkv", "out"])
def test_parts_are_released_before_the_arrival_and_read_after_it(name, capability):
    """The machine code of the hand-over: all stores of parts, fence, count, invalidation, barrier, reads past L1."""
    code = disassembly(compile_spec(spec_for(name, 4), capability))
    pattern = r"\b(STG|MEMBAR\.\w+\.GPU|ATOMG\.E\.ADD\.STRONG\.GPU|CCTL\.IVALL|BAR\.SYNC|LDG\.E\S*STRONG\.GPU)"
    order = " ".join(found.split(".")[0] for found in re.findall(pattern, code))
    assert order.count("ATOMG") == 1
    before, after = order.split("ATOMG")
    assert re.search(r"STG( BAR)+ MEMBAR $", before)
    assert re.match(r" CCTL( BAR)+( LDG)+( BAR| STG)*$", after)


def test_the_arithmetic_does_not_look_at_rows():
    for inputs, outputs, _ in SHAPES.values():
        tiles = {tile_for(rows, inputs, outputs, "bfloat16") for rows in BUCKETS}
        assert len({(t.block_k, t.split) for t in tiles}) == 1


def test_a_norm_without_an_epsilon_has_room_for_its_sums():
    spec = linear_spec(3, 2048, 2048, dtype="bfloat16", norm_eps=0.0)
    assert dict(spec.constexprs)["NORM"]
    shapes = {a.name: a.shape for a in spec.arguments}
    assert shapes["square_ptr"] == (*shapes["partial_ptr"][:2], 3)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((65, 64, 64), {}, "got 65, wanted 1 to 64"),
        ((0, 64, 64), {}, "got 0, wanted 1 to 64"),
        ((1, 0, 64), {}, "got 0 to 64"),
        ((1, 64, 64), {"dtype": "float64"}, "float64"),
        ((1, 64, 64), {"out_dtype": "int32"}, "int32"),
        ((1, 100, 64), {"tile": replace(tile_for(1, 2048, 64, "bfloat16"), early=True)}, "100 x 64"),
        ((1, 2048, 64), {"tile": replace(tile_for(1, 2048, 64, "bfloat16"), block_k=256, early=False)}, "got 256"),
        ((9, 64, 64), {"tile": tile_for(8, 64, 64, "bfloat16")}, "got 8, wanted at least rows=9"),
    ],
)
def test_refusals(arguments, options, message):
    with pytest.raises(InvalidArgument, match=message):
        linear_spec(*arguments, **({"dtype": "bfloat16"} | options))


def inputs_of(rng, spec):
    arrays = {a.name: rng.standard_normal(a.shape).astype(np.float32) for a in spec.inputs}
    arrays["w_ptr"] *= arrays["w_ptr"].shape[1] ** -0.5
    return arrays


def as_given(spec, arrays):
    return {a.name: jnp.asarray(arrays[a.name], a.dtype) for a in spec.inputs}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_on_a_gpu(name):
    """New inputs at every call: an old value left over is never the right one."""
    rng = np.random.default_rng(0)
    spec = spec_for(name, 1)
    alone = inputs_of(rng, spec)
    first = on_a_gpu((spec,), as_given(spec, alone))["out_ptr"][0]
    for rows in BUCKETS:
        for position in positions_of(rows):
            spec = spec_for(name, rows)
            arrays = inputs_of(rng, spec) | {k: alone[k] for k in ("w_ptr", "gain_ptr", "bias_ptr")}
            for key in ("x_ptr", "residual_ptr"):
                if arrays[key].shape != (1,):
                    arrays[key][position] = alone[key][0]
            given = as_given(spec, arrays)
            out = on_a_gpu((spec,), given)["out_ptr"]
            same_bits(out[position], first)
            exact = {k.removesuffix("_ptr"): np.asarray(v).astype(np.float64) for k, v in given.items()}
            wanted = linear_oracle(**{k: v for k, v in exact.items() if v.shape != (1,)})
            assert relative_error(out, wanted) <= 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qkv", "out"])
def test_steps_in_one_product_change_no_bit(name):
    rng = np.random.default_rng(3)
    for rows in (1, 16):
        spec = spec_for(name, rows)
        given = as_given(spec, inputs_of(rng, spec))
        first = on_a_gpu((spec,), given)["out_ptr"]
        inputs, outputs, _ = SHAPES[name]
        tile = tile_for(rows, inputs, outputs, "bfloat16")
        for block_k in (256, 512):
            again = spec_for(name, rows, tile=replace(tile, block_k=block_k))
            same_bits(on_a_gpu((again,), given)["out_ptr"], first)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [("float16", 6e-4), ("float32", 2e-6)])
def test_other_dtypes_on_a_gpu(dtype, bound):
    rng = np.random.default_rng(1)
    for name in SHAPES:
        for rows in (1, 5, 64):
            spec = spec_for(name, rows, dtype, out_dtype="float32")
            given = as_given(spec, inputs_of(rng, spec))
            out = on_a_gpu((spec,), given)["out_ptr"]
            exact = {k.removesuffix("_ptr"): np.asarray(v).astype(np.float64) for k, v in given.items()}
            assert relative_error(out, linear_oracle(**{k: v for k, v in exact.items() if v.shape != (1,)})) <= bound


@pytest.mark.gpu
def test_many_new_inputs_on_a_gpu():
    """A part that is read before it is written shows in few calls of many."""
    rng = np.random.default_rng(2)
    for name in ("qkv", "out"):
        spec = spec_for(name, 16)
        w = as_given(spec, inputs_of(rng, spec))
        for _ in range(60):
            given = as_given(spec, {k: rng.standard_normal(v.shape) for k, v in w.items()} | {"w_ptr": w["w_ptr"]})
            out = on_a_gpu((spec,), given)["out_ptr"]
            wanted = np.asarray(spec.reference(*(given[a.name] for a in spec.inputs)))
            assert relative_error(out, wanted.astype(np.float64)) <= 4e-3
