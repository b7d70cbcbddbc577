"""Decode attention bound to shapes: two launches, over splits and over their results; the first may append as well."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from ..errors import InvalidArgument
from ..kv_append.reference import QkNorm
from ..kv_append.specs import kv_append_spec
from ..plan.specs import power_of_two
from ..spec import Argument, KernelSpec, check_float
from . import reference
from .heuristics import (
    COMBINE_WARPS,
    MAX_BLOCK_M,
    MAX_PIECES,
    MAX_ROWS,
    Schedule,
    group_rows,
    max_dim,
    pieces_at_once,
    schedule_for,
    tile_keys,
)


def attention_specs(
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    dtype: str,
    sequences: int,
    pages: int,
    page_size: int,
    max_pages: int,
    rows_of_sequence: int = 1,
    scale: float | None = None,
    window: int | None = None,
    sink: bool = False,
    schedule: Schedule | None = None,
    capability: int = 90,
    pdl: bool = False,
) -> tuple[KernelSpec, KernelSpec]:
    """Grouped-query attention of 1 to 64 rows over pages, as two launches: splits, then their sum.

    First launch. Inputs, in order: ``q`` ``[T, heads * dim]``; ``k_pages``, ``v_pages`` ``[pages, kv_heads, page_size,
    dim]``; ``table`` int32 ``[sequences, max_pages]``, a sequence's pages; ``position`` int32 ``[T]``, the last key a
    row sees, negative for a row that is not there; ``sequence`` int32 ``[T]``, its row of ``table``. Numbers past what
    they count into are taken as the nearest that is there.
    Outputs, for the second launch: ``vector`` f32 ``[slots, heads, dim]`` and ``weight`` f32 ``[slots, heads, 2]``,
    written only where a row has keys.
    Second launch. Inputs: ``vector``, ``weight``, ``position``, ``sink`` ``[heads]`` (``(1,)`` and not read when
    absent). Output: ``out`` ``[T, heads * dim]``, 0 for rows that are not there.

    Args:
        rows_of_sequence: rows come in runs of this many with the same ``sequence`` (verification, prompt chunks), in
            any order of positions; keys are then read once for several rows. 1: no row knows of another's sequence.
        scale: of the scores; None: ``dim ** -0.5``.
        window: keys that a row sees, its own with them; None: all.
        sink: a logit of each head joins the softmax and brings no value.
        schedule: by default `schedule_for` the capability, 90 for 9.0.
        pdl: launch while the kernel before still runs (sm_90).

    Raises:
        InvalidArgument: rows, sizes or dtype out of range.
    """
    from .triton import attend

    sizes = _sizes(
        "attention_specs", rows, heads, kv_heads, dim, dtype=dtype, sequences=sequences, pages=pages,
        page_size=page_size, max_pages=max_pages, rows_of_sequence=rows_of_sequence, scale=scale, window=window,
        schedule=schedule, capability=capability, pdl=pdl,
    )  # fmt: skip
    of_pages = (pages, kv_heads, page_size, dim)
    first = KernelSpec(
        name="attend",
        function=attend,
        arguments=(
            Argument("q_ptr", dtype, (rows, heads * dim), "in"),
            Argument("k_pages_ptr", dtype, of_pages, "in"),
            Argument("v_pages_ptr", dtype, of_pages, "in"),
            Argument("table_ptr", "int32", (sequences, max_pages), "in"),
            Argument("position_ptr", "int32", (rows,), "in"),
            Argument("sequence_ptr", "int32", (rows,), "in"),
            *sizes.outputs,
        ),
        constexprs=sizes.constants,
        early=("table_ptr", "position_ptr", "sequence_ptr"),
        reference=functools.partial(reference.attend, **sizes.of_reference),
        **sizes.launch,
    )
    return first, _combine_spec(sizes, dtype, sink, pdl)


def decode_attention_specs(
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    dtype: str,
    sequences: int,
    pages: int,
    page_size: int,
    max_pages: int,
    positions: int,
    norm: QkNorm | None = None,
    eps: float = 1e-6,
    clip: float | None = None,
    scale: float | None = None,
    window: int | None = None,
    sink: bool = False,
    schedule: Schedule | None = None,
    capability: int = 90,
    pdl: bool = False,
) -> tuple[KernelSpec, KernelSpec]:
    """`kv_append_spec` and `attention_specs` in two launches instead of three, with the same bits, for rows that are
    each a sequence of their own: no row may see a place that another row of the launch writes.

    First launch. Inputs, in order: ``qkv``, ``q_gain``, ``k_gain``, ``cos``, ``sin``, ``position``, ``sequence`` and
    ``table`` as `kv_append_spec` has them; ``k_pages``, ``v_pages``, updated in place. A row that the append would
    write nothing of sees what stands in the nearest page, which another row may be writing then.
    Outputs ``vector`` and ``weight``, and the second launch: as `attention_specs` has them.

    Args:
        positions, norm, eps, clip: as `kv_append_spec` takes them. A norm of the projection is computed by every
            program of a row again.
        scale, window, sink, schedule, capability, pdl: as `attention_specs` takes them.

    Raises:
        InvalidArgument: rows, sizes or dtype out of range.
    """
    from .append_triton import append_attend

    sizes = _sizes(
        "decode_attention_specs", rows, heads, kv_heads, dim, dtype=dtype, sequences=sequences, pages=pages,
        page_size=page_size, max_pages=max_pages, rows_of_sequence=1, scale=scale, window=window,
        schedule=schedule, capability=capability, pdl=pdl, beside=2,
    )  # fmt: skip
    append = kv_append_spec(
        rows, heads, kv_heads, dim, dtype=dtype, sequences=sequences, pages=pages, page_size=page_size,
        max_pages=max_pages, positions=positions, norm=norm, eps=eps, clip=clip,
    )  # fmt: skip
    of_append = dict(append.constexprs)
    first = KernelSpec(
        name="append_attend",
        function=append_attend,
        arguments=(*append.inputs, *sizes.outputs),
        constexprs=(
            *((name, value) for name, value in sizes.constants if name != "GROUP_ROWS"),
            *((name, of_append[name]) for name in ("POSITIONS", "NORM", "NORM_CHUNK", "EPS", "CLIP")),
            ("LINGER", sizes.linger if pdl else 0),
        ),
        early=(*append.early, "sequence_ptr", "table_ptr"),
        reference=functools.partial(reference.append_attend, norm=norm, eps=eps, clip=clip, **sizes.of_reference),
        **sizes.launch,
    )
    return first, _combine_spec(sizes, dtype, sink, pdl)


class _Sizes(NamedTuple):
    """What the launches of attention have in common.

    Attributes:
        rows, heads, kv_heads, dim: as they were given.
        longest: keys that a row of the block table has places for.
        slots: places for the results of pieces.
        shape: constants of both launches.
        constants: those of the first one, where it does not append.
        outputs: its last arguments.
        launch: how it is launched.
        of_reference: what its reference takes besides arrays.
        cut: how keys are cut.
        pieces: `pieces_at_once`.
        linger: of the schedule.
    """

    rows: int
    heads: int
    kv_heads: int
    dim: int
    longest: int
    slots: int
    shape: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[str, Any], ...]
    outputs: tuple[Argument, ...]
    launch: dict[str, Any]
    of_reference: dict[str, Any]
    cut: dict[str, Any]
    pieces: tuple[int, int]
    linger: int


def _sizes(
    where: str, rows: int, heads: int, kv_heads: int, dim: int, *, dtype: str, sequences: int, pages: int,
    page_size: int, max_pages: int, rows_of_sequence: int, scale: float | None, window: int | None,
    schedule: Schedule | None, capability: int, pdl: bool, beside: int = 0,
) -> _Sizes:  # fmt: skip
    """What attention takes is checked here.

    Args:
        beside: heads of a program besides its queries.
    """
    if not 1 <= rows <= MAX_ROWS:
        raise InvalidArgument("rows", where=where, got=rows, wanted=f"1 to {MAX_ROWS}")
    if rows % rows_of_sequence:
        raise InvalidArgument("rows_of_sequence", where=where, got=rows_of_sequence, wanted=f"a divisor of rows={rows}")
    check_float(where, dtype)
    if heads % kv_heads or heads // kv_heads > MAX_BLOCK_M - beside:
        wanted = f"heads a multiple of kv_heads, up to {MAX_BLOCK_M - beside} times"
        raise InvalidArgument("heads", where=where, got=f"{heads} and {kv_heads}", wanted=wanted)
    if not 1 <= dim <= max_dim(dtype):
        raise InvalidArgument("dim", where=where, got=f"{dim} in {dtype}", wanted=f"1 to {max_dim(dtype)}")
    if page_size < 1 or page_size & (page_size - 1):
        raise InvalidArgument("page_size", where=where, got=page_size, wanted="a power of two")
    if window is not None and window < 1:
        raise InvalidArgument("window", where=where, got=window, wanted="at least 1, or None")
    share, tile = heads // kv_heads, tile_keys(dtype)
    together = group_rows(rows_of_sequence, share)
    groups = rows // together
    block_m = max(16, power_of_two(together * share + beside))
    schedule = schedule or schedule_for(rows, dim, dtype, together=block_m, capability=capability)
    if min(schedule.split, schedule.stretch, schedule.programs, schedule.at_once, schedule.fill) < 1:
        raise InvalidArgument("schedule", where=where, got=schedule, wanted="no number below 1")
    split, stretch = schedule.split * tile, schedule.split * schedule.stretch * tile
    longest = max_pages * page_size
    # Splits are pieces only of so little work that a stretch would be more than a program's share. Those of a group may
    # begin and end within a stretch.
    few = schedule.split * schedule.stretch * schedule.fill * 8 // (9 * kv_heads)

    def pieces(groups: int) -> int:
        splits, stretches = (groups * -(-longest // keys) for keys in (split, stretch))
        return max(min(splits, few // schedule.split + 2 * groups), stretches)

    if pieces(1) > MAX_PIECES:
        got, wanted = f"{max_pages} of {page_size} keys", f"at most {MAX_PIECES * stretch} keys"
        raise InvalidArgument("max_pages", where=where, got=got, wanted=wanted)
    if sequences * max_pages >= 2**31:
        raise InvalidArgument("table", where=where, got=f"{sequences} x {max_pages} pages", wanted="fewer than 2**31")
    slots = pieces(groups) * together
    scale = float(dim**-0.5 if scale is None else scale)
    cut = {
        "window": window, "group_rows": together, "tile": tile, "split": split, "stretch": stretch,
        "fill": schedule.fill,
    }  # fmt: skip
    shape = (
        ("ROWS", rows),
        ("GROUP_ROWS", together),
        ("GROUPS", power_of_two(groups)),
        ("HEADS", heads),
        ("KV_HEADS", kv_heads),
        ("DIM", dim),
        ("DIM_POW2", max(16, power_of_two(dim))),
        ("LONGEST", longest),
        ("WINDOW", window or 0),
        ("TILE", tile),
        ("SPLIT", schedule.split),
        ("STRETCH", schedule.stretch),
        ("FILL", schedule.fill),
    )
    return _Sizes(
        rows=rows, heads=heads, kv_heads=kv_heads, dim=dim, longest=longest, slots=slots,
        shape=shape,
        constants=(
            *shape, ("SEQUENCES", sequences), ("PAGES", pages), ("PAGE", page_size),
            ("ITEM_PAGES", _item_pages(schedule, tile, page_size)),
            ("AT_ONCE", schedule.at_once), ("SCALE", scale), ("BLOCK_M", block_m),
            ("PROGRAMS", schedule.programs), ("PDL", pdl),
        ),
        outputs=(
            Argument("vector_ptr", "float32", (slots, heads, dim), "out"),
            Argument("weight_ptr", "float32", (slots, heads, 2), "out"),
        ),
        launch={
            "grid": (schedule.programs, 1, 1), "num_warps": schedule.num_warps, "num_stages": schedule.num_stages,
            "enable_fp_fusion": False, "pdl": pdl, "max_registers": 255 if capability < 90 else None,
        },
        of_reference={"scale": scale, "slots": slots, **cut},
        cut=cut,
        pieces=pieces_at_once(schedule.stretch, rows, heads),
        linger=schedule.linger,
    )  # fmt: skip


def _item_pages(schedule: Schedule, tile: int, page_size: int) -> int:
    """Pages that an item has keys in at most, as a power of two: it may begin and end within a page."""
    most = 1
    for tiles in (schedule.split, schedule.split * schedule.stretch):
        # Items begin at multiples of a piece, so at most this far into a page.
        into = page_size - math.gcd(tiles * tile, page_size)
        keys = max(schedule.at_once // tiles, 1) * tiles * tile
        most = max(most, -(-(into + keys) // page_size))
    return power_of_two(most)


def _combine_spec(sizes: _Sizes, dtype: str, sink: bool, pdl: bool) -> KernelSpec:
    from .combine_triton import combine

    rows, heads, dim, slots = sizes.rows, sizes.heads, sizes.dim, sizes.slots
    return KernelSpec(
        name="attention_combine",
        function=combine,
        arguments=(
            Argument("vector_ptr", "float32", (slots, heads, dim), "in"),
            Argument("weight_ptr", "float32", (slots, heads, 2), "in"),
            Argument("position_ptr", "int32", (rows,), "in"),
            Argument("sink_ptr", dtype, (heads,) if sink else (1,), "in"),
            Argument("out_ptr", dtype, (rows, heads * dim), "out"),
        ),
        constexprs=(*sizes.shape, ("SINK", sink), ("FEW", sizes.pieces[0]), ("MANY", sizes.pieces[1]), ("PDL", pdl)),
        grid=(rows, heads, 1),
        num_warps=COMBINE_WARPS,
        num_stages=1,
        enable_fp_fusion=False,
        pdl=pdl,
        early=("position_ptr",),
        reference=functools.partial(
            reference.combine, kv_heads=sizes.kv_heads, longest=sizes.longest, has_sink=sink, out_dtype=dtype,
            **sizes.cut,
        ),
    )  # fmt: skip
