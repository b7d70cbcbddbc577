"""`jax.lax.ragged_dot` on the same layers: what a JAX user has today.

python benchmarks/peers_jax.py --json FILE
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from experts_cases import BENCHED, SHAPES, routing


@jax.jit
def layer(x, order, back, sizes, scale, gate_up, down):
    """Rows sorted by expert; weights ``[E, in, out]`` as ragged_dot wants them."""
    k = scale.shape[1]
    h = jax.lax.ragged_dot(x[order // k], gate_up, sizes)
    gate, up = jnp.split(h, 2, axis=1)
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, down, sizes)[back].reshape(x.shape[0], k, -1)
    return (y.astype(jnp.float32) * scale[:, :, None]).sum(1).astype(x.dtype)


def measure(shape: tuple[int, int, int, int], tokens: int, weights, repeats: int = 10) -> float:
    """Microseconds a layer, calls chained without waiting."""
    hidden, _, experts, k = shape
    ids, scale = routing(np.random.default_rng(tokens), tokens, experts, k)
    order = np.argsort(ids.reshape(-1), kind="stable").astype(np.int32)
    sizes = np.bincount(ids.reshape(-1), minlength=experts).astype(np.int32)
    x = jax.random.normal(jax.random.key(0), (tokens, hidden), jnp.bfloat16)
    plan = [jnp.asarray(a) for a in (order, np.argsort(order).astype(np.int32), sizes, scale)]
    x = jax.block_until_ready(layer(x, *plan, *weights))
    start = time.perf_counter()
    for _ in range(repeats):
        x = layer(x, *plan, *weights)
    x.block_until_ready()
    return (time.perf_counter() - start) / repeats * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    found = []
    for shape in SHAPES:
        hidden, inner, experts, _ = shape
        keys = jax.random.split(jax.random.key(1))
        gate_up = jax.random.normal(keys[0], (experts, hidden, 2 * inner), jnp.bfloat16) * hidden**-0.5
        down = jax.random.normal(keys[1], (experts, inner, hidden), jnp.bfloat16) * inner**-0.5
        for tokens in BENCHED:
            us = measure(shape, tokens, (gate_up, down))
            found.append({"shape": shape, "tokens": tokens, "us": us})
            print("jax.lax.ragged_dot", shape, tokens, f"{us:.0f} us", flush=True)
    args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
