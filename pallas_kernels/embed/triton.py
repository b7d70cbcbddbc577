"""Rows of a table by id."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def embed(
    ids_ptr,
    table_ptr,
    x_ptr,
    VOCABULARY: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """See `embed.specs.embed_spec` for the arguments."""
    if PDL:
        # In this order: what does not change during a step may be read early by the launches behind this one.
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + row)
    there = (token >= 0) & (token < VOCABULARY)
    inside = at < HIDDEN
    # In 64 bits: a table may have more than 2**31 elements.
    source = table_ptr + tl.where(there, token, 0).to(tl.int64) * HIDDEN + at
    x = tl.where(there, tl.load(source, mask=inside, other=0.0), 0.0)
    tl.store(x_ptr + row.to(tl.int64) * HIDDEN + at, x.to(x_ptr.dtype.element_ty), mask=inside)
