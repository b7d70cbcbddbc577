"""The routing kernel bound to shapes and a router."""

from __future__ import annotations

import functools

from ..errors import InvalidArgument
from ..plan.specs import power_of_two
from ..spec import Argument, KernelSpec
from .config import RouterConfig
from .fused import normed_route
from .heuristics import BLOCK_ROWS, MAX_ROWS, Tile, tile_for


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
    Scratch and state: sums of the parts of H, arrivals of a block.
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
        InvalidArgument: rows or dtype out of range.
    """
    where = "route_spec"
    if not 1 <= rows <= MAX_ROWS:
        raise InvalidArgument("rows", where=where, got=rows, wanted=f"1 to {MAX_ROWS}")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise InvalidArgument("dtype", where=where, got=dtype, wanted="bfloat16, float16 or float32")
    from .triton import route as kernel

    experts, k = config.experts, config.top_k
    tile = tile or tile_for(hidden, experts, dtype)
    part = -(-hidden // (tile.split * tile.block_k)) * tile.block_k
    split = -(-hidden // part)
    blocks, chunks = -(-rows // BLOCK_ROWS), -(-experts // tile.block_m)
    none = (1,)
    arguments = (
        Argument("x_ptr", dtype, (rows, hidden), "in"),
        Argument("gain_ptr", dtype, none if norm_eps is None else (hidden,), "in"),
        Argument("w_ptr", dtype, (experts, hidden), "in"),
        Argument("bias_ptr", bias or "float32", (experts,) if bias else none, "in"),
        Argument("selection_bias_ptr", "float32", (experts,) if selection_bias else none, "in"),
        Argument("position_ptr", "int32", (rows,) if masked else none, "in"),
        Argument("partial_ptr", "float32", (split, blocks * BLOCK_ROWS, experts), "scratch"),
        Argument("state_ptr", "int32", (blocks,), "state"),
        Argument("scale_ptr", "float32", (rows, k), "out"),
        Argument("ids_ptr", "int32", (rows, k), "out"),
        Argument("normed_ptr", dtype, none if norm_eps is None else (rows, hidden), "out"),
    )
    return KernelSpec(
        name="route",
        function=kernel,
        arguments=arguments,
        constexprs=(
            ("ROWS", rows),
            ("HIDDEN", hidden),
            ("EXPERTS", experts),
            ("TOP_K", k),
            ("TOP_K_POW2", power_of_two(k)),
            ("SCORE", config.score),
            ("RENORMALIZE", config.renormalize),
            ("SCALING", float(config.scaling_factor)),
            ("GROUPS", config.groups),
            ("GROUPS_KEPT", config.groups_kept),
            ("GROUPS_POW2", power_of_two(config.groups)),
            ("GROUP_POW2", power_of_two(experts // config.groups)),
            ("NORM", norm_eps is not None),
            ("EPS", float(norm_eps or 0.0)),
            ("BIAS", bias is not None),
            ("SELECTION_BIAS", selection_bias),
            ("MASKED", masked),
            ("BLOCK_M", tile.block_m),
            ("BLOCK_K", tile.block_k),
            ("BLOCK_ROWS", BLOCK_ROWS),
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
        reference=functools.partial(
            normed_route, config=config, eps=norm_eps, has_bias=bias is not None, has_selection_bias=selection_bias,
            masked=masked,
        ),
    )  # fmt: skip
