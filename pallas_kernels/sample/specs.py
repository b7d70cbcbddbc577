"""Sampling bound to shapes: two launches, over the logits and over logits with noise."""

from __future__ import annotations

from ..errors import InvalidArgument
from ..plan.specs import power_of_two
from ..spec import Argument, KernelSpec
from .heuristics import NUM_WARPS, chunk_for


def sample_specs(
    rows: int, vocabulary: int, *, dtype: str = "float32", chunk: int | None = None, pdl: bool = False
) -> tuple[KernelSpec, KernelSpec]:
    """One token for each row, as two launches.

    First launch. Inputs: ``logits`` ``[T, V]``; ``position`` int32 ``[T]``, where the new token will stand, negative
    for a row that is not there. Outputs, for the second: ``top`` f32 and ``at`` int32 ``[T, chunks]``, written for
    rows that are there.
    Second launch. Inputs: ``logits``, ``position``; ``sequence`` int32 ``[T]``; ``seed`` int32 ``[T, 2]``, high and low
    word; ``temperature`` f32 ``[T]``, 0 for the largest logit; ``top_k`` int32 ``[T]``, 0 for all; ``top_p`` f32
    ``[T]``, 1 for all; ``top``, ``at``. Scratch and state: each chunk's best. Output: ``token`` int32 ``[T]``, -1 for
    rows that are not there. `sample.reference.sample` says what is drawn; all parameters are device data, each row
    its own.

    Args:
        dtype: of the logits, ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        chunk: logits of one program, a power of two; by default `chunk_for`.
        pdl: launch while the kernel before still runs (sm_90).

    Raises:
        InvalidArgument: no rows or no vocabulary.
    """
    if rows < 1 or vocabulary < 1:
        got = f"{rows} rows of {vocabulary}"
        raise InvalidArgument("shape of logits", where="sample_specs", got=got, wanted="at least 1 of each")
    from .triton import sample_draw, sample_scan

    chunk = chunk or chunk_for(vocabulary)
    chunks = -(-vocabulary // chunk)
    of_chunks = (rows, chunks)
    logits = Argument("logits_ptr", dtype, (rows, vocabulary), "in")
    position = Argument("position_ptr", "int32", (rows,), "in")
    first = KernelSpec(
        name="sample_scan",
        function=sample_scan,
        arguments=(
            logits,
            position,
            Argument("top_ptr", "float32", of_chunks, "out"),
            Argument("at_ptr", "int32", of_chunks, "out"),
        ),
        constexprs=(("V", vocabulary), ("CHUNK", chunk), ("CHUNKS", chunks), ("PDL", pdl)),
        grid=(rows, chunks, 1),
        num_warps=NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=False,
        pdl=pdl,
    )
    second = KernelSpec(
        name="sample_draw",
        function=sample_draw,
        arguments=(
            logits,
            position,
            Argument("sequence_ptr", "int32", (rows,), "in"),
            Argument("seed_ptr", "int32", (rows, 2), "in"),
            Argument("temperature_ptr", "float32", (rows,), "in"),
            Argument("top_k_ptr", "int32", (rows,), "in"),
            Argument("top_p_ptr", "float32", (rows,), "in"),
            Argument("top_ptr", "float32", of_chunks, "in"),
            Argument("at_ptr", "int32", of_chunks, "in"),
            Argument("noisy_ptr", "int32", of_chunks, "scratch"),
            Argument("noisy_at_ptr", "int32", of_chunks, "scratch"),
            Argument("sum_ptr", "int32", (rows, chunks, 2), "scratch"),
            Argument("state_ptr", "int32", (rows,), "state"),
            Argument("token_ptr", "int32", (rows,), "out"),
        ),
        constexprs=(
            ("V", vocabulary),
            ("CHUNK", chunk),
            ("CHUNKS", chunks),
            ("CHUNKS_POW2", power_of_two(chunks)),
            ("PDL", pdl),
        ),
        grid=(rows, chunks, 1),
        num_warps=NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=False,
        pdl=pdl,
    )
    return first, second
