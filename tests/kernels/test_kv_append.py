"""Rotation and append: interpreted, compiled for two capabilities, and on a GPU."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from interpreting import run_interpreted

pytest.importorskip("triton")

from decode_cases import BUCKETS, append_oracle, check_compiled, kv_case, on_a_gpu, same_bits

from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.kv_append import kv_append_spec

SIZES = {"sequences": 64, "pages": 600, "page_size": 16, "max_pages": 8, "positions": 128}


def spec_for(rows: int, norm=None, **more):
    return kv_append_spec(rows, 32, 4, 128, dtype="bfloat16", norm=norm, **SIZES, **more)


@pytest.mark.slow
def test_interpreted():
    run_interpreted("interpreted_decode.py", "kv_append")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("norm", [None, "head", "projection"])
def test_compiles_without_spills(norm, capability):
    check_compiled(spec_for(16, norm, clip=8.0, pdl=capability == 90), capability)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 8, 96), (12, 4, 80), (3, 1, 64)])
def test_other_heads_compile(heads, kv_heads, dim):
    check_compiled(kv_append_spec(4, heads, kv_heads, dim, dtype="float16", norm="head", **SIZES), 80)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((1, 5, 4, 64), {}, "5, 4"),
        ((1, 4, 4, 63), {}, "dim 63"),
        ((1, 4, 4, 64), {"page_size": 24}, "got 24"),
        ((0, 4, 4, 64), {}, "rows: got 0"),
        ((1, 4, 4, 64), {"dtype": "float64"}, "float64"),
        ((1, 4, 4, 64), {"norm": "heads"}, "norm: got 'heads'"),
    ],
)
def test_refusals(arguments, options, message):
    with pytest.raises(InvalidArgument, match=message):
        kv_append_spec(*arguments, **({"dtype": "bfloat16"} | SIZES | options))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [None, "head", "projection"])
def test_on_a_gpu(norm):
    """New rows and pages at every call; a page that no row has keeps its NaN."""
    rng = np.random.default_rng(0)
    first, alone = None, {}
    for rows in BUCKETS:
        spec = spec_for(rows, norm)
        given = kv_case(rng, rows=rows, **SIZES)
        for a in spec.inputs:
            if a.name not in given:
                given[a.name] = rng.standard_normal(a.shape)
        for name in ("k_pages_ptr", "v_pages_ptr"):
            given[name][0] = np.nan
        alone = alone or given
        given |= {name: alone[name] for name in ("q_gain_ptr", "k_gain_ptr", "cos_ptr", "sin_ptr")}
        for name in ("qkv_ptr", "position_ptr", "sequence_ptr"):
            given[name][rows // 2] = alone[name][0]
        arrays = {a.name: jnp.asarray(given[a.name], a.dtype) for a in spec.inputs}
        exact = {name.removesuffix("_ptr"): np.asarray(value) for name, value in arrays.items()}
        exact |= {name: exact[name].astype(np.float64) for name in ("qkv", "k_pages", "v_pages", "q_gain", "k_gain")}
        wanted = append_oracle(norm=norm, **exact)
        out = on_a_gpu((spec,), arrays)
        first = out["q_ptr"][0] if first is None else first
        same_bits(out["q_ptr"][rows // 2], first)
        for name, value in zip(("q_ptr", "k_pages_ptr", "v_pages_ptr"), wanted, strict=True):
            got = out[name].reshape(value.shape).astype(np.float64)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(value))
            # By heads: where a rotation cancels, one value may be off by more than its own size.
            apart, size = (np.linalg.norm(np.nan_to_num(a), axis=-1) for a in (got - value, value))
            assert (apart <= 1e-2 * size).all()
