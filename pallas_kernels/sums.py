"""A sum in Triton that has one order wherever it stands."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_by_pairs(x):
    """Sums of the rows of ``[N, SIZE]``, SIZE a power of two: neighbours, then neighbours among those, and so on, which
    is one order in whatever layout x has and whatever kernel this stands in.
    """
    for _ in tl.static_range(30):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 2)
    return tl.reshape(x, [x.shape[0]])
