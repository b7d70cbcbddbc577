"""The append kernel bound to shapes."""

from __future__ import annotations

import functools
import math

from ..errors import InvalidArgument
from ..plan.specs import power_of_two
from ..spec import Argument, KernelSpec, check_float
from .heuristics import block_heads
from .reference import QkNorm
from .reference import kv_append as reference


def kv_append_spec(
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
    pdl: bool = False,
) -> KernelSpec:
    """Norms and rotation of queries and keys, then keys and values into pages.

    Inputs, in order: ``qkv`` ``[T, (heads + 2 * kv_heads) * dim]``; ``q_gain``, ``k_gain``: ``[dim]`` each for
    ``norm="head"``, ``[heads * dim]`` and ``[kv_heads * dim]`` for ``"projection"``, else ``(1,)`` and not read;
    ``cos``, ``sin`` f32 ``[positions, dim / 2]``; ``position`` int32 ``[T]``, of each row in its sequence, negative (or
    past ``positions``) for a row that is not there; ``sequence`` int32 ``[T]``, its row of ``table`` int32
    ``[sequences, max_pages]``, whose entries are pages. A row whose page is none (an entry or index out of range)
    writes nothing.
    Updated in place: ``k_pages``, ``v_pages`` ``[pages, kv_heads, page_size, dim]``.
    Output: ``q`` ``[T, heads * dim]``, 0 for rows that are not there.

    Args:
        positions: rows of the rotation tables.
        norm: RMSNorm of each head's queries and keys, or of the whole projection's; None: no norm.
        clip: clamp of the projected values, after a norm of the projection and before one of heads.
        pdl: launch while the kernel before still runs (sm_90).

    Raises:
        InvalidArgument: no rows, another dtype, or sizes that do not fit together.
    """
    where = "kv_append_spec"
    if rows < 1:
        raise InvalidArgument("rows", where=where, got=rows, wanted="at least 1")
    check_float(where, dtype)
    if dim % 2 or heads % kv_heads:
        wanted = "an even dim, and heads a multiple of kv_heads"
        raise InvalidArgument("heads", where=where, got=f"{heads}, {kv_heads}, dim {dim}", wanted=wanted)
    if page_size < 1 or page_size & (page_size - 1):
        raise InvalidArgument("page_size", where=where, got=page_size, wanted="a power of two")
    from .triton import kv_append as kernel

    block, width = block_heads(heads, kv_heads), (heads + 2 * kv_heads) * dim
    of_norm = {None: (1, 1), "head": (dim, dim), "projection": (heads * dim, kv_heads * dim)}
    if norm not in of_norm:
        raise InvalidArgument("norm", where=where, got=repr(norm), wanted="None, 'head' or 'projection'")
    gains = of_norm[norm]
    of_pages = (pages, kv_heads, page_size, dim)
    arguments = (
        Argument("qkv_ptr", dtype, (rows, width), "in"),
        Argument("q_gain_ptr", dtype, (gains[0],), "in"),
        Argument("k_gain_ptr", dtype, (gains[1],), "in"),
        Argument("cos_ptr", "float32", (positions, dim // 2), "in"),
        Argument("sin_ptr", "float32", (positions, dim // 2), "in"),
        Argument("position_ptr", "int32", (rows,), "in"),
        Argument("sequence_ptr", "int32", (rows,), "in"),
        Argument("table_ptr", "int32", (sequences, max_pages), "in"),
        Argument("k_pages_ptr", dtype, of_pages, "inout"),
        Argument("v_pages_ptr", dtype, of_pages, "inout"),
        Argument("q_ptr", dtype, (rows, heads * dim), "out"),
    )
    return KernelSpec(
        name="kv_append",
        function=kernel,
        arguments=arguments,
        constexprs=(
            ("HEADS", heads),
            ("KV_HEADS", kv_heads),
            ("DIM", dim),
            ("DIM_POW2", power_of_two(dim)),
            ("BLOCK_HEADS", block),
            ("PAGE", page_size),
            ("PAGES", pages),
            ("MAX_PAGES", max_pages),
            ("SEQUENCES", sequences),
            ("POSITIONS", positions),
            ("NORM", norm or ""),
            ("NORM_CHUNK", min(1024, power_of_two(math.gcd(heads, kv_heads) * dim))),
            ("EPS", float(eps)),
            ("CLIP", float(clip or 0.0)),
            ("PDL", pdl),
        ),
        grid=(rows, (heads + 2 * kv_heads) // block, 1),
        num_warps=max(1, min(4, block * power_of_two(dim) // 256)),
        num_stages=1,
        enable_fp_fusion=False,
        pdl=pdl,
        early=("q_gain_ptr", "k_gain_ptr", "cos_ptr", "sin_ptr", "position_ptr"),
        reference=functools.partial(reference, norm=norm, eps=eps, clip=clip),
    )
