"""The routing kernels bound to shapes and a router."""

from __future__ import annotations

import functools
from typing import Any

from ..errors import InvalidArgument
from ..plan.specs import power_of_two
from ..spec import FLOATS, Argument, KernelSpec
from . import reference
from .config import RouterConfig
from .fused import normed_route
from .heuristics import BLOCK_ROWS, MAX_PLACES, MAX_ROWS, MAX_TOP_K, Tile, choice_warps, tile_for


def route_spec(
    rows: int,
    hidden: int,
    config: RouterConfig,
    *,
    dtype: str,
    norm_eps: float | None = None,
    bias: str | None = None,
    selection_bias: bool = False,
    masked: bool = False,
    tile: Tile | None = None,
    pdl: bool = False,
) -> KernelSpec:
    """One launch of RMSNorm, router matmul, top-k and weights for 1 to 256 rows.

    Inputs, in order: ``x`` ``[T, H]``; ``gain`` ``[H]``, RMSNorm's weight; ``w`` ``[E, H]``; ``bias`` ``[E]``;
    ``selection_bias`` f32 ``[E]``; ``position`` int32 ``[T]``, negative for a row that is not there: its ids are -1 and
    its weights 0. An absent optional keeps its place with shape ``(1,)`` and is not read.
    State: arrivals of a block. Scratch: sums of the parts of H.
    Outputs: ``scale`` f32 and ``ids`` int32 ``[T, k]``, best expert first, as `expert_ffn_spec` takes them; ``normed``
    ``[T, H]``, RMSNorm of ``x``, which the experts read (``(1,)`` and untouched without a norm).

    Args:
        config: scoring, selection and weighting.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``, of ``x``, ``gain`` and ``w``; logits are f32.
        norm_eps: RMSNorm of ``x`` before the product, with this epsilon; None: no norm.
        bias: dtype of the router's bias, or None.
        selection_bias: the router has one.
        masked: ``position`` is read.
        tile: by default `tile_for`.
        pdl: launch while the kernel before still runs (sm_90).

    Raises:
        InvalidArgument: rows, hidden size, dtype or router out of range.
    """
    where = "route_spec"
    if not 1 <= rows <= MAX_ROWS:
        raise InvalidArgument("rows", where=where, got=rows, wanted=f"1 to {MAX_ROWS}")
    if hidden < 1:
        raise InvalidArgument("hidden size", where=where, got=hidden, wanted="at least 1")
    for name, given in (("dtype", dtype), ("bias", bias or dtype)):
        if given not in FLOATS:
            raise InvalidArgument(name, where=where, got=given, wanted=", ".join(FLOATS))
    router = _router(where, config, selection_bias)
    from .triton import route as kernel

    experts, k = config.experts, config.top_k
    tile = tile or tile_for(hidden, experts, dtype)
    part = -(-hidden // (tile.split * tile.block_k)) * tile.block_k
    split = -(-hidden // part)
    blocks, chunks = -(-rows // BLOCK_ROWS), -(-experts // tile.block_m)
    none = (1,)
    return KernelSpec(
        name="route",
        function=kernel,
        arguments=(
            Argument("x_ptr", dtype, (rows, hidden), "in"),
            Argument("gain_ptr", dtype, none if norm_eps is None else (hidden,), "in"),
            Argument("w_ptr", dtype, (experts, hidden), "in"),
            Argument("bias_ptr", bias or "float32", (experts,) if bias else none, "in"),
            Argument("selection_bias_ptr", "float32", (experts,) if selection_bias else none, "in"),
            Argument("position_ptr", "int32", (rows,) if masked else none, "in"),
            Argument("state_ptr", "int32", (blocks,), "state"),
            Argument("partial_ptr", "float32", (split, blocks * BLOCK_ROWS, experts), "scratch"),
            Argument("scale_ptr", "float32", (rows, k), "out"),
            Argument("ids_ptr", "int32", (rows, k), "out"),
            Argument("normed_ptr", dtype, none if norm_eps is None else (rows, hidden), "out"),
        ),
        constexprs=(
            ("ROWS", rows),
            ("HIDDEN", hidden),
            *router,
            ("NORM", norm_eps is not None),
            ("EPS", float(norm_eps or 0.0)),
            ("BIAS", bias is not None),
            ("MASKED", masked),
            ("BLOCK_M", tile.block_m),
            ("BLOCK_K", tile.block_k),
            ("CHUNK", min(1024, power_of_two(hidden))),
            ("CHUNKS", chunks),
            ("PART", part),
            ("SPLIT", split),
            ("PDL", pdl),
        ),
        grid=(blocks, chunks, split),
        num_warps=tile.num_warps,
        num_stages=1,
        enable_fp_fusion=False,
        pdl=pdl,
        early=("gain_ptr", "w_ptr", "position_ptr"),
        reference=functools.partial(
            normed_route,
            config=config,
            eps=norm_eps,
            has_bias=bias is not None,
            has_selection_bias=selection_bias,
            masked=masked,
        ),
    )


def route_logits_spec(
    rows: int, config: RouterConfig, *, selection_bias: bool = False, pdl: bool = False
) -> KernelSpec:
    """Top-k and weights from finished logits, for any number of rows.

    Inputs: ``logits`` f32 ``[T, E]``; ``selection_bias`` f32 ``[E]``, or ``(1,)`` and not read. Outputs: ``scale`` f32
    and ``ids`` int32 ``[T, k]``, best expert first.

    Args:
        config: scoring, selection and weighting.
        selection_bias: the router has one.
        pdl: launch while the kernel before still runs (sm_90).

    Raises:
        InvalidArgument: rows or router out of range.
    """
    where = "route_logits_spec"
    if rows < 1:
        raise InvalidArgument("rows", where=where, got=rows, wanted="at least 1")
    router = _router(where, config, selection_bias)
    from .triton import route_logits as kernel

    experts, k = config.experts, config.top_k

    def plain(logits, bias):
        return tuple(reference.route(logits, config, bias if selection_bias else None))

    return KernelSpec(
        name="route_logits",
        function=kernel,
        arguments=(
            Argument("logits_ptr", "float32", (rows, experts), "in"),
            Argument("selection_bias_ptr", "float32", (experts,) if selection_bias else (1,), "in"),
            Argument("scale_ptr", "float32", (rows, k), "out"),
            Argument("ids_ptr", "int32", (rows, k), "out"),
        ),
        constexprs=(("ROWS", rows), *router, ("PDL", pdl)),
        grid=(-(-rows // BLOCK_ROWS), 1, 1),
        num_warps=choice_warps(experts),
        num_stages=1,
        enable_fp_fusion=False,
        pdl=pdl,
        reference=plain,
    )


def _router(where: str, config: RouterConfig, selection_bias: bool) -> tuple[tuple[str, Any], ...]:
    """Constants of the choice, which both kernels make in one program for a block of rows.

    Raises:
        InvalidArgument: more experts or ranks than one program takes.
    """
    groups, of_group = power_of_two(config.groups), power_of_two(config.experts // config.groups)
    if groups * of_group > MAX_PLACES:
        got = f"{config.experts} in {config.groups} groups"
        raise InvalidArgument(
            "experts", where=where, got=got, wanted=f"at most {MAX_PLACES} with groups rounded up to powers of two"
        )
    if config.top_k > MAX_TOP_K:
        raise InvalidArgument("top_k", where=where, got=config.top_k, wanted=f"1 to {MAX_TOP_K}")
    return (
        ("EXPERTS", config.experts),
        ("TOP_K", config.top_k),
        ("TOP_K_POW2", power_of_two(config.top_k)),
        ("SCORE", config.score),
        ("RENORMALIZE", config.renormalize),
        ("SCALING", float(config.scaling_factor)),
        ("GROUPS", config.groups),
        ("GROUPS_KEPT", config.groups_kept),
        ("GROUPS_POW2", groups),
        ("GROUP_POW2", of_group),
        ("SELECTION_BIAS", selection_bias),
        ("BLOCK_ROWS", BLOCK_ROWS),
    )
