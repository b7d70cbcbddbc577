"""Exactly known results through every shipped tile, and sizes on the edges of tiles: interpreted and on a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreting import run_interpreted

pytest.importorskip("triton")

from arena import launched
from chains import (
    BUCKETS,
    RELU2,
    SHAPES,
    constants,
    many_rows_are_exact,
    one_launch_is_exact,
    prefill_tiles,
    tiles,
)
from edges import EDGES, PATHS, Edge, compare

import backends as bench
from moe_jax.pallas_kernels.grouped_moe import ExpertWeights, MoEConfig, grouped_moe
from moe_jax.pallas_kernels.grouped_moe.api import GROUPED_MOE
from moe_jax.pallas_kernels.route import RouterConfig, Routing

DTYPES = ("bfloat16", "float16", "float32")


@pytest.mark.slow
def test_interpreted_edges() -> None:
    """Triton decides between compiling and interpreting when it is imported, so these run in a fresh process."""
    run_interpreted("interpreted_edges.py")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_C30_compiled_kernels_agree_with_the_reference_at_the_edges(edge: Edge, path: str, dtype: str) -> None:
    for seed in range(3):
        compare(launched, path, edge, dtype, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_C31_every_tile_of_one_launch_gives_8192(dtype: str) -> None:
    for rows, tile in tiles(dtype):
        one_launch_is_exact(launched, rows, tile, jnp.dtype(dtype).type)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_C31_every_tile_of_many_rows_gives_8192(dtype: str) -> None:
    for tile in prefill_tiles(dtype):
        many_rows_are_exact(launched, tile, jnp.dtype(dtype).type)


def chained(backend: str, shape: tuple[int, int, int, int], rows: tuple[int, ...], dtype: str) -> None:
    """The public op on equal numbers, at several row counts."""
    hidden, inner, experts, k = shape
    gate_up, down, scale, result = constants(hidden, inner, k)
    config = MoEConfig(router=RouterConfig(experts=experts, top_k=k), activation=RELU2)
    weights = ExpertWeights(
        gate_up=jnp.full((experts, inner, hidden), gate_up, dtype), down=jnp.full((experts, hidden, inner), down, dtype)
    )
    call = jax.jit(lambda x, r, w: grouped_moe(x, r, w, config, backend=backend))
    rng = np.random.default_rng(0)
    for tokens in rows:
        with bench.served(backend, tokens, dtype, (hidden, inner)):
            ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k].astype(np.int32)
            r = Routing(jnp.full(ids.shape, scale, jnp.float32), jnp.asarray(ids))
            got = np.asarray(call(jnp.ones((tokens, hidden), dtype), r, weights)).astype(np.float32)
            np.testing.assert_array_equal(got, np.full(got.shape, result, np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_C31_the_reference_gives_8192(dtype: str) -> None:
    assert constants(128, 64, 2)[3] == 8192
    chained("reference", (128, 64, 2, 2), (64,), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [b.name for b in GROUPED_MOE.backends])
@pytest.mark.parametrize("rows", [BUCKETS[::2], BUCKETS[1::2], (65, 256), (4096,)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_C31_the_op_is_exact_at_shipped_shapes(name: str, rows: tuple[int, ...], backend: str) -> None:
    chained(backend, SHAPES[name], rows, "bfloat16")


def test_a_wrong_element_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the report: some elements of the second product miss a part of the sum."""

    def wrong(spec: Any, given: Any) -> dict[str, np.ndarray]:
        arrays = {a.name: np.full(a.shape, 8192, np.float32) for a in spec.arguments}
        arrays["out_ptr"].flat[-1] = 8191
        return arrays

    with pytest.raises(AssertionError, match="Mismatched elements: 1"):
        one_launch_is_exact(wrong, *tiles("float32")[0], np.float32)
