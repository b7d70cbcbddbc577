"""What the rows of a launch are about, as the block of memory that the device keeps up to date by itself afterwards."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from jaxtyping import Int32

from .sequences import Sequence
from .step import FIELDS, Geometry


def row_block(
    geometry: Geometry, sequences: Items[Sequence], chunk: Items[int] = (), start: int = 0
) -> Int32[np.ndarray, " words"]:
    """The memory called ``"rows"``: one row for each of ``sequences``, the others dead (negative ids and positions).

    Args:
        chunk: of a prompt: the token that each row reads, from position ``start`` on; then no row makes a token. Empty:
            each row reads the last token of its sequence and makes the next one.
    """
    words = geometry.stride // 4
    block = np.zeros(sum(FIELDS.values()) * words, np.int32)
    fields = {name: block[at // 4 :][: FIELDS[name] * words] for name, at in geometry.offsets.items()}
    for name in ("ids", "position", "following"):
        fields[name][:] = -1
    real = {name: fields[name].view(np.float32) for name in ("temperature", "top_p")}
    for row, sequence in enumerate(sequences):
        position = start + row if chunk else sequence.length - 1
        fields["ids"][row] = chunk[row] if chunk else sequence.newest
        fields["position"][row] = position
        fields["following"][row] = -1 if chunk else position + 1
        fields["sequence"][row] = sequence.place
        fields["draw"][row] = sequence.draw
        fields["seed"][2 * row : 2 * row + 2] = np.asarray(sequence.sampling.seed).view(np.int32)
        real["temperature"][row] = sequence.sampling.temperature
        real["top_p"][row] = sequence.sampling.top_p
        fields["top_k"][row] = sequence.top_k
    return block
