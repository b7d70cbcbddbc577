"""The arrays of a decoder under the names that launch lists use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from moe_jax.layer import NAMES
from moe_jax.models.config import NOT_COMPUTED, ModelConfig
from moe_jax.models.decoder import Decoder
from moe_jax.models.rope import rotation
from moe_jax.nnx import MoE
from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.spec import FLOATS

_OF_ATTENTION = ("qkv", "qkv_bias", "out", "out_bias", "q_norm", "k_norm")


def module_weights(where: str, module: nnx.Module) -> dict[str, Array]:
    """Every array of a decoder: ``"embed"``, ``"0.qkv"``, ``"0.gate_up"``, …; options that it lacks are not there.

    Raises:
        InvalidArgument: another module, an array that was deleted, or arrays of several dtypes or of one that no
            kernel takes.
    """
    if not isinstance(module, Decoder):
        raise InvalidArgument("module", where=where, got=type(module).__name__, wanted="a Decoder")
    arrays = {name: getattr(*place)[...] for name, place in module_places(module).items()}
    check_there(where, arrays)
    dtype = arrays["embed"].dtype.name
    if dtype not in FLOATS:
        raise InvalidArgument("dtype of the model", where=where, got=dtype, wanted=", ".join(FLOATS))
    for name, array in arrays.items():
        if array.dtype.name != dtype and not name.endswith("selection_bias"):
            raise InvalidArgument(f"dtype of {name}", where=where, got=array.dtype.name, wanted=f"{dtype}, as embed")
    return arrays


def module_places(module: Decoder) -> dict[str, tuple[Any, str]]:
    """Where a decoder keeps the arrays of `module_weights`, by the same names: an object and its attribute."""
    places: dict[str, tuple[Any, str]] = {name: (module, name) for name in ("embed", "norm", "head")}
    for i, block in enumerate(module.blocks):
        places |= {f"{i}.{name}": (block, name) for name in ("attention_norm", "mlp_norm")}
        places |= {f"{i}.{name}": (block.attention, name) for name in _OF_ATTENTION}
        names = NAMES if isinstance(block.mlp, MoE) else ("gate_up", "down")
        places |= {f"{i}.{name}": (block.mlp, name) for name in names}
    return {name: place for name, place in places.items() if getattr(*place) is not None}


def check_update(
    where: str, arrays: Mapping[str, Any], declared: Iterable[tuple[str, str, tuple[int, ...]]], *, whole: bool
) -> None:
    """Refuse arrays that do not fit the storage that there is.

    Args:
        declared: name, dtype and shape of each.
        whole: none may be missing.

    Raises:
        InvalidArgument: naming the array.
    """
    wanted = {name: (dtype, shape) for name, dtype, shape in declared}
    odd = sorted(arrays.keys() - wanted.keys(), key=str) or (sorted(wanted.keys() - arrays.keys()) if whole else [])
    if odd:
        raise InvalidArgument("names", where=where, got=odd, wanted=f"{'all' if whole else 'some'} of {list(wanted)}")
    check_there(where, arrays)
    for name, array in arrays.items():
        dtype, shape = wanted[name]
        native = getattr(array.dtype, "isnative", True)
        if (array.dtype.name, tuple(array.shape)) != (dtype, shape) or not native:
            got = f"{array.dtype.name}{list(array.shape)}{'' if native else ', its bytes swapped'}"
            raise InvalidArgument(f"array {name}", where=where, got=got, wanted=f"{dtype}{list(shape)}")


def check_config(where: str, given: ModelConfig, config: ModelConfig) -> None:
    """Refuse the weights of a model that computes something else; where it begins and ends does not count.

    Raises:
        InvalidArgument: naming the fields that differ.
    """
    same = replace(given, **{name: getattr(config, name) for name in NOT_COMPUTED})
    told = [field.name for field in fields(config) if field.compare and field.name not in ("family", "dtype")]
    names = [name for name in told if getattr(same, name) != getattr(config, name)]
    if names:
        got = ", ".join(f"{name} {getattr(given, name)}" for name in names)
        wanted = ", ".join(f"{name} {getattr(config, name)}" for name in names)
        raise InvalidArgument("config", where=where, got=got, wanted=f"the engine's {wanted}")


def check_there(where: str, arrays: Mapping[str, Any]) -> None:
    """Refuse what has no values.

    Raises:
        InvalidArgument: naming the array.
    """
    for name, array in arrays.items():
        if not isinstance(array, (jax.Array, np.ndarray)) or isinstance(array, jax.core.Tracer):
            raise InvalidArgument(f"array {name}", where=where, got=type(array).__name__, wanted="a jax.Array")
        if isinstance(array, jax.Array) and array.is_deleted():
            raise InvalidArgument(f"array {name}", where=where, got="deleted", wanted="one that has its values")


def rotation_tables(config: ModelConfig, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, f32 ``[positions, head_dim / 2]``."""
    turn = rotation(config.rope, config.head_dim, jnp.arange(positions, dtype=jnp.int32)[None])
    return np.asarray(turn.cos[0]), np.asarray(turn.sin[0])
