"""The expert kernel on a GPU: inside jit and launched raw, against the reference and bit for bit against itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ACTIVATIONS, buffers, routing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA GPU"),
]

QWEN3 = {"top_k": 8, "experts": 128, "hidden": 2048, "inner": 768}
ODD = {"top_k": 3, "experts": 5, "hidden": 192, "inner": 72}


def inputs_of(spec, rng, tokens, experts, k):
    ids, scale = routing(rng, tokens, experts, k)
    if tokens > 2:
        ids[1], ids[2, 0] = -1, experts
    return {name: jnp.asarray(value) for name, value in buffers(spec, rng, ids, scale).items()}


def error(out, wanted):
    out, wanted = np.asarray(out, np.float64), np.asarray(wanted, np.float64)
    return np.linalg.norm(out - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: f"{a.name}-{a.layout}-{a.limit_after}")
@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 8e-3), ("float16", 1e-3), ("float32", 1e-5)])
def test_inside_jit(activation, dtype, bound):
    from moe_jax.pallas_kernels.experts import expert_ffn_spec
    from moe_jax.pallas_kernels.in_jit import call

    rng = np.random.default_rng(0)
    for tokens in (1, 5):
        spec = expert_ffn_spec(
            tokens, **ODD, dtype=dtype, activation=activation, slots=7, gate_up_bias=True, down_bias=True, residual=True
        )
        made = inputs_of(spec, rng, tokens, ODD["experts"], ODD["top_k"])
        given = [made[a.name] for a in spec.inputs]
        (out,) = jax.jit(lambda *xs, spec=spec: call(spec, xs))(*given)
        assert error(out, spec.reference(*given)) < bound


@pytest.mark.parametrize("pdl", [False, True])
def test_raw_launch_in_a_graph_equals_jit(pdl):
    from cuda.core import Device

    from moe_jax.pallas_kernels.compiled import compile_spec
    from moe_jax.pallas_kernels.experts import expert_ffn_spec
    from moe_jax.pallas_kernels.in_jit import call
    from moe_jax.pallas_kernels.launcher import capture, load_kernel

    rng = np.random.default_rng(1)
    options = QWEN3 | {"dtype": "bfloat16", "activation": ACTIVATIONS[0]}
    spec = expert_ffn_spec(4, **options, pdl=pdl)
    made = inputs_of(spec, rng, 4, 128, 8)
    plain = expert_ffn_spec(4, **options)
    (wanted,) = jax.jit(lambda *xs: call(plain, xs))(*(made[a.name] for a in plain.inputs))
    jax.block_until_ready([wanted, made])
    device = Device(0)
    device.set_current()
    if device.compute_capability != (9, 0):
        pytest.skip("cubin for sm_90")
    kernel, stream = load_kernel(spec, compile_spec(spec, 90)), device.create_stream()
    addresses = [made[a.name].unsafe_buffer_pointer() for a in spec.arguments]
    graph = capture(stream, lambda builder: kernel.launch(builder, addresses))
    for _ in range(3):
        graph.launch(stream)
        stream.sync()
        np.testing.assert_array_equal(np.asarray(made["out_ptr"].copy()), np.asarray(wanted))
    assert not np.asarray(made["state_ptr"].copy()).any()
