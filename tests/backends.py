"""What the suites of the operations share: which back ends to run, how, and random layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.pallas_kernels.dispatch import Operation
from moe_jax.pallas_kernels.errors import CannotServe
from moe_jax.pallas_kernels.grouped_moe import Activation, ExpertWeights, MoEConfig, SharedExpert
from moe_jax.pallas_kernels.route import RouterConfig, Routing

SWIGLU = Activation(name="swiglu", layout="halves")
GPT_OSS = Activation(name="gpt_oss_swiglu", layout="interleaved", limit=7.0, alpha=1.702)


@dataclass(frozen=True, kw_only=True)
class MadeFor:
    """What a back end of `grouped_moe` is made for.

    Attributes:
        rows: least and most; None: any number.
        dtypes: numpy names.
        multiple: H and I must be multiples of it.
        capability: the one compute capability that it runs on; None: any that the package supports.
    """

    rows: tuple[int, int | None]
    dtypes: tuple[str, ...]
    multiple: int = 1
    capability: str | None = None


# Written down here once more, so that no back end gives way in silence and no test of one is skipped.
MADE_FOR = {
    "triton": MadeFor(rows=(1, None), dtypes=("bfloat16", "float16", "float32")),
    "mosaic": MadeFor(rows=(65, None), dtypes=("bfloat16", "float16"), multiple=64, capability="9.0"),
    "reference": MadeFor(rows=(0, None), dtypes=("bfloat16", "float16", "float32", "float64")),
}


def outside(backend: str, rows: int, dtype: Any = "float32", sizes: tuple[int, ...] = ()) -> list[str]:
    """Patterns of what a refusal may say: one for each thing about a call that a back end is not made for."""
    made, name = MADE_FOR[backend], np.dtype(dtype).name
    least, most = made.rows
    device = jax.devices()[0]
    found = []
    if rows < least or (most is not None and rows > most):
        found.append(rf"\b{rows} rows")
    if name not in made.dtypes:
        found.append(rf"\b{name}\b")
    if any(size % made.multiple for size in sizes):
        found.append(rf"multiples? of {made.multiple}\b")
    if made.capability not in (None, getattr(device, "compute_capability", None)):
        found.append("capability|CUDA device")
    return found


def backends_of(operation: Operation) -> list[Any]:
    """Every back end as a parameter: the reference on the CPU, all of them on the GPU.

    The suites that ask are written in float32. One that does not take it has `kernels/test_grid_gpu.py` to itself.
    """
    named = [b.name for b in operation.backends if "float32" in MADE_FOR[b.name].dtypes]
    on_gpu = [pytest.param(name, id=f"{name}-gpu", marks=pytest.mark.gpu) for name in named]
    return [pytest.param("reference", id="reference"), *on_gpu]


@contextmanager
def served(backend: str, rows: int, dtype: Any = "float32", sizes: tuple[int, ...] = ()) -> Iterator[None]:
    """The body of a test that names a back end of `grouped_moe`: outside what that one is for, it must be refused so.

    Args:
        sizes: H and I, where they matter.
    """
    reasons = outside(backend, rows, dtype, sizes)
    if not reasons:
        yield
        return
    with pytest.raises(CannotServe, match=f"{backend}: .*({'|'.join(reasons)})"):
        yield


both_modes = pytest.mark.parametrize("mode", ["eager", "jit"])


def run(mode: str, function: Callable[..., Any], *args: Any) -> Any:
    """Eagerly, or inside one jit."""
    return quick(function, *args) if mode == "jit" else function(*args)


def quick(function: Callable[..., Any], *args: Any) -> Any:
    """All of it in one jit, where eager JAX would compile each operation by itself."""
    return jax.jit(function)(*args)


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32, scale: float = 1.0) -> jax.Array:
    """Normal numbers, made by NumPy so that nothing is compiled."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype)


def layer(
    experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    *,
    activation: Activation = SWIGLU,
    dtype: Any = jnp.float32,
    biases: bool = False,
    shared: int = 0,
    shared_gate: bool = False,
    seed: int = 0,
    **router: Any,
) -> tuple[MoEConfig, ExpertWeights]:
    """A layer whose outputs are of the order of one."""
    config = MoEConfig(router=RouterConfig(experts=experts, top_k=top_k, **router), activation=activation)

    def weight(i: int, *shape: int) -> jax.Array:
        return normal(seed * 100 + i, shape, dtype, 1 / np.sqrt(shape[-1]))

    rows = activation.rows(inner)
    always = None
    if shared:
        gate = weight(6, 1, hidden) if shared_gate else None
        always = SharedExpert(
            gate_up=weight(4, activation.rows(shared), hidden), down=weight(5, hidden, shared), gate=gate
        )
    weights = ExpertWeights(
        gate_up=weight(0, experts, rows, hidden),
        down=weight(1, experts, hidden, inner),
        gate_up_bias=weight(2, experts, rows) if biases else None,
        down_bias=weight(3, experts, hidden) if biases else None,
        shared=always,
    )
    return config, weights


def routing(ids: Any, seed: int = 9) -> Routing:
    """A finished routing with random positive weights."""
    ids = jnp.asarray(ids, jnp.int32)
    weights = np.random.default_rng(seed).uniform(0.1, 1, size=ids.shape)
    return Routing(jnp.asarray(weights, jnp.float32), ids)


def random_ids(seed: int, tokens: int, top_k: int, experts: int, sentinels: bool = False) -> np.ndarray:
    """Distinct experts per row; with ``sentinels`` also -1 and E."""
    rng = np.random.default_rng(seed)
    low, high = (-1, experts + 1) if sentinels else (0, experts)
    return np.stack([rng.permutation(np.arange(low, high))[:top_k] for _ in range(tokens)]).astype(np.int32)


def assert_close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Largest error relative to the largest wanted value."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    if want.size:
        error = np.abs(got - want).max() / max(np.abs(want).max(), 1e-30)
        assert error <= tolerance, f"relative error {error:.3g} above {tolerance:.3g}"


def assert_same_bits(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def dirty_memory(largest: int = 19) -> None:
    """Leave NaN in freed blocks of many sizes, up to 2**largest floats, so that reading unset memory shows."""
    for size in (1 << n for n in range(6, largest + 1)):
        arrays = [jnp.full(size, jnp.nan) for _ in range(3)]
        jax.block_until_ready(arrays)


@contextmanager
def counted_compiles() -> Iterator[list[str]]:
    """The list grows by one entry per XLA compilation."""
    events: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
