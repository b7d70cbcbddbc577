"""The small-row matmul bound to shapes and a tile."""

from __future__ import annotations

from jaxtyping import Array

from ..errors import InvalidArgument
from ..spec import Argument, KernelSpec, check_float
from .heuristics import MAX_ROWS, STEP, Tile, tile_for
from .reference import linear as reference


def linear_spec(
    rows: int,
    inputs: int,
    outputs: int,
    *,
    dtype: str,
    out_dtype: str | None = None,
    norm_eps: float | None = None,
    bias: bool = False,
    residual: bool = False,
    tile: Tile | None = None,
    capability: int = 90,
    pdl: bool = False,
) -> KernelSpec:
    """``out = norm(x) @ w.T + bias + residual`` for 1 to 64 rows.

    Inputs, in order: ``x`` ``[T, K]``; ``gain`` ``[K]``, RMSNorm's weight; ``w`` ``[N, K]``; ``bias`` ``[N]``;
    ``residual`` ``[T, N]`` in the output's dtype. An absent optional keeps its place with shape ``(1,)`` and is not
    read.
    Scratch: sums of the parts of K. State: arrivals of a tile's parts. Output: ``out`` ``[T, N]``.

    Args:
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``, of everything but the output; sums are f32.
        out_dtype: dtype of the output and residual; None: ``dtype``. ``"float32"`` for logits.
        norm_eps: RMSNorm of ``x`` before the product, with this epsilon; None: no norm.
        tile: by default `tile_for` the capability, 90 for 9.0.
        pdl: launch while the kernel before still runs (sm_90).

    Raises:
        InvalidArgument: rows, sizes, dtype or tile out of range.
    """
    where = "linear_spec"
    if not 1 <= rows <= MAX_ROWS:
        raise InvalidArgument("rows", where=where, got=rows, wanted=f"1 to {MAX_ROWS}")
    check_float(where, dtype)
    out_dtype = out_dtype or dtype
    check_float(where, out_dtype, "out_dtype")
    if inputs < 1 or outputs < 1:
        raise InvalidArgument("sizes", where=where, got=f"{inputs} to {outputs}", wanted="at least 1 to 1")
    tile = tile or tile_for(rows, inputs, outputs, dtype, capability=capability)
    if tile.block_n < rows:
        raise InvalidArgument("tile.block_n", where=where, got=tile.block_n, wanted=f"at least rows={rows}")
    norm_k = min(tile.block_k, STEP)
    if tile.block_k > STEP and (not tile.early or tile.block_k % STEP):
        wanted = f"at most {STEP}, or a multiple of it with early"
        raise InvalidArgument("tile.block_k", where=where, got=tile.block_k, wanted=wanted)
    if tile.early and (inputs % (tile.split * tile.block_k) or outputs % tile.block_m):
        got, wanted = f"{inputs} x {outputs}", "multiples of split x block_k and of block_m"
        raise InvalidArgument("tile.early", where=where, got=got, wanted=wanted)
    from .triton import linear as kernel

    def plain(x: Array, gain: Array, w: Array, bias_: Array, residual_: Array) -> Array:
        absent = (None if norm_eps is None else gain, bias_ if bias else None, residual_ if residual else None)
        return reference(x, w, *absent, eps=norm_eps or 0.0, out_dtype=out_dtype)

    tiles = -(-outputs // tile.block_m)
    none, split, normed = (1,), tile.split > 1, norm_eps is not None
    arguments = (
        Argument("x_ptr", dtype, (rows, inputs), "in"),
        Argument("gain_ptr", dtype, (inputs,) if normed else none, "in"),
        Argument("w_ptr", dtype, (outputs, inputs), "in"),
        Argument("bias_ptr", dtype, (outputs,) if bias else none, "in"),
        Argument("residual_ptr", out_dtype, (rows, outputs) if residual else none, "in"),
        Argument("state_ptr", "int32", (tiles,) if split else none, "state"),
        Argument(
            "partial_ptr", "float32", (tiles, tile.split, tile.block_m * tile.block_n) if split else none, "scratch"
        ),
        Argument("square_ptr", "float32", (tiles, tile.split, rows) if split and normed else none, "scratch"),
        Argument("out_ptr", out_dtype, (rows, outputs), "out"),
    )
    return KernelSpec(
        name="linear",
        function=kernel,
        arguments=arguments,
        constexprs=(
            ("ROWS", rows),
            ("K", inputs),
            ("N", outputs),
            ("NORM", normed),
            ("EPS", float(norm_eps or 0.0)),
            ("BIAS", bias),
            ("RESIDUAL", residual),
            ("BLOCK_M", tile.block_m),
            ("BLOCK_N", tile.block_n),
            ("BLOCK_K", tile.block_k),
            ("NORM_K", norm_k),
            ("SPLIT", tile.split),
            ("EARLY", tile.early),
            ("PDL", pdl),
        ),
        grid=(tiles * tile.split, 1, 1),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
        pdl=pdl,
        early=("w_ptr", "gain_ptr") if tile.early else (),
        reference=plain,
    )
