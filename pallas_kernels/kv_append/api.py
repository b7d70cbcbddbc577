"""Public rotation and append: checks the arguments and picks the back end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from ..as_operation import as_operation, copy_refusal, kernel_refusal, varying_refusal
from ..checks import FLOATS, check_choice, check_dtype, check_number, check_shape
from ..dispatch import Backend, Operation, sharding_refusal
from ..errors import InvalidArgument
from ..spec import KernelSpec
from . import reference
from .reference import QkNorm
from .specs import kv_append_spec

type _Results = tuple[Float[Array, "T q"], Float[Array, "N kv_heads page D"], Float[Array, "N kv_heads page D"]]


def kv_append(
    qkv: Float[Array, "T rows"],
    cos: Float32[Array, "P half"],
    sin: Float32[Array, "P half"],
    k_pages: Float[Array, "N kv_heads page D"],
    v_pages: Float[Array, "N kv_heads page D"],
    table: Int32[Array, "S pages"],
    position: Int32[Array, " T"],
    sequence: Int32[Array, " T"],
    *,
    norm: QkNorm | None = None,
    q_gain: Float[Array, " q"] | None = None,
    k_gain: Float[Array, " k"] | None = None,
    eps: float = 1e-6,
    clip: float | None = None,
    backend: str = "auto",
) -> tuple[Float[Array, "T heads D"], Float[Array, "N kv_heads page D"], Float[Array, "N kv_heads page D"]]:
    """Queries, keys and values of new rows: norms, rotary embedding, and keys and values into their pages.

    Row t is token ``position[t]`` of sequence ``sequence[t]``. Its key and value go into page
    ``table[sequence, position // page]`` at place ``position % page``, for every key head. The rotation
    (arXiv:2104.09864) turns element i of a head's first half with element i of its second half, by ``cos`` and ``sin``
    of the row's position.

    A function of arrays: it returns new pages and leaves the ones given as they were. On a CUDA device the kernel
    writes in place, into a `jax.Ref` of the pages, so inside ``jit`` no page is copied when the pages are the
    program's own: donated to it (``jax.jit(step, donate_argnums=…)``), carried through a loop of it, or the contents
    of a Ref (``q, k_ref[...], v_ref[...] = kv_append(qkv, cos, sin, k_ref[...], v_ref[...], …)``). Called outside of
    ``jit``, or with pages that are used again later, it copies both pools.

    Works under ``jit``, ``grad`` (reverse mode), ``vmap`` (each element with its own pages, by the reference) and
    inside ``jax.shard_map``, there by the kernel only with ``check_vma=False``.

    Args:
        qkv: ``[T, (heads + 2 * kv_heads) * D]``, bf16, f16, f32 or f64: a row's queries by head, then keys, then
            values; T may be 0. The number of query heads follows from the width.
        cos, sin: f32 ``[P, D / 2]`` of the positions 0 to P - 1.
        k_pages, v_pages: ``[N, kv_heads, page, D]`` in the dtype of ``qkv``.
        table: int32 ``[S, pages]``, the pages of each sequence; an entry outside 0 to N - 1 is no page.
        position, sequence: int32 ``[T]``. A position that is negative or past P: the row is not there. No two rows may
            be the same token of the same sequence.
        norm: RMSNorm of the queries and keys: of each ``"head"``, or of the whole ``"projection"``.
        q_gain, k_gain: the norm's weights, in the dtype of ``qkv``: ``[D]`` each, or ``[heads * D]`` and
            ``[kv_heads * D]`` for a projection. Given exactly when ``norm`` is.
        eps: added to the mean square.
        clip: queries, keys and values are limited to ±clip, after the norm of a projection and before that of heads.
        backend: ``"auto"`` or a back end's name.

    Returns:
        the rotated queries ``[T, heads, D]`` (0 for rows that are not there), and the new ``k_pages`` and ``v_pages``.
        A row that is not there, or whose token has no page, writes nothing.

    Raises:
        InvalidArgument: a wrong shape, dtype or value, with what was got and wanted. What stands in ``table``,
            ``position`` and ``sequence`` is device data and not looked at.
        CannotServe: the back end asked for declined, or arguments are sharded outside ``shard_map``.
    """
    where = "kv_append"
    check_dtype(where, "qkv", qkv, FLOATS)
    check_shape(where, "qkv", qkv, ("T", "(heads + 2 * kv_heads) * D"))
    check_shape(where, "k_pages", k_pages, ("N", "kv_heads", "page", "D"))
    check_shape(where, "v_pages", v_pages, k_pages.shape)
    check_shape(where, "table", table, ("S", "pages"))
    rows, width = qkv.shape
    kv_heads, dim = k_pages.shape[1], k_pages.shape[3]
    if min(*k_pages.shape, *table.shape) < 1 or dim % 2:
        got = f"pages {list(k_pages.shape)}, table {list(table.shape)}"
        raise InvalidArgument("sizes", where=where, got=got, wanted="at least 1 of each, and an even D")
    heads = width // dim - 2 * kv_heads
    if width % dim or heads < 1 or heads % kv_heads:
        wanted = f"(heads + {2 * kv_heads}) * {dim}, heads a multiple of {kv_heads}"
        raise InvalidArgument("width of qkv", where=where, got=width, wanted=wanted)
    check_shape(where, "cos", cos, ("P", dim // 2))
    check_shape(where, "sin", sin, cos.shape)
    for name, array, dtype in (
        *(("cos", cos, jnp.float32), ("sin", sin, jnp.float32), ("table", table, jnp.int32)),
        *(("k_pages", k_pages, qkv.dtype), ("v_pages", v_pages, qkv.dtype)),
        *(("position", position, jnp.int32), ("sequence", sequence, jnp.int32)),
    ):
        check_dtype(where, name, array, (dtype,))
    for name, array in (("position", position), ("sequence", sequence)):
        check_shape(where, name, array, (rows,))
    _check_norm(where, qkv, norm, q_gain, k_gain, (heads, kv_heads, dim))
    eps = check_number(where, "eps", eps, over=0)
    if clip is not None:
        clip = check_number(where, "clip", clip, over=0, infinite=True)
    arrays = (qkv, q_gain, k_gain, cos, sin, position, sequence, table, k_pages, v_pages)
    sharding_refusal(where, dict(zip(_NAMES, arrays, strict=True)))
    q, k_pages, v_pages = KV_APPEND(*arrays, norm, eps, clip, backend=backend)
    return q.reshape(rows, heads, dim), k_pages, v_pages


_NAMES = ("qkv", "q_gain", "k_gain", "cos", "sin", "position", "sequence", "table", "k_pages", "v_pages")


def _check_norm(where: str, qkv, norm, q_gain, k_gain, sizes: tuple[int, int, int]) -> None:
    heads, kv_heads, dim = sizes
    check_choice(where, "norm", norm, ("head", "projection", None))
    for name, gain, width in (("q_gain", q_gain, heads * dim), ("k_gain", k_gain, kv_heads * dim)):
        if (gain is None) != (norm is None):
            got = f"norm={norm!r} and {'no' if gain is None else 'a'} {name}"
            raise InvalidArgument(name, where=where, got=got, wanted="both or neither")
        if gain is not None:
            check_dtype(where, name, gain, (qkv.dtype,))
            check_shape(where, name, gain, (width if norm == "projection" else dim,))


def _spec(*args) -> KernelSpec:
    qkv, _, _, cos, _, _, _, table, k_pages, _, norm, eps, clip = args
    pages, kv_heads, page, dim = k_pages.shape
    return kv_append_spec(
        qkv.shape[0],
        qkv.shape[1] // dim - 2 * kv_heads,
        kv_heads,
        dim,
        dtype=qkv.dtype.name,
        sequences=table.shape[0],
        pages=pages,
        page_size=page,
        max_pages=table.shape[1],
        positions=cos.shape[0],
        norm=norm,
        eps=eps,
        clip=clip,
    )


def _refusal(*args) -> str | None:
    *_, k_pages, v_pages = args[: len(_NAMES)]
    refused = kernel_refusal(args[0], lambda: _spec(*args), "kv_append_spec")
    return refused or copy_refusal(k_pages=k_pages, v_pages=v_pages) or varying_refusal(*args[: len(_NAMES)])


def _launch(norm: QkNorm | None, eps: float, clip: float | None, *arrays) -> _Results:
    from ..in_jit import call

    qkv, q_gain, k_gain, *others, k_pages, v_pages = arrays
    nothing = jnp.zeros(1, qkv.dtype)
    gains = (nothing, nothing) if norm is None else (q_gain, k_gain)
    k_ref, v_ref = jax.new_ref(k_pages), jax.new_ref(v_pages)
    (q,) = call(_spec(*arrays, norm, eps, clip), (qkv, *gains, *others, k_ref, v_ref))
    return q, jax.freeze(k_ref), jax.freeze(v_ref)


def _plain(norm: QkNorm | None, eps: float, clip: float | None, *arrays) -> _Results:
    k_pages, v_pages, q = reference.kv_append(*arrays, norm=norm, eps=eps, clip=clip)
    return q, k_pages, v_pages


@functools.cache
def _operation(norm: QkNorm | None, eps: float, clip: float | None) -> Callable[..., Any]:
    launch, plain = (functools.partial(function, norm, eps, clip) for function in (_launch, _plain))
    return as_operation(launch, plain, in_place=True)


@functools.partial(jax.jit, static_argnums=(10, 11, 12))
def _triton(*args) -> _Results:
    return _operation(*args[len(_NAMES) :])(*args[: len(_NAMES)])


@functools.partial(jax.jit, static_argnums=(10, 11, 12))
def _reference(*args) -> _Results:
    return _plain(*args[len(_NAMES) :], *args[: len(_NAMES)])


# Best first. Triton itself is imported only when it serves a call.
KV_APPEND = Operation(
    "kv_append", (Backend("triton", _triton, _refusal), Backend("reference", _reference, lambda *_: None))
)
