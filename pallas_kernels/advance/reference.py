"""The end of a decode step in plain `jax.numpy`, with the kernel's argument list."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32

# What `finished` holds.
RUNNING, STOPPED, LENGTH = 0, 1, 2

type _Results = tuple[
    Int32[Array, " T"],
    Int32[Array, " S"],
    Int32[Array, " S"],
    Int32[Array, " S"],
    Int32[Array, "S positions"],
    Int32[Array, " T"],
    Int32[Array, " T"],
]


def advance(
    token: Int32[Array, " T"],
    sequence: Int32[Array, " T"],
    limit: Int32[Array, " S"],
    stop: Int32[Array, " stops"],
    following: Int32[Array, " T"],
    reached: Int32[Array, " S"],
    newest: Int32[Array, " S"],
    finished: Int32[Array, " S"],
    tokens: Int32[Array, "S positions"],
    *,
    recorded: bool,
) -> _Results:
    """New contents of ``following``, ``reached``, ``newest``, ``finished`` and ``tokens``; ``ids`` and ``position``.

    Args:
        recorded: there is a ``tokens``.
    """
    token, sequence, stop, following = (jnp.asarray(a) for a in (token, sequence, stop, following))
    limit, reached, newest, finished, tokens = (jnp.asarray(a) for a in (limit, reached, newest, finished, tokens))
    sequences = limit.shape[0]
    known = (sequence >= 0) & (sequence < sequences)
    own = jnp.where(known, sequence, 0)
    counts = known & (token >= 0) & (following >= 0) & (finished[own] == RUNNING)
    stopped = jnp.any(token[:, None] == stop[None], axis=1)
    end = jnp.where(stopped, STOPPED, jnp.where(following >= limit[own], LENGTH, RUNNING)).astype(jnp.int32)
    target = jnp.where(counts, sequence, sequences)
    reached = reached.at[target].set(following, mode="drop")
    newest = newest.at[target].set(token, mode="drop")
    finished = finished.at[target].set(end, mode="drop")
    if recorded:
        tokens = tokens.at[target, jnp.where(counts, following, 0)].set(token, mode="drop")
    goes_on = counts & (end == RUNNING)
    ids, position, after = (jnp.where(goes_on, value, -1) for value in (token, following, following + 1))
    return after, reached, newest, finished, tokens, ids, position
