"""Grouping in plain NumPy: the definition."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32


def plan_blocks(
    ids: Int32[np.ndarray, "T k"], weight_row: Int32[np.ndarray, " E"] | None, experts: int, block_n: int
) -> tuple[Int32[np.ndarray, " 1"], Int32[np.ndarray, " N"], Int32[np.ndarray, "N block_n"]]:
    """Number of blocks used, and each block's weight row and pairs: experts ascending, pairs in order."""
    from .specs import block_count

    flat = np.asarray(ids).reshape(-1)
    count = block_count(ids.shape[0], ids.shape[1], experts, block_n)
    row, pair = np.full(count, -1, np.int32), np.full((count, block_n), -1, np.int32)
    used = 0
    for e in range(experts):
        (mine,) = np.nonzero(flat == e)
        for first in range(0, len(mine), block_n):
            row[used] = e if weight_row is None else weight_row[e]
            pair[used, : len(mine[first : first + block_n])] = mine[first : first + block_n]
            used += 1
    return np.array([used], np.int32), row, pair
