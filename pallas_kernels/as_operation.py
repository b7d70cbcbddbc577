"""Launches of kernels as an operation of JAX: in programs for any platform, under ``grad`` and under ``vmap``.

What an operation's `api` adds is its arguments' checks and the choice of a back end; what keeps kernels from serving
a call is told here (`kernel_refusal`, `copy_refusal`, `varying_refusal`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from . import xla_call
from .device import device_of, triton_refusal
from .dispatch import OutOfScope
from .errors import InvalidArgument
from .mesh_axes import vary_together


def as_operation(
    launch: Callable[..., Any],
    reference: Callable[..., Any],
    *,
    rows: Mapping[int, int] | None = None,
    most: int | None = None,
    in_place: bool = False,
) -> Callable[..., Any]:
    """One function of arrays from two that compute the same.

    ``launch`` runs where the program is compiled for CUDA, ``reference`` on every other platform (only XLA sees which)
    and, differentiated, for the gradient. Reverse mode only, of any order.

    Args:
        launch, reference: functions of the same positional arguments, pytrees of arrays.
        rows: places of the arguments whose first axis is the batch's rows, which is the first axis of every result
            too; each with the value of a row that is only there to fill a launch up. Under ``vmap`` over nothing
            but these, the batch goes into the rows. Otherwise, and without them, its elements go one after another.
        most: rows of one launch; more go in several.
        in_place: ``launch`` changes arrays in place. A batch of them is made of copies: ``vmap`` takes ``reference``.
    """
    rows = rows or {}
    forward = _batched(functools.partial(_on_cuda, launch, reference, rows, most), reference, rows, in_place)

    @jax.custom_vjp
    def operation(*args):
        return forward(*args)

    def save(*args):
        return operation(*args), args

    def pull_back(args, grad):
        return jax.vjp(reference, *args)[1](grad)

    operation.defvjp(save, pull_back)
    return operation


def _batched(
    cuda: Callable[..., Any], reference: Callable[..., Any], rows: Mapping[int, int], in_place: bool
) -> Callable[..., Any]:
    """Being one opaque operation also keeps the kernels' counters inside it when a gradient cuts a program in two."""

    @custom_vmap
    def forward(*args):
        return lax.platform_dependent(*args, cuda=cuda, default=reference)

    @forward.def_vmap
    def rule(size, batched, *args):
        if in_place:
            axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(batched))
            out = jax.vmap(reference, in_axes=axes, axis_size=size)(*args)
            return out, jax.tree.map(lambda _: True, out)
        others = [flags for place, flags in enumerate(batched) if place not in rows]
        if not rows or any(jax.tree.leaves(others)):
            leaves, tree = jax.tree.flatten(args)
            flags = jax.tree.leaves(batched)

            def one(i):
                return forward(*tree.unflatten([a[i] if b else a for a, b in zip(leaves, flags, strict=True)]))

            out = lax.map(one, jnp.arange(size))
            return out, jax.tree.map(lambda _: True, out)

        def flat(array, is_batched):
            array = array if is_batched else jnp.broadcast_to(array, (size, *array.shape))
            return array.reshape(-1, *array.shape[2:])

        given = [
            jax.tree.map(flat, a, b) if i in rows else a for i, (a, b) in enumerate(zip(args, batched, strict=True))
        ]
        out = forward(*given)
        first = min(rows)
        count = args[first].shape[1 if batched[first] else 0]
        out = jax.tree.map(lambda a: a.reshape(size, count, *a.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return forward


def _on_cuda(
    launch: Callable[..., Any],
    reference: Callable[..., Any],
    rows: Mapping[int, int],
    most: int | None,
    *args: Any,
) -> Any:
    """Launches of at most ``most`` rows, the last one filled up."""
    total = args[min(rows)].shape[0] if rows else 1
    if total == 0:  # a vmap over nothing
        out = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(reference, *args))
    elif most is None or total <= most:
        out = launch(*args)
    else:
        count = -(-total // most)

        def cut(array, fill):
            missing = ((0, count * most - total), *((0, 0),) * (array.ndim - 1))
            whole = jnp.pad(array, missing, constant_values=jnp.asarray(fill, array.dtype))
            return whole.reshape(count, most, *array.shape[1:])

        pieces = {i: jax.tree.map(functools.partial(cut, fill=fill), args[i]) for i, fill in rows.items()}
        out = lax.map(lambda piece: launch(*(piece.get(i, a) for i, a in enumerate(args))), pieces)
        out = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:total], out)
    # A launch's results vary over the manual axes of what it was given, the reference's maybe over more or fewer.
    return vary_together(out, like=args)


def kernel_refusal(array: Any, make_spec: Callable[[], Any], where: str) -> str | None:
    """Why a Triton kernel cannot serve a call, or None.

    Args:
        array: any argument of the call; tells its device.
        make_spec: makes the spec of the launch; what it refuses lies outside what the kernel is made for.
        where: name that the refusals of ``make_spec`` carry.
    """
    machine = triton_refusal(device_of(array))
    if machine is not None:
        return machine
    try:
        make_spec()
    except InvalidArgument as error:
        if error.where != where:
            raise
        return OutOfScope(f"{error.problem}: got {error.got}, the kernel takes {error.wanted}")
    return None


def copy_refusal(**arrays: Any) -> str | None:
    """Why arrays would be copied at every call: kernels take them dense, last axis fastest; or None.

    Traced arrays are taken as dense: how they lie is XLA's choice then.
    """
    for name, array in arrays.items():
        if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
            continue
        layout = array.format.layout  # pyrefly: ignore[missing-attribute]
        wanted = tuple(range(array.ndim))
        order = wanted if layout is None else tuple(layout.major_to_minor)
        if order != wanted:
            return (
                f"{name} lies in memory in the order of axes {order} and would be copied at every call: once put it in "
                f"order, jax.device_put({name}, Format(Layout({wanted}), {name}.sharding))"
            )
    return None


def varying_refusal(*arrays: Any) -> str | None:
    """Why a kernel cannot change arrays in place under ``shard_map``, or None.

    None where XLA calls the kernels itself; jax-triton gives what a Ref holds afterwards without the axes that its type
    varies over, which ``check_vma`` finds.
    """
    if xla_call.known():
        return None
    axes = {axis for a in arrays if isinstance(a, jax.Array) for axis in jax.typeof(a).manual_axis_type.varying}
    if not axes:
        return None
    return f"arrays vary over {sorted(axes)} and are changed in place: jax.shard_map(…, check_vma=False) allows that"
