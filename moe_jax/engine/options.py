"""Checked options of an engine, and the device they mean."""

from __future__ import annotations

import operator
from typing import Any

import jax
import numpy as np

from moe_jax.cache import Runtime
from moe_jax.errors import CannotServe, InvalidArgument


def check_count(where: str, name: str, value: Any, most: int) -> int:
    """An option as Python's own integer, refused unless it is one from 1 to ``most``.

    Raises:
        InvalidArgument: naming the option.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= most:
        raise InvalidArgument(name, where=where, got=repr(value), wanted=f"an integer from 1 to {most}")
    return operator.index(value)


def cuda_runtime(where: str, graphs: str) -> Runtime:
    """JAX's first CUDA device. Nothing of CUDA is imported where there is none.

    Raises:
        CannotServe: there is none, or one that is too old.
    """
    if jax.default_backend() != "gpu":
        got = f"graphs={graphs!r} and no CUDA device"
        raise CannotServe(
            "device", where=where, got=got, wanted='a GPU, or graphs="simulate"; Model.generate needs neither'
        )
    from moe_jax.cache.cuda_runtime import CudaRuntime

    return CudaRuntime()
