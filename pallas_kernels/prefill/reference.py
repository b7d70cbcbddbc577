"""The throughput path in plain NumPy and `jax.numpy`: what each launch must compute.

Rows of padding hold anything in a kernel's output; here they hold zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from ..grouped_moe.activation import Activation, activate


class Plan(NamedTuple):
    """Pairs grouped by expert: experts ascending, an expert's pairs in order, in blocks of B places.

    Attributes:
        used: int32 ``[1]``, blocks that hold something.
        block_row: int32 ``[N]``, where a block's expert stands in the weight stacks; -1: unused.
        block_pair: int32 ``[N, B]``, ``token * k + rank`` of each place; -1: padding, always after a block's pairs.
        place: int32 ``[T, k]``, where a pair stands in the flattened blocks; -1: it names no expert.
        blocks: int32 ``[E]``, blocks of each expert.
    """

    used: Int32[Array, " 1"]
    block_row: Int32[Array, " N"]
    block_pair: Int32[Array, "N B"]
    place: Int32[Array, "T k"]
    blocks: Int32[Array, " E"]


def plan_pairs(
    ids: Int32[np.ndarray, "T k"], weight_row: Int32[np.ndarray, " E"] | None, experts: int, block: int
) -> Plan:
    """Grouping in plain NumPy: the definition."""
    from ..plan.specs import block_count

    ids = np.asarray(ids)
    flat = ids.reshape(-1)
    count = block_count(ids.shape[0], ids.shape[1], experts, block)
    row, pair = np.full(count, -1, np.int32), np.full((count, block), -1, np.int32)
    place, used, blocks = np.full(flat.shape, -1, np.int32), 0, np.zeros(experts, np.int32)
    for e in range(experts):
        (mine,) = np.nonzero(flat == e)
        for first in range(0, len(mine), block):
            part = mine[first : first + block]
            row[used] = e if weight_row is None else weight_row[e]
            pair[used, : len(part)] = part
            place[part] = used * block + np.arange(len(part))
            used += 1
            blocks[e] += 1
    used = np.array([used], np.int32)
    return Plan(used, row, pair, place.reshape(ids.shape), blocks)  # pyrefly: ignore[bad-argument-type]


def count_pairs(ids: Int32[np.ndarray, "T k"], experts: int, chunk: int) -> Int32[np.ndarray, "E chunks"]:
    """Pairs of each expert in each chunk of pairs."""
    flat = np.asarray(ids).reshape(-1)
    chunks = [flat[first : first + chunk] for first in range(0, len(flat), chunk)]
    return np.stack([(part[None] == np.arange(experts)[:, None]).sum(1) for part in chunks], 1).astype(np.int32)


def scan_chunks(
    counts: Int32[np.ndarray, "E chunks"],
) -> tuple[Int32[np.ndarray, "E chunks"], Int32[np.ndarray, " E"]]:
    """Each expert's pairs before each chunk, and in all chunks."""
    counts = np.asarray(counts)
    return (np.cumsum(counts, 1) - counts).astype(np.int32), counts.sum(1).astype(np.int32)


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _rows_by_block(
    rows: Float[Array, "N B n"],
    block_row: Int32[Array, " N"],
    weights: Float[Array, "S m n"],
    bias: Float[Array, "S m"],
) -> Float[Array, "N B m"]:
    wide = _wide(rows.dtype)
    at = jnp.maximum(jnp.asarray(block_row), 0)
    total = jnp.einsum(
        "bsi,boi->bso", rows, jnp.asarray(weights)[at], precision=lax.Precision.HIGHEST, preferred_element_type=wide
    )
    return total if bias.ndim == 1 else total + jnp.asarray(bias)[at].astype(wide)[:, None]


def gate_up(
    x: Float[Array, "T H"],
    used: Int32[Array, " 1"],
    block_row: Int32[Array, " N"],
    block_pair: Int32[Array, "N B"],
    weights: Float[Array, "S rows H"],
    bias: Float[Array, "S rows"],
    *,
    activation: Activation,
    top_k: int,
) -> Float[Array, "NB I"]:
    """``activate(weights[row] @ x[pair // k])`` in planned order, rounded once. Gathers experts: small shapes."""
    pair = jnp.asarray(block_pair)
    rows = jnp.where((pair >= 0)[..., None], jnp.asarray(x)[jnp.maximum(pair, 0) // top_k], 0)
    value = activate(_rows_by_block(rows, block_row, weights, bias), activation)
    return jnp.where((pair >= 0)[..., None], value, 0).astype(x.dtype).reshape(-1, value.shape[-1])


def down(
    inner: Float[Array, "NB I"],
    used: Int32[Array, " 1"],
    block_row: Int32[Array, " N"],
    block_pair: Int32[Array, "N B"],
    weights: Float[Array, "S H I"],
    bias: Float[Array, "S H"],
) -> Float[Array, "NB H"]:
    """``weights[row] @ inner`` in planned order, rounded to the dtype of ``inner``."""
    live = jnp.asarray(block_pair)[..., None] >= 0
    rows = jnp.where(live, jnp.asarray(inner).reshape(*block_pair.shape, -1), 0)
    value = jnp.where(live, _rows_by_block(rows, block_row, weights, bias), 0)
    return value.astype(inner.dtype).reshape(-1, value.shape[-1])


def combine(
    pair: Float[Array, "NB H"],
    place: Int32[Array, "T k"],
    scale: Float32[Array, "T k"],
    residual: Float[Array, "T H"],
) -> Float[Array, "T H"]:
    """Weighted sum of each token's pairs in rank order, in f32, plus the residual (absent: shape ``(1,)``)."""
    wide, place = _wide(pair.dtype), jnp.asarray(place)
    rows = jnp.asarray(pair)[jnp.maximum(place, 0)].astype(wide)
    exists = (place >= 0)[..., None]
    total = jnp.zeros((place.shape[0], pair.shape[1]), wide)
    for rank in range(place.shape[1]):
        value = jnp.asarray(scale)[:, rank, None].astype(wide) * rows[:, rank]
        total = total + jnp.where(exists[:, rank], value, 0)
    return (total if residual.ndim == 1 else total + jnp.asarray(residual).astype(wide)).astype(pair.dtype)
