"""What every back end of kernels shares: the shared expert before the routed ones, gradients, ``vmap``, platforms."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..as_operation import as_operation
from ..route.config import Routing
from . import reference
from .weights import ExpertWeights, MoEConfig

type Rows = Float[Array, "T H"]
type Ffn = Callable[[Rows, Routing, ExpertWeights, MoEConfig, Rows | None], Rows]


def by_kernels(ffn: Ffn) -> Callable[[Rows, Routing, ExpertWeights, MoEConfig], Rows]:
    """`grouped_moe` from a function that launches kernels for the routed experts.

    The shared expert is the reference's, rounded once to the dtype of ``x``, and goes in as the residual. Reverse mode
    runs the reference backwards. Under ``vmap`` batch elements become rows; with weights of their own they run one
    after another. Compiled for another platform than CUDA, which only XLA sees, it is the reference.

    Args:
        ffn: of ``x``, routing, weights without a shared expert, config and the residual or None; at least one row.
    """

    @functools.cache
    def operation(config: MoEConfig, most: int):
        def launch(x, scale, ids, residual, weights):
            return ffn(x, Routing(scale, ids), weights, config, residual)

        def plain(x, scale, ids, residual, weights):
            out = reference.grouped_moe(x, Routing(scale, ids), weights, config)
            return out if residual is None else out + residual

        # A row that is there to fill a launch up has no expert.
        return as_operation(launch, plain, rows={0: 0, 1: 0, 2: -1, 3: 0}, most=most)

    @functools.partial(jax.jit, static_argnums=3)
    def run(x: Rows, routing: Routing, weights: ExpertWeights, config: MoEConfig) -> Rows:
        from ..prefill.specs import MAX_PAIRS  # which imports this package's activations

        routed = ExpertWeights(
            gate_up=weights.gate_up,
            down=weights.down,
            gate_up_bias=weights.gate_up_bias,
            down_bias=weights.down_bias,
        )
        residual = None
        if weights.shared is not None:
            residual = reference.shared_expert(x, weights.shared, config, jnp.dtype(jnp.float32)).astype(x.dtype)
        most = max(1, MAX_PAIRS // routing.ids.shape[1])  # a batch of calls may have more than each of them
        return operation(config, most)(x, routing.weights, routing.ids, residual, routed)

    return run
