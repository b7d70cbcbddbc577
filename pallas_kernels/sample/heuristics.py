"""Chunks of the vocabulary. They change no token."""

from __future__ import annotations

CHUNK = 2048
NUM_WARPS = 8


def chunk_for(vocabulary: int) -> int:
    """Logits of one program."""
    return min(CHUNK, max(256, 1 << (vocabulary - 1).bit_length()))
