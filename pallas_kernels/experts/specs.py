"""The expert kernel bound to shapes, an activation and a tile."""

from __future__ import annotations

import functools

from ..errors import InvalidArgument
from ..grouped_moe.activation import Activation
from ..plan.specs import block_count, power_of_two
from ..spec import Argument, KernelSpec, check_float
from .heuristics import (
    MAX_ROWS,
    MOST_INNER,
    PAIRS,
    ROW_DEPTH,
    ROW_OUTPUTS,
    Tile,
    down_split,
    of_one_arithmetic,
    tile_for,
)
from .reference import expert_ffn as reference


def expert_ffn_spec(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    inner: int,
    *,
    dtype: str,
    activation: Activation,
    slots: int | None = None,
    gate_up_bias: bool = False,
    down_bias: bool = False,
    residual: bool = False,
    tile: Tile | None = None,
    capability: int = 90,
    pdl: bool = False,
) -> KernelSpec:
    """One launch of gate-up, activation, down and the weighted sum in rank order, for 1 to 64 rows.

    Inputs, in order: ``x`` ``[T, H]``; ``ids`` int32 and ``scale`` f32 ``[T, k]`` (a `Routing`; ids of -1 or E add
    exactly 0, so a step with fewer rows than T marks the others so); ``weight_row`` int32 ``[E]``, the slot
    of each expert in the weight stacks, for a single row; ``used``, ``block_row`` and ``block_pair`` from `plan_spec`
    with this tile's ``block_n``, for more rows; ``gate_up`` ``[S, 2I, H]``; ``gate_up_bias`` ``[S, 2I]``;
    ``down`` ``[S, H, I]``; ``down_bias`` ``[S, H]``; ``residual`` ``[T, H]``, added last. An absent optional keeps its
    place with shape ``(1,)`` and is not read.
    Scratch: ``inner`` ``[T * k, I]`` in ``dtype``, ``pair`` f32 ``[T * k * parts, H]``. State: counts of what is done,
    as `Argument` says.
    Output: ``out`` ``[T, H]``.

    With ``tile.ring`` the kernel is `row_gluon`'s, of one row: the same inputs and bits, and no scratch. Device data
    is not checked: every expert that a row names must have a slot from 0 to S - 1.

    Args:
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``, of activations and weights; sums are f32.
        slots: rows S of the weight stacks when experts live in slots; None: expert e is row e.
        tile: by default `tile_for` the capability, 90 for 9.0.
        pdl: launch while the kernel before still runs (sm_90).

    Raises:
        InvalidArgument: rows, dtype or tile out of range; ``tile.ring`` for more than its kernel takes.
    """
    where = "expert_ffn_spec"
    if not 1 <= tokens <= MAX_ROWS:
        raise InvalidArgument("rows", where=where, got=tokens, wanted=f"1 to {MAX_ROWS}")
    check_float(where, dtype)
    tile = tile or tile_for(tokens, top_k, experts, hidden, inner, dtype, capability=capability)
    if tile.ring:
        sizes = (tokens, top_k, experts, hidden, inner)
        return _row_spec(sizes, dtype, activation, slots, gate_up_bias, down_bias, residual, tile, pdl)
    from .triton import expert_ffn as kernel

    rows = activation.rows(inner)
    split = down_split(inner)
    gate_tiles, columns = -(-rows // tile.block_m), -(-hidden // tile.block_m)
    blocks = top_k if tokens == 1 else block_count(tokens, top_k, experts, tile.block_n)
    pairs = tokens * top_k
    tiles = blocks * (gate_tiles + columns * split)
    programs = tiles if tokens == 1 else max(columns, min(tiles, tile.programs))
    inputs = _inputs(
        (tokens, top_k, experts, hidden, inner), dtype, rows, slots, gate_up_bias, down_bias, residual,
        ((1,), (1,)) if tokens == 1 else ((blocks,), (blocks, tile.block_n)),
    )  # fmt: skip
    arguments = (
        *inputs,
        Argument("state_ptr", "int32", (1 + blocks * tile.spread + tokens * columns,), "state"),
        Argument("inner_ptr", dtype, (pairs, inner), "scratch"),
        Argument("pair_ptr", "float32", (pairs * split, hidden), "scratch"),
        Argument("out_ptr", dtype, (tokens, hidden), "out"),
    )
    return KernelSpec(
        name="expert_ffn",
        function=kernel,
        arguments=arguments,
        constexprs=(
            ("TOKENS", tokens),
            ("TOKENS_POW2", power_of_two(tokens)),
            ("TOP_K", top_k),
            ("TOP_K_POW2", power_of_two(top_k)),
            ("EXPERTS", experts),
            ("HIDDEN", hidden),
            ("INNER", inner),
            ("BLOCKS", blocks),
            ("INDIRECT", slots is not None),
            *_activation_constexprs(activation),
            ("GATE_UP_BIAS", gate_up_bias),
            ("DOWN_BIAS", down_bias),
            ("RESIDUAL", residual),
            ("BLOCK_M", tile.block_m),
            ("BLOCK_N", tile.block_n),
            ("BLOCK_K", tile.block_k),
            ("SPLIT", split),
            ("LAG", min(tile.lag, blocks)),
            ("PROGRAMS", programs),
            ("BACKOFF", tile.backoff),
            ("SPREAD", tile.spread),
            ("PDL", pdl),
        ),
        grid=(programs, 1, 1),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
        pdl=pdl,
        reference=functools.partial(reference, activation=activation, experts=experts),
    )


def _inputs(
    sizes: tuple[int, int, int, int, int],
    dtype: str,
    rows: int,
    slots: int | None,
    gate_up_bias: bool,
    down_bias: bool,
    residual: bool,
    blocks: tuple[tuple[int, ...], tuple[int, ...]],
) -> tuple[Argument, ...]:
    """What every kernel of `expert_ffn_spec` takes; ``rows`` of a gate-up matrix, shapes of the arrays of blocks."""
    tokens, top_k, experts, hidden, inner = sizes
    stack, none = experts if slots is None else slots, (1,)
    return (
        Argument("x_ptr", dtype, (tokens, hidden), "in"),
        Argument("ids_ptr", "int32", (tokens, top_k), "in"),
        Argument("scale_ptr", "float32", (tokens, top_k), "in"),
        Argument("weight_row_ptr", "int32", (experts,) if slots is not None and tokens == 1 else none, "in"),
        Argument("used_ptr", "int32", none, "in"),
        Argument("block_row_ptr", "int32", blocks[0], "in"),
        Argument("block_pair_ptr", "int32", blocks[1], "in"),
        Argument("gate_up_ptr", dtype, (stack, rows, hidden), "in"),
        Argument("gate_up_bias_ptr", dtype, (stack, rows) if gate_up_bias else none, "in"),
        Argument("down_ptr", dtype, (stack, hidden, inner), "in"),
        Argument("down_bias_ptr", dtype, (stack, hidden) if down_bias else none, "in"),
        Argument("residual_ptr", dtype, (tokens, hidden) if residual else none, "in"),
    )


def _activation_constexprs(activation: Activation) -> tuple[tuple[str, str | bool | float], ...]:
    return (
        ("ACTIVATION", activation.name),
        ("GATED", activation.gated),
        ("HALVES", activation.layout == "halves"),
        ("LIMIT", float(activation.limit or 0.0)),
        ("LIMIT_AFTER", bool(activation.limit_after)),
        ("ALPHA", float(activation.alpha or 0.0)),
    )


def _row_spec(
    sizes: tuple[int, int, int, int, int],
    dtype: str,
    activation: Activation,
    slots: int | None,
    gate_up_bias: bool,
    down_bias: bool,
    residual: bool,
    tile: Tile,
    pdl: bool,
) -> KernelSpec:
    """`expert_ffn_spec` of one row, by the kernel that streams gate-up and down weights without a break."""
    tokens, top_k, experts, hidden, inner = sizes

    def check(holds: bool, got: object, wanted: str) -> None:
        if not holds:
            raise InvalidArgument("tile.ring", where="expert_ffn_spec", got=got, wanted=wanted)

    check(tokens == 1, f"{tokens} rows", "0, or one row")
    check(top_k <= PAIRS, f"{top_k} experts a row", f"0, or at most {PAIRS} experts a row")
    check(dtype != "float32" and inner <= MOST_INNER, f"{dtype}, I={inner}", f"0, or 16 bits and I up to {MOST_INNER}")
    multiples = f"0, or H and I multiples of {ROW_DEPTH}"
    check(hidden % ROW_DEPTH == 0 and inner % ROW_DEPTH == 0, f"H={hidden}, I={inner}", multiples)
    # Else other row counts run another matrix instruction, whose bits may differ.
    check(of_one_arithmetic(tile) is tile, f"{tile.block_m} rows by {tile.num_warps} warps", "0, or 16 rows a warp")
    most = hidden // ROW_DEPTH
    check(2 <= tile.ring <= most, tile.ring, f"0, or 2 to {most}, the steps of H")
    check(0 <= tile.ahead < tile.ring, f"ring={tile.ring}, ahead={tile.ahead}", "ahead of less than ring")
    from .row_gluon import expert_ffn_row as kernel

    programs, rows = hidden // ROW_OUTPUTS, activation.rows(inner)
    # The fewest lines with which a program has one gate-up tile at most: a multiprocessor reads no faster than its
    # share of the device's rate, so all have to read the same.
    lines = next((n for n in range(16, 16 * PAIRS, 16) if top_k * -(-rows // n) <= programs), 16 * PAIRS)
    inputs = _inputs(sizes, dtype, rows, slots, gate_up_bias, down_bias, residual, ((1,), (1,)))
    return KernelSpec(
        name="expert_ffn_row",
        function=kernel,
        arguments=(
            *inputs,
            Argument("state_ptr", "int32", (2 * tile.spread + top_k * inner,), "state"),
            Argument("out_ptr", dtype, (1, hidden), "out"),
        ),
        constexprs=(
            ("TOP_K", top_k),
            ("EXPERTS", experts),
            ("HIDDEN", hidden),
            ("INNER", inner),
            ("INDIRECT", slots is not None),
            *_activation_constexprs(activation),
            ("GATE_UP_BIAS", gate_up_bias),
            ("DOWN_BIAS", down_bias),
            ("RESIDUAL", residual),
            ("GATE_LINES", lines),
            ("OUTPUTS", ROW_OUTPUTS),
            ("RING", tile.ring),
            ("AHEAD", tile.ahead),
            ("PROGRAMS", programs),
            ("SPREAD", tile.spread),
            ("PDL", pdl),
        ),
        grid=(programs, 1, 1),
        num_warps=PAIRS,
        num_stages=1,
        enable_fp_fusion=False,
        pdl=pdl,
        reference=functools.partial(reference, activation=activation, experts=experts),
    )
