"""Shows an open fault: the expert kernel inside jit is wrong now and then at some sizes. Needs a CUDA GPU.

Each call gets new rows, so what an earlier call left in memory is never the right answer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.pallas_kernels.experts import expert_ffn_spec
from moe_jax.pallas_kernels.experts.heuristics import tile_for
from moe_jax.pallas_kernels.grouped_moe import Activation
from moe_jax.pallas_kernels.in_jit import call
from moe_jax.pallas_kernels.plan.specs import plan_spec

CALLS = 300
SWIGLU = Activation(name="swiglu", layout="halves")
SIZES = [  # rows, top-k, experts, H, I, dtype
    (33, 8, 160, 8, 6, "float32"),
    (64, 8, 160, 8, 6, "float32"),
    (48, 6, 72, 8, 6, "bfloat16"),
    (17, 8, 160, 64, 72, "bfloat16"),
    (64, 8, 128, 128, 72, "bfloat16"),
    (64, 8, 128, 2048, 768, "bfloat16"),
]


def wrong_calls(rows: int, k: int, experts: int, hidden: int, inner: int, dtype: str) -> tuple[int, float]:
    """How many of CALLS calls are off, and the largest relative error."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((rows, experts)), axis=1)[:, :k].astype(np.int32)
    scale = rng.random((rows, k)).astype(np.float32) + 0.1
    ffn = expert_ffn_spec(rows, k, experts, hidden, inner, dtype=dtype, activation=SWIGLU)
    plan = plan_spec(rows, k, experts, tile_for(rows, k, experts, hidden, inner, dtype).block_n)
    made = {a.name: jnp.zeros(a.shape, a.dtype) for a in ffn.inputs}
    for name in ("gate_up_ptr", "down_ptr"):
        shape = made[name].shape
        made[name] = jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]), dtype)
    made |= {"ids_ptr": jnp.asarray(ids), "scale_ptr": jnp.asarray(scale)}

    def inputs(x):
        groups = call(plan, (made["ids_ptr"], jnp.zeros(1, jnp.int32)))
        named = made | dict(zip(("used_ptr", "block_row_ptr", "block_pair_ptr"), groups, strict=True)) | {"x_ptr": x}
        return [named[a.name] for a in ffn.inputs]

    run = jax.jit(lambda x: call(ffn, inputs(x))[0])
    reference = jax.jit(lambda x: ffn.reference(*inputs(x)))
    wrong, worst = 0, 0.0
    for _ in range(CALLS):
        x = jnp.asarray(rng.normal(size=(rows, hidden)), dtype)
        got, want = (np.asarray(f(x)).astype(np.float64) for f in (run, reference))
        error = np.abs(got - want).max() / np.abs(want).max()
        worst = max(worst, error)
        wrong += not error < (1e-4 if dtype == "float32" else 3e-2)
    return wrong, worst


if __name__ == "__main__":
    print(jax.devices()[0].device_kind, "jax", jax.__version__)
    for size in SIZES:
        wrong, worst = wrong_calls(*size)
        print(*size, f"wrong {wrong} of {CALLS}, worst {worst:.2g}", flush=True)
