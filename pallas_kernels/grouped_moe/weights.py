"""Expert weights as one pytree, in the layout the kernels read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..checks import FLOATS, check_array, check_dtype, check_kind, check_shape
from ..errors import InvalidArgument
from ..route.config import RouterConfig
from .activation import Activation


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Everything static about one MoE layer: how rows are routed and what an expert computes.

    Raises:
        InvalidArgument: a part of another type.
    """

    router: RouterConfig
    activation: Activation

    def __post_init__(self) -> None:
        check_kind("MoEConfig", "router", self.router, RouterConfig)
        check_kind("MoEConfig", "activation", self.activation, Activation)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SharedExpert:
    """A feed-forward block every row passes, added to the routed sum.

    Attributes:
        gate_up: ``[2S, H]`` (``[S, H]`` for an activation without gate), rows laid out as the activation says.
        down: ``[H, S]``.
        gate: ``[1, H]`` or None. Multiplies the output by ``sigmoid(x @ gate.T)`` (Qwen2-MoE).
    """

    gate_up: Float[Array, "rows H"]
    down: Float[Array, "H S"]
    gate: Float[Array, "1 H"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """Weights of one layer's experts. Every matrix is ``[out, in]``, so the reduced axis is contiguous.

    Arrays are used as given; under ``jit`` a slice or transpose is a copy each time a kernel is called,
    so pack once (`pack_experts`) and keep the result.

    Attributes:
        gate_up: ``[E, 2I, H]`` (``[E, I, H]`` without gate); gate and up rows as the activation's layout says.
        down: ``[E, H, I]``.
        gate_up_bias: ``[E, 2I]`` or None.
        down_bias: ``[E, H]`` or None.
        shared: an always-on expert or None.
    """

    gate_up: Float[Array, "E rows H"]
    down: Float[Array, "E H I"]
    gate_up_bias: Float[Array, "E rows"] | None = None
    down_bias: Float[Array, "E H"] | None = None
    shared: SharedExpert | None = field(default=None)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


def check_weights(
    where: str, weights: ExpertWeights, config: MoEConfig, dtype: Any, *, like: str, hidden: int | None = None
) -> None:
    """Refuse weights that do not fit the activation or each other; how many experts they hold is the caller's to check.

    Args:
        dtype: of all of them.
        like: the name of the argument that the dtype is taken from, for the error.
        hidden: of the rows that the weights are for. Weights of another size that fit each other are the caller's to
            refuse: then the rows are as likely to be wrong.

    Raises:
        InvalidArgument: naming the array, its shape or dtype, and the one wanted.
    """
    check_kind(where, "weights", weights, ExpertWeights)
    act = config.activation
    rows = "2·intermediate" if act.gated else "intermediate"
    layouts = {
        "weights.down": " ([experts, hidden, intermediate])",
        "weights.gate_up": f" ([experts, {rows}, hidden])",
    }
    check_shape(where, "weights.down", weights.down, ("E", "H", "I"))
    experts, found, inner = weights.down.shape
    if hidden is not None and found != hidden:
        check_array(where, "weights.gate_up", weights.gate_up)
        if tuple(weights.gate_up.shape) != (experts, act.rows(inner), found):
            raise InvalidArgument(
                "shape of weights.down",
                where=where,
                got=list(weights.down.shape),
                wanted=f"[E, {hidden}, I]{layouts['weights.down']} for rows of {hidden}, and gate_up "
                f"[E, {'2I' if act.gated else 'I'}, {hidden}]{layouts['weights.gate_up']}",
            )
    hidden = found
    wanted: dict[str, tuple[Any, tuple[int, ...]]] = {
        "weights.down": (weights.down, (experts, hidden, inner)),
        "weights.gate_up": (weights.gate_up, (experts, act.rows(inner), hidden)),
        "weights.gate_up_bias": (weights.gate_up_bias, (experts, act.rows(inner))),
        "weights.down_bias": (weights.down_bias, (experts, hidden)),
    }
    if weights.shared is not None:
        check_kind(where, "weights.shared", weights.shared, SharedExpert)
        check_shape(where, "weights.shared.down", weights.shared.down, (hidden, "S"))
        shared = weights.shared.down.shape[1]
        wanted["weights.shared.down"] = (weights.shared.down, (hidden, shared))
        wanted["weights.shared.gate_up"] = (weights.shared.gate_up, (act.rows(shared), hidden))
        wanted["weights.shared.gate"] = (weights.shared.gate, (1, hidden))
    optional = ("weights.gate_up_bias", "weights.down_bias", "weights.shared.gate")
    for name, (array, shape) in wanted.items():
        if array is not None or name not in optional:
            check_shape(where, name, array, shape, layouts.get(name, ""))
            check_dtype(where, name, array, (dtype,), f", as {like} has")


def pack_experts(
    gate: Float[Array, "E I H"] | None,
    up: Float[Array, "E I H"],
    down: Float[Array, "E H I"],
    *,
    config: MoEConfig,
) -> ExpertWeights:
    """Pack separate gate, up and down stacks into `ExpertWeights`, once.

    Costs new memory only for ``gate_up`` (``result.gate_up.nbytes``), beside the stacks handed in until they
    are dropped; `jax.Array` stacks that need no joining (``down``, ``up`` of an activation without gate) are
    used as they are.

    Args:
        gate: ``[E, I, H]``, or None for an activation without gate.
        up: ``[E, I, H]``.
        down: ``[E, H, I]``.
        config: its activation decides whether gate and up rows stand in halves or interleaved.

    Raises:
        InvalidArgument: shapes or dtypes that do not belong together, or a gate where there is none.
    """
    where = "pack_experts"
    check_kind(where, "config", config, MoEConfig)
    act = config.activation
    check_dtype(where, "up", up, FLOATS)
    check_shape(where, "up", up, ("E", "I", "H"))
    experts, inner, hidden = up.shape
    if (gate is None) == act.gated:
        got = "None" if gate is None else "an array"
        wanted = "an array" if act.gated else "None"
        raise InvalidArgument(f"gate of activation {act.name!r}", where=where, got=got, wanted=wanted)
    if gate is None:
        gate_up = jnp.asarray(up)
    else:
        check_shape(where, "gate", gate, (experts, inner, hidden))
        check_dtype(where, "gate", gate, (up.dtype,))
        axis = 2 if act.layout == "interleaved" else 1
        gate_up = jnp.stack([gate, up], axis=axis).reshape(experts, 2 * inner, hidden)
    check_shape(where, "down", down, (experts, hidden, inner))
    weights = ExpertWeights(gate_up=gate_up, down=jnp.asarray(down))
    check_weights(where, weights, config, up.dtype, like="up")
    return weights
