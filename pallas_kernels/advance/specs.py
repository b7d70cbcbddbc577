"""The end of a decode step bound to shapes."""

from __future__ import annotations

import functools

from ..errors import InvalidArgument
from ..plan.specs import power_of_two
from ..spec import Argument, KernelSpec
from .reference import LENGTH, RUNNING, STOPPED
from .reference import advance as reference

__all__ = ["LENGTH", "RUNNING", "STOPPED", "advance_spec"]

BLOCK = 32
MAX_STOPS = 64


def advance_spec(
    rows: int, max_sequences: int, stops: int, *, max_tokens: int | None = None, pdl: bool = False
) -> KernelSpec:
    """Drawn tokens become the next inputs; sequences that end become rows that are not there.

    It is the last launch of a step. All it needs and leaves is device data, so while no sequence joins or leaves, the
    same graph is replayed again and again, and the host has nothing to do in between.

    **Rows** of a step are described by four arrays ``[T]``, which the host writes when sequences join or leave:

    * ``ids``: the row's input token, for `embed_spec`; -1 for a row that is not there.
    * ``position``: where that token stands in its sequence, for routing, append and attention; -1 likewise.
    * ``sequence``: its sequence, 0 to S - 1; the row of the block table.
    * ``following``: where the drawn token will stand, which is ``position + 1``, for `sample_specs`; -1 for a row
      whose token does not count: one that is not there, and every row of a prompt chunk but the last (all of them,
      while more of the prompt is to come). No two rows of one sequence may have a ``following``.

    Inputs, in order: ``token`` int32 ``[T]``, as drawn, -1 for none; ``sequence``; ``limit`` int32 ``[S]``: a sequence
    ends with the token that stands there or further on, so n prompt tokens and m new ones end at ``n + m - 1``;
    ``stop`` int32 ``[stops]``: tokens that end a sequence, the rest filled with -1.
    Updated in place: ``following``; and by sequence ``reached`` int32 ``[S]``, where its newest token stands;
    ``newest`` int32 ``[S]``, that token; ``finished`` int32 ``[S]``: `RUNNING`, `STOPPED` by a token of ``stop`` (which
    is kept, and wins over the limit) or `LENGTH`; ``tokens`` int32 ``[S, max_tokens]``: a sequence's tokens by
    position, of which each step adds one, so that the host may read many steps' tokens at once.
    Outputs: ``ids`` and ``position`` of the next step, written everywhere.

    A row goes on when its token counts and its sequence does not end with it: ``ids``, ``position`` and ``following``
    are then token, old ``following`` and one more. Every other row is -1 in all three from there on. A row whose
    sequence is not `RUNNING` before the step changes nothing of it: any other number in ``finished`` retires a
    sequence without laying out the rows anew.

    To join, a sequence needs ``limit`` and ``finished`` (0), and rows; its prompt need not stand in ``tokens``.

    Args:
        max_sequences: S.
        stops: room for tokens that end a sequence.
        max_tokens: positions of ``tokens``; what stands further on is not recorded. None: ``tokens`` keeps its place
            with shape ``(1,)`` and is left alone.
        pdl: launch while the kernel before still runs (sm_90).

    Raises:
        InvalidArgument: a size out of range.
    """
    where = "advance_spec"
    for name, size in (("rows", rows), ("max_sequences", max_sequences), ("max_tokens", max_tokens)):
        if size is not None and size < 1:
            raise InvalidArgument(name, where=where, got=size, wanted="at least 1")
    if not 1 <= stops <= MAX_STOPS:
        raise InvalidArgument("stops", where=where, got=stops, wanted=f"1 to {MAX_STOPS}")
    from .triton import advance as kernel

    of_rows, of_sequences, block = (rows,), (max_sequences,), min(BLOCK, power_of_two(rows))
    return KernelSpec(
        name="advance",
        function=kernel,
        arguments=(
            Argument("token_ptr", "int32", of_rows, "in"),
            Argument("sequence_ptr", "int32", of_rows, "in"),
            Argument("limit_ptr", "int32", of_sequences, "in"),
            Argument("stop_ptr", "int32", (stops,), "in"),
            Argument("following_ptr", "int32", of_rows, "inout"),
            Argument("reached_ptr", "int32", of_sequences, "inout"),
            Argument("newest_ptr", "int32", of_sequences, "inout"),
            Argument("finished_ptr", "int32", of_sequences, "inout"),
            Argument("tokens_ptr", "int32", (1,) if max_tokens is None else (max_sequences, max_tokens), "inout"),
            Argument("ids_ptr", "int32", of_rows, "out"),
            Argument("position_ptr", "int32", of_rows, "out"),
        ),
        constexprs=(
            ("ROWS", rows),
            ("SEQUENCES", max_sequences),
            ("STOPS", stops),
            ("MAX_TOKENS", max_tokens or 0),
            ("BLOCK", block),
            ("PDL", pdl),
        ),
        grid=(-(-rows // block), 1, 1),
        num_warps=1,
        num_stages=1,
        enable_fp_fusion=False,
        pdl=pdl,
        reference=functools.partial(reference, recorded=max_tokens is not None),
    )
