"""Arrays whose types carry mesh axes, made plain for a back end: manual axes (`jax.shard_map`) and explicit ones.

Sharded arguments have been refused before (`dispatch.sharding_refusal`); what is left is local or replicated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def call_plain(run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call ``run(*args)`` with every array varying over the same manual axes, and over no explicit axis.

    With explicit axes each operation needs a rule for its output's type, which custom calls lack and loops
    around fresh zeros break; so the call runs with these axes automatic and gives a replicated result.
    """
    leaves, tree = jax.tree.flatten(args)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

    def with_arrays(*arrays: jax.Array) -> Any:
        filled = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            filled[i] = array
        return run(*jax.tree.unflatten(tree, filled))

    arrays = vary_together([jnp.asarray(leaves[i]) for i in places])
    meshes = {mesh for a in arrays if AxisType.Explicit in (mesh := jax.typeof(a).sharding.mesh).axis_types}
    for mesh in meshes:
        names = zip(mesh.axis_names, mesh.axis_types, strict=True)
        explicit = tuple(name for name, kind in names if kind == AxisType.Explicit)
        replicated = NamedSharding(mesh, PartitionSpec())
        return jax.sharding.auto_axes(with_arrays, axes=explicit, out_sharding=replicated)(*arrays)
    return with_arrays(*arrays)


def _varying(tree: Any) -> frozenset[str]:
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(tree)))


def vary_together[Tree](tree: Tree, like: Any = None) -> Tree:
    """Make every leaf vary over all manual axes over which any leaf of ``tree`` or ``like`` does.

    Under ``shard_map`` with ``check_vma`` (its default) loop carries and the cotangents of a ``custom_vjp``
    must vary over the same axes as what they meet. The gradient of a leaf widened here is summed over the
    new axes, as it must be. Outside ``shard_map``, and with ``check_vma=False``, nothing varies.
    """
    axes = _varying((tree, like))

    def widen(leaf: Any) -> Any:
        missing = sorted(axes - _varying(leaf))
        return lax.pcast(leaf, tuple(missing), to="varying") if missing else leaf

    return jax.tree.map(widen, tree)


def zeros_varying(shape: tuple[int, ...], dtype: Any, like: Any) -> jax.Array:
    """Zeros that may be carried through a loop together with values made from ``like``."""
    return vary_together(jnp.zeros(shape, dtype), like)
