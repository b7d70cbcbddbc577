"""What JAX users have: `jax.lax.ragged_dot`, JAX's Mosaic GPU example of it, and tokamax's."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from moe_jax.bench.contenders import Contender, Work, chain
from moe_jax.bench.layer import Layer, Step
from moe_jax.errors import CannotServe

type Matmul = Callable[[Array, Array, Array], Array]


class Sorted(NamedTuple):
    """A routing with its P = T·k pairs sorted by expert on the host, which costs the peer nothing."""

    order: Int32[Array, " P"]
    back: Int32[Array, " P"]
    sizes: Int32[Array, " E"]
    scale: Float32[Array, "T k"]


def sort_pairs(layer: Layer, step: Step) -> Sorted:
    """The pairs of a step by ascending expert."""
    flat = step.host_ids.reshape(-1)
    order = np.argsort(flat, kind="stable").astype(np.int32)
    sizes = np.bincount(flat, minlength=layer.shape.experts).astype(np.int32)
    there = jax.device_put((order, np.argsort(order).astype(np.int32), sizes), layer.device)
    return Sorted(there[0], there[1], there[2], step.scale)


def layer_by(matmul: Matmul, x: Float[Array, "T H"], given: tuple[Sorted, tuple[Array, Array]]) -> Float[Array, "T H"]:
    """The layer by a grouped matmul of sorted rows."""
    plan, (gate_up, down) = given
    k = plan.scale.shape[1]
    gate, up = jnp.split(matmul(x[plan.order // k], gate_up, plan.sizes), 2, axis=1)
    y = matmul((jax.nn.silu(gate) * up).astype(x.dtype), down, plan.sizes)
    y = y[plan.back].reshape(x.shape[0], k, -1)
    return (y.astype(jnp.float32) * plan.scale[:, :, None]).sum(1).astype(x.dtype)


def _works(layer: Layer, steps: Sequence[Step], matmuls: Sequence[tuple[str, Matmul, bool]]) -> Iterator[Work]:
    """A work for each ``(label, matmul, whether it wants weights as [E, in, out])``."""
    plans = [sort_pairs(layer, step) for step in steps]
    rows = [step.x for step in steps]
    for label, matmul, turned in matmuls:
        packed = layer.transposed if turned else tuple((s.gate_up, s.down) for s in layer.sets)
        given = [(plan, packed[i % len(packed)]) for i, plan in enumerate(plans)]
        yield Work(label, "jit", *chain(functools.partial(layer_by, matmul), rows, given))


def by_rows_of_weights(rows: Array, weights: Array, sizes: Array) -> Array:
    """`jax.lax.ragged_dot_general` on weights ``[E, out, in]``."""
    numbers = jax.lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0])
    return jax.lax.ragged_dot_general(rows, weights, sizes, numbers)


def ragged_dot(layer: Layer, steps: Sequence[Step]) -> Iterator[Work]:
    """Weights as it wants them, and as ours are."""
    matmuls = [("[E, in, out]", jax.lax.ragged_dot, True), ("[E, out, in]", by_rows_of_weights, False)]
    return _works(layer, steps, matmuls)


# block_m, block_n, block_k, steps in flight, columns of tiles that go together
MOSAIC_FEW = ((64, 128, 64, 6, 4), (64, 64, 64, 6, 1))
MOSAIC_MANY = ((128, 128, 64, 4, 1), (128, 128, 64, 5, 4), (64, 128, 64, 6, 8))


def ragged_dot_mgpu(layer: Layer, steps: Sequence[Step]) -> Iterator[Work]:
    """JAX's example for Hopper, on our layout of weights."""
    if getattr(layer.device, "compute_capability", None) != "9.0":
        raise CannotServe("device", where="ragged_dot_mgpu", got=layer.device.device_kind, wanted="capability 9.0")
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot as kernel

    def matmul(rows: Array, weights: Array, sizes: Array, *, tile: tuple[int, ...]) -> Array:
        m, n, k, flying, together = tile
        columns = weights.shape[1] // n
        return kernel(
            rows,
            weights,
            group_sizes=sizes,
            block_m=m,
            block_n=n,
            block_k=k,
            max_concurrent_steps=flying,
            grid_block_n=next(c for c in range(min(together, columns), 0, -1) if columns % c == 0),
            transpose_rhs=True,
        )

    hidden, inner, experts, k = layer.shape
    many = steps[0].x.shape[0] * k / experts > 64
    fitting = [
        t for t in (MOSAIC_MANY if many else MOSAIC_FEW)
        if not (hidden % t[1] or hidden % t[2] or 2 * inner % t[1] or inner % t[2])
    ]  # fmt: skip
    return _works(layer, steps, [(str(tile), functools.partial(matmul, tile=tile), False) for tile in fitting])


def tokamax(layer: Layer, steps: Sequence[Step]) -> Iterator[Work]:
    """Its own choice of implementation, and each by name."""
    import tokamax as library

    names = (None, "mosaic", "triton")
    by_name = [(str(name), functools.partial(library.ragged_dot, implementation=name), True) for name in names]
    return _works(layer, steps, by_name)


def contenders() -> list[Contender]:
    """Those that can be imported."""
    found = [
        Contender("jax.lax.ragged_dot", False, ragged_dot),
        Contender("ragged_dot_mgpu", False, ragged_dot_mgpu),
    ]
    if importlib.util.find_spec("tokamax"):
        found.append(Contender("tokamax.ragged_dot", False, tokamax))
    return found
