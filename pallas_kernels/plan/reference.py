"""Grouping in plain NumPy: the definition."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32


def plan_blocks(
    ids: Int32[np.ndarray, "T k"], weight_row: Int32[np.ndarray, " E"], block_n: int
) -> tuple[Int32[np.ndarray, " N"], Int32[np.ndarray, " N"], Int32[np.ndarray, "N block_n"]]:
    """Blocks of one expert each, experts ascending, pairs in order; one row's pairs are a block each."""
    from .specs import block_count

    flat, experts = np.asarray(ids).reshape(-1), len(weight_row)
    count = block_count(*ids.shape, experts, block_n)
    if ids.shape[0] == 1:
        groups = [(e, [p]) if 0 <= e < experts else (-1, []) for p, e in enumerate(flat)]
    else:
        groups = []
        for e in range(experts):
            (mine,) = np.nonzero(flat == e)
            groups += [(e, list(mine[i : i + block_n])) for i in range(0, len(mine), block_n)]
    expert, row = np.full(count, -1, np.int32), np.full(count, -1, np.int32)
    pair = np.full((count, block_n), -1, np.int32)
    for i, (e, mine) in enumerate(groups):
        if e >= 0:
            expert[i], row[i] = e, weight_row[e]
            pair[i, : len(mine)] = mine
    return expert, row, pair
