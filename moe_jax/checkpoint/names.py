"""Which tensors of a Hugging Face checkpoint make up each packed parameter, and in which order.

A packed parameter is its sources laid end to end, row-major: query, key and value rows; gate rows, then up rows;
experts in ascending number. So one ordered list of names and shapes says everything, for loading and for saving.

Layouts of a layer's experts, told apart by names and never by shapes (transformers' conversion_mapping.py):

* ``per_expert``: ``experts.J.gate_proj.weight`` ``[I, H]``, ``up_proj`` ``[I, H]``, ``down_proj`` ``[H, I]``;
  Mixtral writes ``block_sparse_moe.experts.J.w1``, ``w3`` and ``w2`` for them;
* ``fused``: ``experts.gate_up_proj`` ``[E, 2I, H]`` (gate rows, then up rows) and ``experts.down_proj``
  ``[E, H, I]``, as transformers 5 holds them in memory; Mixtral's block is then named ``mlp`` too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

from moe_jax.hf_names import FAMILIES
from moe_jax.models.config import ModelConfig

Layout = Literal["per_expert", "fused"]
Path = tuple[Any, ...]  # of a parameter in an NNX state: attribute names and list positions


class Source(NamedTuple):
    """One tensor of a checkpoint: its name and the shape it must have."""

    name: str
    shape: tuple[int, ...]


# Draft heads for multi-token prediction: extra layers beside the model, not part of it.
DRAFT = re.compile(r"(model\.)?mtp[._]")
# Buffers that old checkpoints carry and the config determines.
BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq")
_FUSED = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")


def layouts(names: Collection[str], config: ModelConfig) -> list[Layout]:
    """Layout of each layer's experts, from the names that are there; a layer without any counts as per-expert."""
    fused = {int(match[1]) for name in names if (match := _FUSED.fullmatch(name))}
    return ["fused" if i in fused else "per_expert" for i in range(config.layers)]


def parameter_sources(config: ModelConfig, layouts: Sequence[Layout]) -> dict[Path, list[Source]]:
    """Sources of every packed parameter of `moe_jax.models.decoder.Decoder`, by the parameter's path."""
    hidden, vocab = config.hidden_size, config.vocab_size
    out: dict[Path, list[Source]] = {("embed",): [Source("model.embed_tokens.weight", (vocab, hidden))]}
    for i, layout in enumerate(layouts):
        prefix = f"model.layers.{i}"
        block = {
            ("attention_norm",): [Source(f"{prefix}.input_layernorm.weight", (hidden,))],
            ("mlp_norm",): [Source(f"{prefix}.post_attention_layernorm.weight", (hidden,))],
            **_attention(config, f"{prefix}.self_attn"),
            **(_moe(config, prefix, layout) if config.moe_layers[i] else _dense(config, f"{prefix}.mlp")),
        }
        out |= {("blocks", i, *path): sources for path, sources in block.items()}
    out["norm",] = [Source("model.norm.weight", (hidden,))]
    if not config.tie_embeddings:
        out["head",] = [Source("lm_head.weight", (vocab, hidden))]
    return out


def _attention(config: ModelConfig, prefix: str) -> dict[Path, list[Source]]:
    hidden, q, kv = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
    rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    out: dict[Path, list[Source]] = {
        ("attention", "qkv"): [Source(f"{prefix}.{name}.weight", (size, hidden)) for name, size in rows.items()],
        ("attention", "out"): [Source(f"{prefix}.o_proj.weight", (hidden, q))],
    }
    if config.qkv_bias:
        out["attention", "qkv_bias"] = [Source(f"{prefix}.{name}.bias", (size,)) for name, size in rows.items()]
    if config.out_bias:
        out["attention", "out_bias"] = [Source(f"{prefix}.o_proj.bias", (hidden,))]
    if config.qk_norm is not None:
        sizes = (config.head_dim, config.head_dim) if config.qk_norm == "head" else (q, kv)
        for name, size in zip(("q_norm", "k_norm"), sizes, strict=True):
            out["attention", name] = [Source(f"{prefix}.{name}.weight", (size,))]
    return out


def _dense(config: ModelConfig, prefix: str) -> dict[Path, list[Source]]:
    assert config.dense_intermediate is not None
    gate_up, down = _gated(prefix, config.hidden_size, config.dense_intermediate)
    return {("mlp", "gate_up"): gate_up, ("mlp", "down"): [down]}


def _gated(
    prefix: str, hidden: int, inner: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[list[Source], Source]:
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return [Source(gate, (inner, hidden)), Source(up, (inner, hidden))], Source(down, (hidden, inner))


def _moe(config: ModelConfig, layer: str, layout: Layout) -> dict[Path, list[Source]]:
    hidden, inner, experts = config.hidden_size, config.moe_intermediate, config.moe.router.experts
    family = FAMILIES[config.family]
    prefix = f"{layer}.{family.block if layout == 'per_expert' else 'mlp'}"
    if layout == "fused":
        gate_up = [Source(f"{prefix}.experts.gate_up_proj", (experts, 2 * inner, hidden))]
        down = [Source(f"{prefix}.experts.down_proj", (experts, hidden, inner))]
    else:
        names = (family.gate, family.up, family.down)
        each = [_gated(f"{prefix}.experts.{j}", hidden, inner, names) for j in range(experts)]
        gate_up = [source for pair, _ in each for source in pair]
        down = [source for _, source in each]
    out: dict[Path, list[Source]] = {
        ("mlp", "router"): [Source(f"{prefix}.gate.weight", (experts, hidden))],
        ("mlp", "gate_up"): gate_up,
        ("mlp", "down"): down,
    }
    if config.shared_intermediate is not None:
        shared_gate_up, shared_down = _gated(f"{prefix}.shared_expert", hidden, config.shared_intermediate)
        out["mlp", "shared_gate_up"] = shared_gate_up
        out["mlp", "shared_down"] = [shared_down]
        out["mlp", "shared_gate"] = [Source(f"{prefix}.shared_expert_gate.weight", (1, hidden))]
    return out
