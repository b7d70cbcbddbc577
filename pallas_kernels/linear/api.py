"""Public small-row matmul: checks the arguments and picks the back end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..as_operation import as_operation, copy_refusal, kernel_refusal
from ..checks import FLOATS, check_dtype, check_float, check_number, check_shape
from ..device import capability_of
from ..dispatch import Backend, Operation, sharding_refusal
from . import reference
from .heuristics import MAX_ROWS
from .specs import linear_spec


def linear(
    x: Float[Array, "T K"],
    w: Float[Array, "N K"],
    *,
    gain: Float[Array, " K"] | None = None,
    eps: float = 1e-6,
    bias: Float[Array, " N"] | None = None,
    residual: Float[Array, "T N"] | None = None,
    out_dtype: Any = None,
    backend: str = "auto",
) -> Float[Array, "T N"]:
    """A projection: ``norm(x) @ w.T + bias + residual``, each step only if its argument is given.

    The norm is RMSNorm (arXiv:1910.07467), as ``(x * gain) @ w.T / sqrt(mean(x ** 2) + eps)``: ``x * gain`` is rounded
    to the dtype of ``x``, nothing else before the end. Sums are f32 (f64 for f64 inputs). With the kernel, for 1 to
    64 rows on a CUDA device, a row's bits depend on that row alone, not on the number of rows or its place.

    Works under ``jit``, ``grad`` (reverse mode), ``vmap`` (a batch of rows with shared weights is one set of rows) and
    inside ``jax.shard_map``.

    Args:
        x: ``[T, K]``, bf16, f16, f32 or f64; T may be 0.
        w: ``[N, K]`` in the dtype of ``x``: one row for each output, as checkpoints hold it.
        gain: ``[K]`` in the dtype of ``x``, the norm's weight; None: no norm.
        eps: added to the mean square.
        bias: ``[N]`` in the dtype of ``x``.
        residual: ``[T, N]`` in the dtype of the result.
        out_dtype: dtype of the result, e.g. f32 for logits; None: that of ``x``.
        backend: ``"auto"`` or a back end's name.

    Returns:
        ``[T, N]`` in ``out_dtype``.

    Raises:
        InvalidArgument: a wrong shape, dtype or value, with what was got and wanted.
        CannotServe: the back end asked for declined, or arguments are sharded outside ``shard_map``.
    """
    where = "linear"
    check_dtype(where, "x", x, FLOATS)
    check_shape(where, "x", x, ("T", "K"))
    out = check_float(where, "out_dtype", x.dtype if out_dtype is None else out_dtype)
    eps = check_number(where, "eps", eps, over=0)
    rows, inputs = x.shape
    check_dtype(where, "w", w, (x.dtype,))
    check_shape(where, "w", w, ("N", inputs))
    outputs = w.shape[0]
    for name, array, shape, dtype in (
        ("gain", gain, (inputs,), x.dtype),
        ("bias", bias, (outputs,), x.dtype),
        ("residual", residual, (rows, outputs), out),
    ):
        if array is not None:
            check_dtype(where, name, array, (dtype,))
            check_shape(where, name, array, shape)
    sharding_refusal(where, {"x": x, "w": w, "gain": gain, "bias": bias, "residual": residual})
    return LINEAR(x, w, gain, bias, residual, eps, out.name, backend=backend)


def _spec(x, w, gain, bias, residual, eps: float, out_dtype: str):
    (rows, inputs), outputs = x.shape, w.shape[0]
    return linear_spec(
        rows,
        inputs,
        outputs,
        dtype=x.dtype.name,
        out_dtype=out_dtype,
        norm_eps=None if gain is None else eps,
        bias=bias is not None,
        residual=residual is not None,
        capability=capability_of(x),
    )


def _refusal(x, w, *others) -> str | None:
    return kernel_refusal(x, lambda: _spec(x, w, *others), "linear_spec") or copy_refusal(w=w)


def _launch(eps: float, out_dtype: str, x, w, gain, bias, residual) -> Array:
    from ..in_jit import call

    def or_absent(array, dtype):
        return jnp.zeros(1, dtype) if array is None else array

    optional = or_absent(gain, x.dtype), w, or_absent(bias, x.dtype), or_absent(residual, out_dtype)
    return call(_spec(x, w, gain, bias, residual, eps, out_dtype), (x, *optional))[0]


@functools.cache
def _operation(eps: float, out_dtype: str) -> Callable[..., Any]:
    plain = functools.partial(reference.linear, eps=eps, out_dtype=out_dtype)
    return as_operation(functools.partial(_launch, eps, out_dtype), plain, rows={0: 0, 4: 0}, most=MAX_ROWS)


@functools.partial(jax.jit, static_argnums=(5, 6))
def _triton(x, w, gain, bias, residual, eps: float, out_dtype: str) -> Float[Array, "T N"]:
    return _operation(eps, out_dtype)(x, w, gain, bias, residual)


@functools.partial(jax.jit, static_argnums=(5, 6))
def _reference(x, w, gain, bias, residual, eps: float, out_dtype: str) -> Float[Array, "T N"]:
    return reference.linear(x, w, gain, bias, residual, eps=eps, out_dtype=out_dtype)


# Best first. Triton itself is imported only when it serves a call.
LINEAR = Operation("linear", (Backend("triton", _triton, _refusal), Backend("reference", _reference, lambda *_: None)))
