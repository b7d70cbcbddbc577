"""Heads of one program of the append kernel."""

from __future__ import annotations

import math


def block_heads(heads: int, kv_heads: int) -> int:
    """Heads that a program takes: a power of two, so that queries, keys and values never share a program."""
    common = math.gcd(heads, kv_heads)
    return min(8, common & -common)
