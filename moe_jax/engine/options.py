"""Checked options of an engine, and the device they mean."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from moe_jax.cache import LaunchList, Runtime, SimulatedRuntime
from moe_jax.cache.decision import Mode
from moe_jax.cache.store import estimated_bytes
from moe_jax.errors import CannotServe, InvalidArgument
from moe_jax.model import Model
from moe_jax.pallas_kernels.checks import check_integer, shown

from .step import Geometry

PAGE_SIZE = 64  # tokens of a page of keys and values, by default


def check_page_size(where: str, value: Any) -> int:
    """A power of two up to 65536.

    Raises:
        InvalidArgument: anything else.
    """
    size = check_integer(where, "page_size", value, 1, 1 << 16)
    if size & (size - 1):
        raise InvalidArgument("page_size", where=where, got=size, wanted="a power of two")
    return size


def check_bounds(where: str, graphs: Mode, steps: Mapping[int, LaunchList], max_entries: int, max_bytes: int) -> None:
    """Refuse bounds within which the graphs of all decode buckets do not fit side by side.

    Each would be evicted for another that `Engine.warmup` or a step captures, so no step could be relied on to be a
    replay.

    Args:
        steps: the decode step of each bucket.

    Raises:
        InvalidArgument: naming the bound that is too small, and the least that is not.
    """
    if graphs == "off":
        return
    least = {"max_entries": len(steps), "max_bytes": sum(map(estimated_bytes, steps.values()))}
    for name, given in (("max_entries", max_entries), ("max_bytes", max_bytes)):
        if given < least[name]:
            wanted = f'at least {least[name]}, a graph for each bucket of {[*steps]} rows, or graphs="off"'
            raise InvalidArgument(name, where=where, got=given, wanted=wanted)


def token_limit(where: str, geometry: Geometry, prompt: int, max_new_tokens: int | None) -> int:
    """Tokens that a sequence may come to, with a prompt of so many.

    Raises:
        InvalidArgument: an option out of range, or more tokens than the engine can ever hold.
    """
    most = geometry.max_tokens
    asked = None if max_new_tokens is None else check_integer(where, "max_new_tokens", max_new_tokens, 1)
    total = prompt + max(1, most - prompt if asked is None else asked)
    if total > most:
        got = f"{prompt} + {shown(total - prompt)} tokens"
        raise InvalidArgument("prompt and new tokens", where=where, got=got, wanted=f"at most max_tokens={most}")
    if geometry.pages_for(total) > geometry.pages:
        got, wanted = f"{total} tokens", f"at most {geometry.pages} pages of {geometry.page_size}"
        raise InvalidArgument("prompt and new tokens", where=where, got=got, wanted=wanted)
    return total


def given_weights(where: str, given: Any) -> nnx.Module | Mapping[str, Any]:
    """What `Engine.update_weights` was given; of a model its module.

    Raises:
        InvalidArgument: anything else.
    """
    if not isinstance(given, (Model, nnx.Module, Mapping)):
        wanted = "a moe_jax.Model, its module, a dict of arrays by name, or None for the engine's own model"
        raise InvalidArgument("weights", where=where, got=type(given).__name__, wanted=wanted)
    return given.module if isinstance(given, Model) else given


def check_packages(where: str) -> None:
    """Kernels are Triton's functions, also where their references run in their place.

    Raises:
        CannotServe: Triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        wanted = "jax-triton (`pip install jax-triton`), which needs no GPU; the extras cuda12 and cuda13 have it"
        raise CannotServe("packages", where=where, got="no triton", wanted=wanted)


def simulated_runtime(where: str, capacity: int, pages: int) -> SimulatedRuntime:
    """A simulated device of so many bytes, most of them for so many pages.

    Raises:
        CannotServe: the host has not so many.
    """
    try:
        return SimulatedRuntime(capacity)
    except (MemoryError, ValueError) as error:  # the second: more than NumPy can count
        got = f"{capacity:,} bytes for a pool of {pages:,} pages"
        raise CannotServe("memory", where=where, got=got, wanted="fewer pages, or a host with more memory") from error


def cuda_runtime(where: str, graphs: str, device: jax.Device | None = None) -> Runtime:
    """A CUDA device; None: JAX's first. Nothing of CUDA is imported where there is none.

    Raises:
        CannotServe: there is none, or one that is too old, or ``cuda-core`` is not installed.
    """
    if jax.default_backend() != "gpu" and device is None:
        got = f"graphs={graphs!r} and no CUDA device"
        raise CannotServe(
            "device", where=where, got=got, wanted='a GPU, or graphs="simulate"; Model.generate needs neither'
        )
    try:
        from moe_jax.cache.cuda_runtime import CudaRuntime
    except ImportError as error:
        wanted = "cuda-core and cuda-bindings, as the extras cuda12 and cuda13 have them"
        raise CannotServe("packages", where=where, got=str(error), wanted=wanted) from error

    return CudaRuntime(device)
