"""Embedding in plain `jax.numpy`."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def embed(ids: Int32[Array, " T"], table: Float[Array, "V H"]) -> Float[Array, "T H"]:
    """The table's row of each id; 0 for an id outside 0 to V - 1."""
    ids, table = jnp.asarray(ids), jnp.asarray(table)
    there = (ids >= 0) & (ids < table.shape[0])
    return jnp.where(there[:, None], table[jnp.where(there, ids, 0)], jnp.zeros((), table.dtype))
