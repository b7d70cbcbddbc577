"""The launches of the throughput path bound to shapes: grouping, gate-up, down and the sum over a token's pairs."""

from __future__ import annotations

import functools

from ..errors import InvalidArgument
from ..grouped_moe.activation import Activation
from ..plan.specs import block_count, power_of_two
from ..spec import Argument, KernelSpec, check_float
from . import reference
from .heuristics import MatmulTile, PrefillTile

MAX_PAIRS = 1 << 24
"""Pairs of one call. Places are int32 and lie below pairs + E * block."""

# One launch counts all pairs in every program; beyond this many (pairs x experts) three launches are less work.
_ALONE = 1 << 20
# Pairs that a program of one launch counts at once, and chunks that the scan takes at once: what registers hold.
_COUNT, _SCAN = 8192, 2048
_NONE = (1,)


def plan_specs(
    tokens: int, top_k: int, experts: int, block: int, *, slots: int | None = None
) -> tuple[KernelSpec, ...]:
    """Blocks of ``block`` places with one expert, for many pairs: one launch, or three (count, scan, place).

    The last takes ``ids`` int32 ``[T, k]`` (-1 or E: none); ``weight_row`` int32 ``[E]``, the slot of each expert in
    the weight stacks; and, of three, what the scan gives. It writes the arrays of a `reference.Plan`. The first
    of three takes ``ids`` and gives counts; the second takes counts.

    Args:
        block: places of a block, a multiple of 8.
        slots: rows of the weight stacks when experts live in slots; None: expert e is row e, ``weight_row`` is absent.

    Raises:
        InvalidArgument: more pairs than `MAX_PAIRS`, no pair, or another block.
    """
    where, pairs = "prefill.plan_specs", tokens * top_k
    if not 1 <= pairs <= MAX_PAIRS:
        raise InvalidArgument("pairs", where=where, got=pairs, wanted=f"1 to {MAX_PAIRS}")
    if block < 8 or block % 8:
        raise InvalidArgument("block", where=where, got=block, wanted="a multiple of 8")
    from . import plan_triton as kernels

    experts_pow2 = max(32, power_of_two(experts))
    alone = power_of_two(pairs) * experts_pow2 <= _ALONE
    # Chunks, parts and blocks at once as measured on an H200. One launch has fewer programs, so each has less to do.
    chunk = 128 if alone else 256
    # Counts of a chunk's parts stand in registers: with many experts there are fewer parts.
    part = min(chunk, 32 * max(1, experts_pow2 // 512))
    chunks, blocks = -(-pairs // chunk), block_count(tokens, top_k, experts, block)
    block_pow2 = power_of_two(block)
    at_once = max(8, (256 if alone else 1024) // block_pow2)
    ids = Argument("ids_ptr", "int32", (tokens, top_k), "in")
    table = (experts, chunks)
    place = KernelSpec(
        name="prefill_plan",
        function=kernels.place_pairs,
        arguments=(
            ids,
            Argument("weight_row_ptr", "int32", _NONE if slots is None else (experts,), "in"),
            Argument("before_ptr", "int32", _NONE if alone else table, "in"),
            Argument("totals_ptr", "int32", _NONE if alone else (experts,), "in"),
            Argument("used_ptr", "int32", (1,), "out"),
            Argument("block_row_ptr", "int32", (blocks,), "out"),
            Argument("block_pair_ptr", "int32", (blocks, block), "out"),
            Argument("place_ptr", "int32", (tokens, top_k), "out"),
            Argument("expert_blocks_ptr", "int32", (experts,), "out"),
        ),
        constexprs=(
            ("PAIRS", pairs),
            ("PAIRS_AT_ONCE", min(_COUNT, power_of_two(pairs))),
            ("EXPERTS", experts),
            ("EXPERTS_POW2", experts_pow2),
            ("CHUNKS", chunks),
            ("CHUNK", chunk),
            ("PART", part),
            ("BLOCKS", blocks),
            ("BLOCK", block),
            ("BLOCK_POW2", block_pow2),
            ("AT_ONCE", at_once),
            ("INDIRECT", slots is not None),
            ("ALONE", alone),
        ),
        grid=(chunks + -(-blocks // at_once), 1, 1),
        num_warps=8,
        num_stages=1,
        enable_fp_fusion=False,
        pdl=False,
        reference=lambda ids, weight_row, *_: reference.plan_pairs(
            ids, None if slots is None else weight_row, experts, block
        ),
    )
    if alone:
        return (place,)
    count = KernelSpec(
        name="prefill_plan_count",
        function=kernels.count_pairs,
        arguments=(ids, Argument("counts_ptr", "int32", table, "out")),
        constexprs=(
            ("PAIRS", pairs),
            ("EXPERTS", experts),
            ("EXPERTS_POW2", experts_pow2),
            ("CHUNKS", chunks),
            ("CHUNK", chunk),
        ),
        grid=(chunks, 1, 1),
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=False,
        pdl=False,
        reference=functools.partial(reference.count_pairs, experts=experts, chunk=chunk),
    )
    scan = KernelSpec(
        name="prefill_plan_scan",
        function=kernels.scan_chunks,
        arguments=(
            Argument("counts_ptr", "int32", table, "in"),
            Argument("before_ptr", "int32", table, "out"),
            Argument("totals_ptr", "int32", (experts,), "out"),
        ),
        constexprs=(("CHUNKS", chunks), ("AT_ONCE", min(_SCAN, power_of_two(chunks)))),
        grid=(experts, 1, 1),
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=False,
        pdl=False,
        reference=reference.scan_chunks,
    )
    return count, scan, place


def row_piece(hidden: int, dtype: str) -> tuple[int, int]:
    """Columns of a row that a program copies or adds, and its warps: 16 bytes a thread, 128 threads at most."""
    each = 4 if dtype == "float32" else 8
    columns = min(128 * each, power_of_two(hidden))
    return columns, max(1, columns // (32 * each))


def combine_spec(
    tokens: int, top_k: int, places: int, hidden: int, *, dtype: str, residual: bool = False
) -> KernelSpec:
    """A token's pair vectors, weighted and added in rank order in f32, then the residual; rounded once.

    Inputs, in order: ``pair`` ``[places, H]`` in planned order; ``place`` int32 ``[T, k]``, rows of it (-1: none, adds
    exactly 0); ``scale`` f32 ``[T, k]``; ``residual`` ``[T, H]``, or shape ``(1,)`` and not read.
    Output: ``out`` ``[T, H]``. All but ``scale`` in ``dtype``.
    """
    from .combine_triton import combine as kernel

    columns, warps = row_piece(hidden, dtype)
    return KernelSpec(
        name="prefill_combine",
        function=kernel,
        arguments=(
            Argument("pair_ptr", dtype, (places, hidden), "in"),
            Argument("place_ptr", "int32", (tokens, top_k), "in"),
            Argument("scale_ptr", "float32", (tokens, top_k), "in"),
            Argument("residual_ptr", dtype, (tokens, hidden) if residual else _NONE, "in"),
            Argument("out_ptr", dtype, (tokens, hidden), "out"),
        ),
        constexprs=(
            ("TOP_K", top_k),
            ("HIDDEN", hidden),
            ("COLUMNS", columns),
            ("RESIDUAL", residual),
        ),
        grid=(tokens * -(-hidden // columns), 1, 1),
        num_warps=warps,
        num_stages=1,
        enable_fp_fusion=False,
        pdl=False,
        reference=reference.combine,
    )


def gate_up_spec(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    inner: int,
    *,
    dtype: str,
    activation: Activation,
    tile: PrefillTile,
    slots: int | None = None,
    bias: bool = False,
) -> KernelSpec:
    """Gate-up and activation of every planned pair.

    Inputs, in order: ``x`` ``[T, H]``; ``used``, ``block_row`` and ``block_pair`` of a `reference.Plan` with
    ``tile.block`` places a block; ``weight`` ``[S, 2I, H]`` (``[S, I, H]`` without gate); ``bias`` ``[S, 2I]``, or
    shape ``(1,)`` and not read. Output: ``out`` ``[N * B, I]`` in planned order and ``dtype``; rows of padding are
    not written.

    Args:
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``, of activations and weights; sums are f32.
        slots: rows S of the weight stacks when experts live in slots; None: S is ``experts``.

    Raises:
        InvalidArgument: a dtype or tile that the kernel does not take.
    """
    return _matmul(
        "prefill_gate_up",
        tokens,
        top_k,
        experts,
        (tokens, hidden),
        inner,
        dtype,
        activation,
        tile,
        tile.gate_up,
        slots,
        bias,
    )


def down_spec(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    inner: int,
    *,
    dtype: str,
    tile: PrefillTile,
    slots: int | None = None,
    bias: bool = False,
) -> KernelSpec:
    """Down projection of every planned pair: inputs and output as `gate_up_spec`'s, with ``x`` its ``[N * B, I]``,
    ``weight`` ``[S, H, I]``, ``bias`` ``[S, H]`` and ``out`` ``[N * B, H]``, the pair vectors that `combine_spec` adds.
    """
    places = block_count(tokens, top_k, experts, tile.block) * tile.block
    return _matmul(
        "prefill_down", tokens, top_k, experts, (places, inner), hidden, dtype, None, tile, tile.down, slots, bias
    )


def _matmul(
    name: str,
    tokens: int,
    top_k: int,
    experts: int,
    rows: tuple[int, int],
    out: int,
    dtype: str,
    activation: Activation | None,
    tile: PrefillTile,
    part: MatmulTile,
    slots: int | None,
    bias: bool,
) -> KernelSpec:
    where = f"{name}_spec"
    check_float(where, dtype)
    for label, value in (("main", tile.main), ("tail", tile.tail or 16)):
        if value != power_of_two(value) or value < 16:
            raise InvalidArgument(f"tile.{label}", where=where, got=value, wanted="a power of two, at least 16")
    fan_in, gated = rows[1], activation is not None and activation.gated
    from .matmul_triton import grouped_matmul as kernel

    blocks = block_count(tokens, top_k, experts, tile.block)
    weight_rows = 2 * out if gated else out
    stack = experts if slots is None else slots
    items = blocks * -(-weight_rows // part.block_m)
    programs = min(items, part.programs or items)
    return KernelSpec(
        name=name,
        function=kernel,
        arguments=(
            Argument("x_ptr", dtype, rows, "in"),
            Argument("used_ptr", "int32", (1,), "in"),
            Argument("block_row_ptr", "int32", (blocks,), "in"),
            Argument("block_pair_ptr", "int32", (blocks, tile.block), "in"),
            Argument("weight_ptr", dtype, (stack, weight_rows, fan_in), "in"),
            Argument("bias_ptr", dtype, (stack, weight_rows) if bias else _NONE, "in"),
            Argument("out_ptr", dtype, (blocks * tile.block, out), "out"),
        ),
        constexprs=(
            ("TOP_K", top_k),
            ("IN", fan_in),
            ("OUT", out),
            ("GATHER", activation is not None),
            ("ACTIVATION", activation.name if activation else "none"),
            ("GATED", gated),
            ("HALVES", activation is not None and activation.layout == "halves"),
            ("LIMIT", float((activation and activation.limit) or 0.0)),
            ("LIMIT_AFTER", bool(activation and activation.limit_after)),
            ("ALPHA", float((activation and activation.alpha) or 0.0)),
            ("BIAS", bias),
            ("BLOCK", tile.block),
            ("MAIN", tile.main),
            ("TAIL", tile.tail),
            ("BLOCK_M", part.block_m),
            ("BLOCK_K", part.block_k),
            ("GROUP", part.group),
            ("ONCE", part.once),
            ("PROGRAMS", programs),
        ),
        grid=(programs, 1, 1),
        num_warps=part.num_warps,
        num_stages=part.num_stages,
        enable_fp_fusion=False,
        pdl=False,
        reference=reference.down
        if activation is None
        else functools.partial(reference.gate_up, activation=activation, top_k=top_k),
    )
