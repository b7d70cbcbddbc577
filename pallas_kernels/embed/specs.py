"""The embedding kernel bound to shapes."""

from __future__ import annotations

from ..errors import InvalidArgument
from ..plan.specs import power_of_two
from ..spec import Argument, KernelSpec, check_float
from .reference import embed as reference

# Elements of a row that one program copies: few enough that even one row is spread over several processors.
BLOCK = 512


def embed_spec(rows: int, vocabulary: int, hidden: int, *, dtype: str, pdl: bool = False) -> KernelSpec:
    """The embedding of each row's token.

    Inputs, in order: ``ids`` int32 ``[T]``; ``table`` ``[V, H]``. Output: ``x`` ``[T, H]``, 0 for an id that is
    negative (a row that is not there) or past the table, which is never read out of range.
    It opens a step: with ``pdl`` it waits before it lets the next launch start.

    Args:
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``, of table and output.
        pdl: launch while the kernel before still runs (sm_90).

    Raises:
        InvalidArgument: no rows, an empty table, or another dtype.
    """
    where = "embed_spec"
    if rows < 1:
        raise InvalidArgument("rows", where=where, got=rows, wanted="at least 1")
    if vocabulary < 1 or hidden < 1:
        raise InvalidArgument("sizes of the table", where=where, got=f"{vocabulary} x {hidden}", wanted="at least 1")
    check_float(where, dtype)
    from .triton import embed as kernel

    block = min(BLOCK, power_of_two(hidden))
    return KernelSpec(
        name="embed",
        function=kernel,
        arguments=(
            Argument("ids_ptr", "int32", (rows,), "in"),
            Argument("table_ptr", dtype, (vocabulary, hidden), "in"),
            Argument("x_ptr", dtype, (rows, hidden), "out"),
        ),
        constexprs=(("VOCABULARY", vocabulary), ("HIDDEN", hidden), ("BLOCK", block), ("PDL", pdl)),
        grid=(rows, -(-hidden // block), 1),
        num_warps=2 if block == BLOCK else 1,
        num_stages=1,
        enable_fp_fusion=False,
        pdl=pdl,
        opens=True,
        reference=reference,
    )
