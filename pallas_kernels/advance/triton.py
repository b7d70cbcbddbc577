"""The end of a decode step: one thread a row."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import reference

RUNNING = tl.constexpr(reference.RUNNING)
STOPPED = tl.constexpr(reference.STOPPED)
LENGTH = tl.constexpr(reference.LENGTH)


@triton.jit
def advance(
    token_ptr,
    sequence_ptr,
    limit_ptr,
    stop_ptr,
    following_ptr,
    reached_ptr,
    newest_ptr,
    finished_ptr,
    tokens_ptr,
    ids_ptr,
    position_ptr,
    ROWS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    STOPS: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """See `advance.specs.advance_spec` for the arguments."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < ROWS
    token = tl.load(token_ptr + row, mask=inside, other=-1)
    sequence = tl.load(sequence_ptr + row, mask=inside, other=-1)
    following = tl.load(following_ptr + row, mask=inside, other=-1)
    counts = (token >= 0) & (following >= 0) & (sequence >= 0) & (sequence < SEQUENCES)
    counts = counts & (tl.load(finished_ptr + sequence, mask=counts, other=STOPPED) == RUNNING)
    limit = tl.load(limit_ptr + sequence, mask=counts, other=0)
    stopped = row < 0
    for i in tl.static_range(STOPS):
        stopped = stopped | (token == tl.load(stop_ptr + i))
    end = tl.where(stopped, STOPPED, tl.where(following >= limit, LENGTH, RUNNING))
    # One row of a sequence counts, so nobody else writes here.
    tl.store(reached_ptr + sequence, following, mask=counts)
    tl.store(newest_ptr + sequence, token, mask=counts)
    tl.store(finished_ptr + sequence, end, mask=counts)
    if MAX_TOKENS > 0:
        target = tokens_ptr + sequence.to(tl.int64) * MAX_TOKENS + following
        tl.store(target, token, mask=counts & (following < MAX_TOKENS))
    goes_on = counts & (end == RUNNING)
    tl.store(ids_ptr + row, tl.where(goes_on, token, -1), mask=inside)
    tl.store(position_ptr + row, tl.where(goes_on, following, -1), mask=inside)
    tl.store(following_ptr + row, tl.where(goes_on, following + 1, -1), mask=inside)
