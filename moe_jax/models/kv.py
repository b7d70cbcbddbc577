"""Keys and values of past tokens, in storage of a fixed size.

Row b of a layer's storage holds position p at index p. Nothing is shifted or padded on the left: prompts of
different lengths are padded on the right, and the first generated token overwrites the first padding place.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


class KV(NamedTuple):
    """Keys and values of one layer, C positions for each row."""

    keys: Float[Array, "B C kv_heads D"]
    values: Float[Array, "B C kv_heads D"]


Cache = tuple[KV, ...]


def to_capacity(kv: KV, lengths: Int32[Array, " B"], capacity: int) -> KV:
    """A prompt's keys and values as storage for ``capacity`` positions; padding places become 0."""
    positions = kv.keys.shape[1]
    live = (jnp.arange(positions, dtype=jnp.int32) < lengths[:, None])[:, :, None, None]
    widths = ((0, 0), (0, capacity - positions), (0, 0), (0, 0))
    # By select, so that a NaN or infinity of a padding token cannot reach a later sum as 0 * NaN.
    return KV(*(jnp.pad(jnp.where(live, x, jnp.zeros((), x.dtype)), widths) for x in kv))


def write(kv: KV, new: KV, positions: Int32[Array, "B T"]) -> KV:
    """Storage with each row's new tokens at that row's own positions; positions past the end are dropped."""
    rows = jnp.arange(positions.shape[0], dtype=jnp.int32)[:, None]
    return KV(*(old.at[rows, positions].set(x, mode="drop") for old, x in zip(kv, new, strict=True)))
