"""Rotation and append: interpreted, compiled for two capabilities, and on a GPU."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from decode_cases import BUCKETS, check_compiled, kv_case, on_device, run_interpreted, same_bits

from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.kv_append import kv_append_spec

SIZES = {"sequences": 64, "pages": 600, "page_size": 16, "max_pages": 8, "positions": 128}


def spec_for(rows: int, norm=None, **more):
    return kv_append_spec(rows, 32, 4, 128, dtype="bfloat16", norm=norm, **SIZES, **more)


def test_interpreted():
    run_interpreted("kv_append")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("norm", [None, "head", "projection"])
def test_compiles_without_spills(norm, capability):
    check_compiled(spec_for(16, norm, clip=8.0, pdl=capability == 90), capability)


@pytest.mark.parametrize(
    ("heads", "dim", "page_size", "message"), [(5, 64, 16, "5, 4"), (4, 63, 16, "dim 63"), (4, 64, 24, "got 24")]
)
def test_refusals(heads, dim, page_size, message):
    with pytest.raises(InvalidArgument, match=message):
        kv_append_spec(1, heads, 4, dim, dtype="bfloat16", **(SIZES | {"page_size": page_size}))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [None, "head", "projection"])
def test_on_a_gpu(norm):
    rng = np.random.default_rng(0)
    first = None
    for rows in BUCKETS:
        spec = spec_for(rows, norm)
        given = kv_case(rng, rows=rows, **SIZES)
        for a in spec.arguments:
            if a.role in ("in", "inout") and a.name not in given:
                given[a.name] = rng.standard_normal(a.shape)
        if first is None:
            alone = given
        else:
            given |= {name: alone[name] for name in ("q_gain_ptr", "k_gain_ptr", "cos_ptr", "sin_ptr")}
            for name in ("qkv_ptr", "position_ptr", "sequence_ptr"):
                given[name][rows // 2] = alone[name][0]
        arrays = {a.name: jnp.asarray(given[a.name], a.dtype) for a in spec.arguments if a.name in given}
        wanted = spec.reference(*(arrays[a.name] for a in spec.arguments if a.role in ("in", "inout")))
        wanted = [np.asarray(w).astype(np.float32) for w in wanted]
        out = on_device((spec,), arrays)
        first = out["q_ptr"][0] if first is None else first
        same_bits(out["q_ptr"][rows // 2], first)
        for name, value in zip(("k_pages_ptr", "v_pages_ptr", "q_ptr"), wanted, strict=True):
            np.testing.assert_allclose(out[name].astype(np.float32), value, rtol=1e-2, atol=1e-2)
