"""Supported versions of Python and JAX, checked when the package is imported."""

from __future__ import annotations

import operator
import sys
from types import ModuleType

from moe_jax.pallas_kernels.errors import MoeJaxError

VERSION = "0.1.0"

PYTHON = (3, 12)
JAX = ((0, 11, 2), (0, 12, 0))
JAX_RANGE = "JAX >=0.11.2,<0.12"
REMEDY = "pip install 'jax>=0.11.2,<0.12'"

# What the package calls that JAX has moved or renamed before. One missing name at import is a clear refusal;
# at the first step it would be an AttributeError from somewhere inside a trace.
JAX_NAMES = (
    "shard_map",
    "typeof",
    "sharding.AxisType",
    "custom_batching.custom_vmap",
    "tree_util.register_dataclass",
    "tree_util.tree_leaves_with_path",
)


class UnsupportedVersion(MoeJaxError, ImportError):
    """Python, JAX or a part of it is not one this version of the package works with."""


def check(jax: ModuleType, python: tuple[int, ...] = tuple(sys.version_info[:3])) -> None:
    """Refuse a Python or JAX outside the supported range. Takes microseconds: compares numbers and looks up names.

    Args:
        jax: the imported ``jax`` module.
        python: version of the interpreter.

    Raises:
        UnsupportedVersion: naming the version found, the range wanted and how to get it.
    """
    if python < PYTHON:
        raise UnsupportedVersion(
            "version of Python", where="moe_jax", got=".".join(map(str, python)), wanted="Python >=3.12"
        )
    low, high = JAX
    if not low <= jax.__version_info__ < high:
        wanted = f"{JAX_RANGE} ({REMEDY}, or another release of moe-jax)"
        raise UnsupportedVersion("version of JAX", where="moe_jax", got=jax.__version__, wanted=wanted)
    for name in JAX_NAMES:
        try:
            operator.attrgetter(name)(jax)
        except AttributeError as error:
            raise missing(f"jax.{name}", jax.__version__) from error


def names_jax(error: Exception) -> bool:
    """Whether an import failed because a name is not in JAX (and not because of a mistake of ours)."""
    module = getattr(error, "name", None) if isinstance(error, ImportError) else str(error).removeprefix("module '")
    return isinstance(module, str) and (module == "jax" or module.startswith(("jax.", "jax'")))


def missing(what: str, version: str) -> UnsupportedVersion:
    """The error for a name that the installed JAX lacks although its version is in range."""
    return UnsupportedVersion(
        f"missing in JAX: {what}", where="moe_jax", got=f"JAX {version}", wanted=f"{JAX_RANGE} ({REMEDY})"
    )
