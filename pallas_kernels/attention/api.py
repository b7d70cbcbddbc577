"""Public attention over pages: checks the arguments and picks the back end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from ..as_operation import as_operation, copy_refusal, kernel_refusal
from ..checks import FLOATS, check_dtype, check_integer, check_number, check_shape
from ..device import capability_of
from ..dispatch import Backend, Operation, sharding_refusal
from ..errors import InvalidArgument
from ..spec import KernelSpec
from . import reference
from .heuristics import MAX_ROWS
from .specs import attention_specs


def attention(
    q: Float[Array, "T heads D"],
    k_pages: Float[Array, "N kv_heads page D"],
    v_pages: Float[Array, "N kv_heads page D"],
    table: Int32[Array, "S pages"],
    position: Int32[Array, " T"],
    sequence: Int32[Array, " T"],
    *,
    sink: Float[Array, " heads"] | None = None,
    scale: float | None = None,
    window: int | None = None,
    rows_of_sequence: int = 1,
    backend: str = "auto",
) -> Float[Array, "T heads D"]:
    """Grouped-query attention of query rows over the keys and values of their sequences, which lie in pages.

    Row t sees the keys 0 to ``position[t]`` of sequence ``sequence[t]``; key i of a sequence s stands in page
    ``table[s, i // page]`` at place ``i % page``. Several rows of one sequence (verification, prompt chunks) are rows
    like others, each with its own position. Softmax and sums are f32 (f64 for f64 inputs). With the kernels, for 1 to
    64 rows on a CUDA device, a row's bits depend on its query, keys and position alone.

    Works under ``jit``, ``grad`` (reverse mode), ``vmap`` (a batch of rows with shared pages is one set of rows) and
    inside ``jax.shard_map``.

    Args:
        q: ``[T, heads, D]``, bf16, f16, f32 or f64, rotated already; T may be 0. Heads are a multiple of ``kv_heads``,
            and head h attends over key head ``h // (heads // kv_heads)``.
        k_pages, v_pages: ``[N, kv_heads, page, D]`` in the dtype of ``q``.
        table: int32 ``[S, pages]``; entries that no row sees may be anything.
        position: int32 ``[T]``; negative: the row is not there and its result is 0.
        sequence: int32 ``[T]``, a row of ``table``.
        sink: ``[heads]`` in the dtype of ``q``, a logit of each head that joins the softmax and brings no value.
        scale: factor of the scores; None: ``D ** -0.5``.
        window: number of keys that a row sees, its own with them; None: all.
        rows_of_sequence: rows come in runs of this many with the same ``sequence``: their keys are read once. A hint
            on speed, which must be true, as the kernels rely on it.
        backend: ``"auto"`` or a back end's name.

    Returns:
        ``[T, heads, D]`` in the dtype of ``q``.

    Raises:
        InvalidArgument: a wrong shape, dtype or value, with what was got and wanted. What stands in ``table``,
            ``position`` and ``sequence`` is device data and not looked at: numbers past their range are taken as the
            nearest that is there.
        CannotServe: the back end asked for declined, or arguments are sharded outside ``shard_map``.
    """
    where = "attention"
    check_dtype(where, "q", q, FLOATS)
    check_shape(where, "q", q, ("T", "heads", "D"))
    rows, heads, dim = q.shape
    check_shape(where, "k_pages", k_pages, ("N", "kv_heads", "page", dim))
    check_shape(where, "v_pages", v_pages, k_pages.shape)
    check_shape(where, "table", table, ("S", "pages"))
    for name, array, dtype in (
        *(("k_pages", k_pages, q.dtype), ("v_pages", v_pages, q.dtype), ("table", table, jnp.int32)),
        *(("position", position, jnp.int32), ("sequence", sequence, jnp.int32)),
    ):
        check_dtype(where, name, array, (dtype,))
    for name, array in (("position", position), ("sequence", sequence)):
        check_shape(where, name, array, (rows,))
    if sink is not None:
        check_dtype(where, "sink", sink, (q.dtype,))
        check_shape(where, "sink", sink, (heads,))
    sizes = (*k_pages.shape, *table.shape)
    if min(sizes) < 1 or heads < 1 or heads % k_pages.shape[1]:
        wanted = "at least 1 of each, and heads a multiple of kv_heads"
        raise InvalidArgument("sizes", where=where, got=f"heads {heads}, pages and table {sizes}", wanted=wanted)
    if window is not None:
        window = check_integer(where, "window", window, 1, (1 << 31) - 1)
    scale = dim**-0.5 if scale is None else check_number(where, "scale", scale)
    rows_of_sequence = check_integer(where, "rows_of_sequence", rows_of_sequence, 1)
    if rows % rows_of_sequence:
        raise InvalidArgument("rows_of_sequence", where=where, got=rows_of_sequence, wanted=f"a divisor of rows={rows}")
    sharding_refusal(where, dict(zip(_NAMES, (q, k_pages, v_pages, table, position, sequence, sink), strict=True)))
    out = ATTENTION(
        *(q.reshape(rows, heads * dim), k_pages, v_pages, table, position, sequence, sink),
        *(scale, window, rows_of_sequence),
        backend=backend,
    )
    return out.reshape(rows, heads, dim)


_NAMES = ("q", "k_pages", "v_pages", "table", "position", "sequence", "sink")


def _specs(*args) -> tuple[KernelSpec, KernelSpec]:
    q, k_pages, _, table, _, _, sink, scale, window, rows_of_sequence = args
    pages, kv_heads, page, dim = k_pages.shape
    return attention_specs(
        q.shape[0],
        q.shape[1] // dim,
        kv_heads,
        dim,
        dtype=q.dtype.name,
        sequences=table.shape[0],
        pages=pages,
        page_size=page,
        max_pages=table.shape[1],
        rows_of_sequence=rows_of_sequence,
        scale=scale,
        window=window,
        sink=sink is not None,
        capability=capability_of(q),
    )


def _refusal(q, k_pages, v_pages, *others) -> str | None:
    refused = kernel_refusal(q, lambda: _specs(q, k_pages, v_pages, *others), "attention_specs")
    return refused or copy_refusal(k_pages=k_pages, v_pages=v_pages)


def _launch(scale: float, window: int | None, rows_of_sequence: int, *arrays) -> Array:
    from ..in_jit import call

    given, sink = arrays[:6], arrays[6]
    first, second = _specs(*given, sink, scale, window, rows_of_sequence)
    vector, weight = call(first, given)
    position = given[4]
    return call(second, (vector, weight, position, jnp.zeros(1, given[0].dtype) if sink is None else sink))[0]


@functools.cache
def _operation(scale: float, window: int | None, rows_of_sequence: int) -> Callable[..., Any]:
    plain = functools.partial(reference.attention, scale=scale, window=window)
    launch = functools.partial(_launch, scale, window, rows_of_sequence)
    # A whole number of runs in each launch; a row that fills up is not there.
    most = MAX_ROWS // rows_of_sequence * rows_of_sequence
    return as_operation(launch, plain, rows={0: 0, 4: -1, 5: 0}, most=most)


@functools.partial(jax.jit, static_argnums=(7, 8, 9))
def _triton(q, k_pages, v_pages, table, position, sequence, sink, scale, window, rows_of_sequence) -> Array:
    return _operation(scale, window, rows_of_sequence)(q, k_pages, v_pages, table, position, sequence, sink)


@functools.partial(jax.jit, static_argnums=(7, 8, 9))
def _reference(q, k_pages, v_pages, table, position, sequence, sink, scale, window, rows_of_sequence) -> Array:
    return reference.attention(q, k_pages, v_pages, table, position, sequence, sink, scale=scale, window=window)


# Best first. Triton itself is imported only when it serves a call.
ATTENTION = Operation(
    "attention", (Backend("triton", _triton, _refusal), Backend("reference", _reference, lambda *_: None))
)
