"""Row buckets: the row counts that steps are built for. A step of fewer rows leaves the others dead."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from moe_jax.pallas_kernels.errors import InvalidArgument


def row_buckets(maximum: int) -> tuple[int, ...]:
    """Powers of two below the declared maximum, and the maximum itself, so that the busiest case has a graph too.

    Raises:
        InvalidArgument: a maximum below 1.
    """
    if maximum < 1:
        raise InvalidArgument("maximum", where="row_buckets", got=maximum, wanted="at least 1")
    return (*(1 << power for power in range((maximum - 1).bit_length())), maximum)


def bucket_for(rows: int, buckets: Sequence[int]) -> int | None:
    """The least of the ascending buckets that holds ``rows`` rows; None where none does."""
    index = bisect.bisect_left(buckets, rows)
    return buckets[index] if rows >= 1 and index < len(buckets) else None
