"""What a decoder-only mixture-of-experts language model is, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import jax.numpy as jnp

from moe_jax.pallas_kernels.checks import FLOATS, check_choice, check_kind, check_switch, shown
from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.grouped_moe import MoEConfig

Kind = Literal["size", "token", "number"]
RopeKind = Literal["default", "linear", "yarn", "llama3"]
# Sizes, positions and tokens are int32 on a device, and formulas f32 throughout: a value beyond is none.
_INT32 = 1 << 31
_F32_LEAST, _F32_MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127


def _check(where: str, name: str, value: Any, kind: Kind) -> None:
    """Refuse what is out of range.

    Raises:
        InvalidArgument: the value, or its type.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "size":
        fits, wanted = number and isinstance(value, int) and 0 < value < _INT32, f"an integer from 1 to {_INT32 - 1}"
    elif kind == "token":
        fits, wanted = number and isinstance(value, int) and -_INT32 <= value < _INT32, "an integer of 32 bits"
    else:
        fits = number and _F32_LEAST <= value <= _F32_MOST
        wanted = f"a number from {_F32_LEAST:.2g} to {_F32_MOST:.2g}, as f32 has it"
    if not fits:
        raise InvalidArgument(name, where=where, got=shown(value), wanted=wanted)


def _is_zero(value: Any) -> bool:
    return type(value) in (int, float) and value == 0


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (arXiv:2104.09864) and its context extensions.

    Raises `InvalidArgument` for a value of another kind, a number that f32 has not, and for yarn with a base of 1: it
    divides by its logarithm.

    Attributes:
        theta: base of the frequencies.
        kind: ``"default"``; ``"linear"`` divides positions by ``factor``; ``"yarn"`` (arXiv:2309.00071);
            ``"llama3"`` (the Llama 3.1 reference model).
        factor: context extension factor of the three scaled kinds.
        original_max_positions: context length before extension (yarn, llama3).
        low_freq_factor, high_freq_factor: llama3's band limits.
        beta_fast, beta_slow: yarn's ramp, in rotations over the original context.
        attention_factor: yarn's multiplier of cos and sin; None derives it (``0.1 ln(factor) + 1``, or from
            ``mscale`` and ``mscale_all_dim``).
        mscale, mscale_all_dim: yarn as DeepSeek writes it.
        truncate: yarn: round the ramp's ends to whole dimensions.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_choice("RopeConfig", "kind", self.kind, get_args(RopeKind))
        where = f"rope {self.kind!r}"
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            _check(where, name, getattr(self, name), "number")
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None and not _is_zero(value):  # 0 is as None, for yarn
                _check(where, name, value, "number")
        check_switch(where, "truncate", self.truncate)
        if self.original_max_positions is not None:
            _check(where, "original_max_positions", self.original_max_positions, "size")
        if self.kind == "yarn" and self.theta == 1:
            raise InvalidArgument("theta", where=where, got=self.theta, wanted="another number than 1")


# Where a text begins and ends: a model decides it, and no array or module shows it.
NOT_COMPUTED = ("bos_token_id", "eos_token_ids", "pad_token_id", "max_positions")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only MoE language model. Frozen, hashable, and equal when the contents are.

    Raises `InvalidArgument` for a value of another kind, a size that is no positive int32, a token that is no int32, a
    number that f32 has not.

    Attributes:
        family: Hugging Face ``model_type``: mixtral, qwen3_moe, olmoe or qwen2_moe.
        vocab_size, hidden_size, layers: V, H and the number of blocks.
        heads, kv_heads, head_dim: query heads, key/value heads, size of one head.
        moe: routing and activation of every MoE layer.
        moe_intermediate: I, an expert's intermediate size.
        moe_layers: for each layer, whether its feed-forward block is a mixture of experts.
        dense_intermediate: intermediate size of the layers that are not.
        shared_intermediate: size of the shared expert with a sigmoid gate (Qwen2-MoE), or None.
        qk_norm: RMSNorm of queries and keys: per ``"head"`` (Qwen3), over the whole ``"projection"``
            (OLMoE), or None.
        qkv_bias, out_bias: whether the attention projections have biases.
        clip_qkv: clamp of the projected q, k and v (OLMoE), or None.
        norm_eps: epsilon of every RMSNorm.
        tie_embeddings: the output head is the embedding table.
        rope: position embedding.
        windows: for each layer, its sliding attention window in tokens, or None for full attention.
        max_positions: longest context the model was made for.
        dtype: parameter dtype of the checkpoint, a JAX dtype name.
        bos_token_id, eos_token_ids, pad_token_id: special tokens.
        sources: where resolved values came from, e.g. ``("norm_topk_prob", "default of qwen2_moe")``; not
            part of equality.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    moe: MoEConfig
    moe_intermediate: int
    moe_layers: tuple[bool, ...]
    dense_intermediate: int | None = None
    shared_intermediate: int | None = None
    qk_norm: Literal["head", "projection"] | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    clip_qkv: float | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    rope: RopeConfig = RopeConfig()
    windows: tuple[int | None, ...] = ()
    max_positions: int = 4096
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    sources: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        where = "ModelConfig"
        for name, kind in {"family": str, "moe": MoEConfig, "rope": RopeConfig}.items():
            check_kind(where, name, getattr(self, name), kind)
        for name in ("moe_layers", "windows", "eos_token_ids", "sources"):
            check_kind(where, name, getattr(self, name), tuple)
        switches = {f"moe_layers[{i}]": value for i, value in enumerate(self.moe_layers)}
        switches |= {name: getattr(self, name) for name in ("qkv_bias", "out_bias", "tie_embeddings")}
        for name, value in switches.items():
            check_switch(where, name, value)
        check_choice(where, "qk_norm", self.qk_norm, ("head", "projection", None))
        check_choice(where, "dtype", self.dtype, [jnp.dtype(dtype).name for dtype in FLOATS])
        for name in ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "moe_intermediate"):
            _check(where, name, getattr(self, name), "size")
        _check(where, "max_positions", self.max_positions, "size")
        _check(where, "norm_eps", self.norm_eps, "number")
        optional: dict[str, Kind] = {"dense_intermediate": "size", "shared_intermediate": "size", "clip_qkv": "number"}
        tokens: dict[str, Kind] = {"bos_token_id": "token", "pad_token_id": "token"}
        for name, kind in (optional | tokens).items():
            if getattr(self, name) is not None:
                _check(where, name, getattr(self, name), kind)
        for window in self.windows:
            if window is not None and not _is_zero(window):  # 0 is for `Decoder` to refuse
                _check(where, "windows", window, "size")
        for token in self.eos_token_ids:
            _check(where, "eos_token_ids", token, "token")
