"""The small-row matmul: interpreted, compiled for two capabilities, and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from decode_cases import BUCKETS, check_compiled, on_device, positions_of, run_interpreted, same_bits

from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.linear import linear_spec, tile_for

SHAPES = {
    "qkv": (2048, 5120, {"norm_eps": 1e-6}),
    "out": (4096, 2048, {"residual": True}),
    "odd": (704, 1410, {"bias": True}),
}


def spec_for(name: str, rows: int, **more):
    inputs, outputs, options = SHAPES[name]
    return linear_spec(rows, inputs, outputs, dtype="bfloat16", **options, **more)


def test_interpreted():
    run_interpreted("linear")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_compiles_without_spills(name, rows, capability):
    pdl = capability == 90
    check_compiled(spec_for(name, rows, pdl=pdl), capability)


def test_the_arithmetic_does_not_look_at_rows():
    for inputs, outputs, _ in SHAPES.values():
        tiles = {tile_for(rows, inputs, outputs, "bfloat16") for rows in BUCKETS}
        assert len({(t.block_k, t.split) for t in tiles}) == 1


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((65, 64, 64), {}, "got 65, wanted 1 to 64"),
        ((1, 64, 64), {"dtype": "float64"}, "float64"),
        ((1, 100, 64), {"tile": replace(tile_for(1, 2048, 64, "bfloat16"), early=True)}, "100 x 64"),
    ],
)
def test_refusals(arguments, options, message):
    with pytest.raises(InvalidArgument, match=message):
        linear_spec(*arguments, **({"dtype": "bfloat16"} | options))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_on_a_gpu(name):
    rng = np.random.default_rng(0)

    def inputs(rows):
        spec = spec_for(name, rows)
        arrays = {a.name: rng.standard_normal(a.shape).astype(np.float32) for a in spec.inputs}
        return spec, arrays

    spec, alone = inputs(1)
    alone["w_ptr"] *= alone["w_ptr"].shape[1] ** -0.5
    as_given = lambda arrays: {k: jnp.asarray(v, jnp.bfloat16) for k, v in arrays.items()}  # noqa: E731
    first = on_device((spec,), as_given(alone))["out_ptr"][0]
    for rows in BUCKETS:
        for position in positions_of(rows):
            spec, given = inputs(rows)
            given |= {k: alone[k] for k in ("w_ptr", "gain_ptr", "bias_ptr")}
            for key in ("x_ptr", "residual_ptr"):
                if given[key].shape != (1,):
                    given[key][position] = alone[key][0]
            given = as_given(given)
            out = on_device((spec,), given)["out_ptr"]
            same_bits(out[position], first)
        wide = {k: v.astype(jnp.float32) for k, v in given.items()}
        wanted = np.asarray(spec.reference(*(wide[a.name] for a in spec.inputs))).astype(np.float32)
        assert np.linalg.norm(out.astype(np.float32) - wanted) <= 4e-3 * np.linalg.norm(wanted)
