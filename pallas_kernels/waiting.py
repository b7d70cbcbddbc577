"""Waiting inside a kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pause(NANOSECONDS: tl.constexpr):
    """Wait about that long. Who polls without a pause slows the loads of those it waits for."""
    tl.inline_asm_elementwise(
        "nanosleep.u32 $1; mov.u32 $0, 0;", "=r,r", [NANOSECONDS], dtype=tl.int32, is_pure=False, pack=1
    )
