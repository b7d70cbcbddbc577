"""The routing kernel: interpreted, compiled for two capabilities, and on a GPU."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from decode_cases import BUCKETS, check_compiled, on_device, positions_of, run_interpreted, same_bits

from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.route import RouterConfig
from moe_jax.pallas_kernels.route.specs import route_spec

ROUTERS = {
    "qwen3": (2048, RouterConfig(experts=128, top_k=8, renormalize=True), {}),
    "mixtral": (4096, RouterConfig(experts=8, top_k=2, renormalize=True), {}),
    "gpt-oss": (2880, RouterConfig(experts=32, top_k=4, score="topk_softmax"), {"bias": "bfloat16"}),
    "deepseek-v3": (
        7168,
        RouterConfig(experts=256, top_k=8, score="sigmoid", renormalize=True, groups=8, groups_kept=4),
        {"selection_bias": True},
    ),
}


def spec_for(name: str, rows: int, **more):
    hidden, config, options = ROUTERS[name]
    return route_spec(rows, hidden, config, dtype="bfloat16", norm_eps=1e-6, masked=True, **options, **more)


def test_interpreted():
    run_interpreted("route or C01 or C12 or C13 or ties_go")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ROUTERS)
def test_compiles_without_spills(name, capability):
    check_compiled(spec_for(name, 16, pdl=capability == 90), capability)


def test_refusals():
    with pytest.raises(InvalidArgument, match="got 257, wanted 1 to 256"):
        spec_for("qwen3", 257)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUTERS)
def test_on_a_gpu(name):
    rng = np.random.default_rng(0)

    def inputs(rows):
        spec = spec_for(name, rows)
        arrays = {}
        for a in spec.inputs:
            arrays[a.name] = np.arange(rows, dtype=np.int32) if a.dtype == "int32" else rng.standard_normal(a.shape)
        return spec, arrays

    def as_given(spec, arrays):
        return {a.name: jnp.asarray(arrays[a.name], a.dtype) for a in spec.inputs}

    spec, alone = inputs(1)
    alone["w_ptr"] *= 2 * alone["w_ptr"].shape[1] ** -0.5
    first = on_device((spec,), as_given(spec, alone))
    for rows in BUCKETS:
        for position in positions_of(rows):
            spec, given = inputs(rows)
            given = alone | {k: given[k] for k in ("x_ptr", "position_ptr")}
            given["x_ptr"][position] = alone["x_ptr"][0]
            given = as_given(spec, given)
            out = on_device((spec,), given)
            for key in ("ids_ptr", "scale_ptr", "normed_ptr"):
                same_bits(out[key][position], first[key][0])
        scale, ids, _ = (np.asarray(v) for v in spec.reference(*(given[a.name] for a in spec.inputs)))
        # f32 sums of another order may swap near ties: few rows, and never what they weigh.
        assert (out["ids_ptr"] == ids).all(1).mean() > 0.8
        np.testing.assert_allclose(np.sort(out["scale_ptr"]), np.sort(scale), rtol=1e-3)
