"""One layer's arrays under the names Hugging Face checkpoints give them, expert by expert, and back.

The arrays are those of `moe_jax.layer`: a mapping from names to arrays, which is what `moe_jax.nnx.MoE.arrays`
returns and what a Linen module has in ``variables["params"]``. Layers made by scanning (``nnx.vmap`` over the
constructor, ``linen.scan``) hold all layers in one array with a layer axis. Where that axis is, is said by
``layer_axis`` and never guessed from sizes, because a model may have as many layers as experts:

* ``layer_axis=None``: one layer, ``gate_up`` is ``[E, 2I, H]``;
* ``layer_axis=0``: layers before experts, ``gate_up`` is ``[L, E, 2I, H]``, ``router`` is ``[L, E, H]``;
* ``layer_axis=1``: experts before layers, ``gate_up`` is ``[E, L, 2I, H]``, ``router`` is ``[E, L, H]``.

Arrays without an expert axis (``shared_down``, …) take the layer axis at the same place.

Below ``block_sparse_moe`` (Mixtral) or ``mlp`` (Qwen2-MoE, Qwen3-MoE, OLMoE):

======================  ============================  ===================================
array                   Mixtral                       the others
======================  ============================  ===================================
router                  ``gate.weight``               ``gate.weight``
gate_up[e], gate rows   ``experts.{e}.w1.weight``     ``experts.{e}.gate_proj.weight``
gate_up[e], up rows     ``experts.{e}.w3.weight``     ``experts.{e}.up_proj.weight``
down[e]                 ``experts.{e}.w2.weight``     ``experts.{e}.down_proj.weight``
shared_gate_up, gate    none                          ``shared_expert.gate_proj.weight``
shared_gate_up, up      none                          ``shared_expert.up_proj.weight``
shared_down             none                          ``shared_expert.down_proj.weight``
shared_gate             none                          ``shared_expert_gate.weight``
======================  ============================  ===================================

Only Qwen2-MoE has the shared expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_jax.errors import CheckpointError, InvalidArgument
from moe_jax.pallas_kernels.checks import check_choice, check_integer, check_kind, check_shape
from moe_jax.pallas_kernels.grouped_moe import Activation, MoEConfig


@dataclass(frozen=True)
class Names:
    """A family's names for the parts of one MoE layer, below the layer's own prefix."""

    block: str
    gate: str
    up: str
    down: str
    shared: bool = False


_PROJ = ("gate_proj", "up_proj", "down_proj")
FAMILIES = {
    "mixtral": Names("block_sparse_moe", "w1", "w3", "w2"),
    "qwen2_moe": Names("mlp", *_PROJ, shared=True),
    "qwen3_moe": Names("mlp", *_PROJ),
    "olmoe": Names("mlp", *_PROJ),
}
_LAYER = "{layer}"
SHARED = ("shared_gate_up", "shared_down", "shared_gate")


def to_hf(
    arrays: Mapping[str, Any], config: MoEConfig, family: str, *, prefix: str = "", layer_axis: int | None = None
) -> dict[str, np.ndarray]:
    """Tensors by their Hugging Face names, in the dtype they have.

    Args:
        arrays: by the names of `moe_jax.layer`.
        config: its activation says how gate and up rows are laid out.
        family: mixtral, qwen2_moe, qwen3_moe or olmoe.
        prefix: what stands before a layer's names, e.g. ``"model.layers.3."``; with a layer axis it must contain
            ``{layer}``: ``"model.layers.{layer}."``.
        layer_axis: see the module's text.

    Raises:
        InvalidArgument: an array that the family has no name for, one that is missing, or a shape that does not
            fit.
    """
    where = "to_hf"
    names = _family(where, config, family, prefix)
    check_kind(where, "arrays", arrays, Mapping)
    host = {name: np.asarray(value) for name, value in arrays.items() if value is not None}
    required = {"router", "gate_up", "down", *(SHARED if names.shared else ())}
    if set(host) != required:
        got = sorted(map(str, host))
        raise InvalidArgument(f"arrays of a {family} layer", where=where, got=got, wanted=sorted(required))
    if layer_axis is None:
        return _one_to_hf(host, config, names, prefix)
    layer_axis = _check_layers(where, prefix, layer_axis)
    counts = {name: value.shape[layer_axis : layer_axis + 1] for name, value in host.items()}
    (layers,) = counts["router"] or (1,)
    for name, count in counts.items():
        if count != (layers,):
            got = " ".join(map(str, count)) or "no such axis"
            raise InvalidArgument(f"layers of {name}", where=where, got=got, wanted=f"{layers}, as of router")
    stacked = {name: np.moveaxis(value, layer_axis, 0) for name, value in host.items()}
    tensors: dict[str, np.ndarray] = {}
    for number in range(layers):
        one = {name: value[number] for name, value in stacked.items()}
        tensors |= _one_to_hf(one, config, names, prefix.replace(_LAYER, str(number)))
    return tensors


def from_hf(
    tensors: Mapping[str, np.ndarray],
    config: MoEConfig,
    family: str,
    *,
    prefix: str = "",
    layers: int | None = None,
    layer_axis: int = 0,
) -> dict[str, np.ndarray]:
    """Arrays by the names of `moe_jax.layer`, from tensors under Hugging Face names.

    Args:
        tensors: a checkpoint's tensors; those that do not begin with the prefix are left alone.
        config, family, prefix: as in `to_hf`.
        layers: None for one layer; a number L makes arrays with a layer axis, from the layers 0 to L-1.
        layer_axis: where the layer axis goes.

    Raises:
        CheckpointError: a tensor missing, one expert too many, or a shape that does not fit.
        InvalidArgument: an argument of another kind.
    """
    where = "from_hf"
    names = _family(where, config, family, prefix)
    check_kind(where, "tensors", tensors, Mapping)
    if layers is None:
        return _one_from_hf(tensors, config, names, prefix)
    layer_axis = _check_layers(where, prefix, layer_axis)
    numbers = range(check_integer(where, "layers", layers, 1))
    each = [_one_from_hf(tensors, config, names, prefix.replace(_LAYER, str(number))) for number in numbers]
    return {name: np.stack([one[name] for one in each], axis=layer_axis) for name in each[0]}


def _family(where: str, config: MoEConfig, family: str, prefix: str) -> Names:
    check_kind(where, "config", config, MoEConfig)
    check_choice(where, "family", family, FAMILIES)
    check_kind(where, "prefix", prefix, str)
    if not config.activation.gated:
        raise InvalidArgument(
            f"activation for {family}", where=where, got=config.activation.name, wanted="one with a gate"
        )
    return FAMILIES[family]


def _check_layers(where: str, prefix: str, layer_axis: int | None) -> int:
    if _LAYER not in prefix:
        raise InvalidArgument("prefix of stacked layers", where=where, got=repr(prefix), wanted=f"text with {_LAYER}")
    return check_integer(where, "layer_axis", layer_axis, 0, 1)


def _one_to_hf(arrays: Mapping[str, np.ndarray], config: MoEConfig, names: Names, prefix: str) -> dict[str, np.ndarray]:
    block, experts = f"{prefix}{names.block}", config.router.experts

    def check(name: str, *wanted: int | str) -> int:
        check_shape("to_hf", name, arrays[name], wanted)
        return arrays[name].shape[-1]

    hidden = check("router", experts, "H")
    check("gate_up", experts, 2 * check("down", experts, hidden, "I"), hidden)
    if names.shared:
        check("shared_gate_up", 2 * check("shared_down", hidden, "S"), hidden)
        check("shared_gate", 1, hidden)
    tensors = {f"{block}.gate.weight": arrays["router"]}
    for e in range(experts):
        tensors |= _feed_forward(f"{block}.experts.{e}", arrays["gate_up"][e], arrays["down"][e], config, names)
    if names.shared:
        tensors |= _feed_forward(
            f"{block}.shared_expert", arrays["shared_gate_up"], arrays["shared_down"], config, names
        )
        tensors[f"{block}.shared_expert_gate.weight"] = arrays["shared_gate"]
    return tensors


def _feed_forward(
    name: str, gate_up: np.ndarray, down: np.ndarray, config: MoEConfig, names: Names
) -> dict[str, np.ndarray]:
    gate, up = _split(gate_up, config.activation)
    parts = {names.gate: gate, names.up: up, names.down: down}
    return {f"{name}.{part}.weight": value for part, value in parts.items()}


def _one_from_hf(
    tensors: Mapping[str, np.ndarray], config: MoEConfig, names: Names, prefix: str
) -> dict[str, np.ndarray]:
    block, experts = f"{prefix}{names.block}", config.router.experts
    number = re.compile(re.escape(block) + r"\.experts\.(\d+)\.")
    for name in tensors:
        found = number.match(str(name))
        if found and int(found[1]) >= experts:
            raise CheckpointError("extra expert", where=name, got=f"expert {found[1]}", wanted=f"0 to {experts - 1}")
    router = _take(tensors, f"{block}.gate.weight", (experts, None))
    hidden = router.shape[1]

    def feed_forward(name: str, inner: int | None) -> tuple[np.ndarray, np.ndarray]:
        gate = _take(tensors, f"{name}.{names.gate}.weight", (inner, hidden))
        up = _take(tensors, f"{name}.{names.up}.weight", gate.shape)
        down = _take(tensors, f"{name}.{names.down}.weight", gate.shape[::-1])
        return _join(gate, up, config.activation), down

    first = feed_forward(f"{block}.experts.0", None)
    inner = first[1].shape[1]
    pairs = [first, *(feed_forward(f"{block}.experts.{e}", inner) for e in range(1, experts))]
    arrays = {
        "router": router,
        "gate_up": np.stack([gate_up for gate_up, _ in pairs]),
        "down": np.stack([down for _, down in pairs]),
    }
    if names.shared:
        arrays["shared_gate_up"], arrays["shared_down"] = feed_forward(f"{block}.shared_expert", None)
        arrays["shared_gate"] = _take(tensors, f"{block}.shared_expert_gate.weight", (1, hidden))
    return arrays


def _take(tensors: Mapping[str, np.ndarray], name: str, shape: tuple[int | None, ...]) -> np.ndarray:
    if name not in tensors:
        raise CheckpointError("missing tensor", where=name, got="nothing", wanted="a tensor of that name")
    tensor = np.asarray(tensors[name])
    fits = tensor.ndim == len(shape) and all(want in (None, got) for got, want in zip(tensor.shape, shape, strict=True))
    if not fits:
        wanted = "[" + ", ".join("any" if want is None else str(want) for want in shape) + "]"
        raise CheckpointError("shape", where=name, got=list(tensor.shape), wanted=wanted)
    return tensor


def _split(gate_up: np.ndarray, activation: Activation) -> tuple[np.ndarray, np.ndarray]:
    if activation.layout == "interleaved":
        return gate_up[0::2], gate_up[1::2]
    inner = gate_up.shape[0] // 2
    return gate_up[:inner], gate_up[inner:]


def _join(gate: np.ndarray, up: np.ndarray, activation: Activation) -> np.ndarray:
    axis = 1 if activation.layout == "interleaved" else 0
    return np.stack([gate, up], axis=axis).reshape(2 * gate.shape[0], gate.shape[1])
