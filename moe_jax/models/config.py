"""What a decoder-only mixture-of-experts language model is, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moe_jax.pallas_kernels.grouped_moe import MoEConfig


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (arXiv:2104.09864) and its context extensions.

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
    kind: Literal["default", "linear", "yarn", "llama3"] = "default"
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


# Where a text begins and ends: a model decides it, and no array or module shows it.
NOT_COMPUTED = ("bos_token_id", "eos_token_ids", "pad_token_id", "max_positions")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only MoE language model. Frozen, hashable, and equal when the contents are.

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
