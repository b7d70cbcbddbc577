"""Small Hugging Face checkpoints for tests, named by hand from transformers' models and not by the code under test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx

LETTERS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "int32": "I32"}
Arrays = dict[str, np.ndarray]


def small_config(family: str, **changes: Any) -> dict[str, Any]:
    """A config.json: H=16, two layers, five experts with I=12, but for the changes."""
    config = {
        "model_type": family,
        "torch_dtype": "bfloat16",
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 20,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "num_local_experts" if family == "mixtral" else "num_experts": 5,
    }
    if family in ("mixtral", "olmoe"):
        config["intermediate_size"] = 12
    else:
        config["moe_intermediate_size"] = 12
    if family == "qwen2_moe":
        config |= {"shared_expert_intermediate_size": 20, "mlp_only_layers": [0]}
    return config | changes


def shapes(config: Mapping[str, Any], *, fused: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a `small_config`."""
    family, h = config["model_type"], config["hidden_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    d = config.get("head_dim", h // heads)
    experts = config.get("num_local_experts", config.get("num_experts"))
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    out = {"model.embed_tokens.weight": (config["vocab_size"], h), "model.norm.weight": (h,)}
    if not config.get("tie_word_embeddings"):
        out["lm_head.weight"] = (config["vocab_size"], h)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        out |= {f"{layer}.{norm}_layernorm.weight": (h,) for norm in ("input", "post_attention")}
        attention = f"{layer}.self_attn"
        for name, size in (("q_proj", heads * d), ("k_proj", kv * d), ("v_proj", kv * d)):
            out[f"{attention}.{name}.weight"] = (size, h)
            if config.get("attention_bias") or family == "qwen2_moe":
                out[f"{attention}.{name}.bias"] = (size,)
        out[f"{attention}.o_proj.weight"] = (h, heads * d)
        if config.get("attention_bias"):
            out[f"{attention}.o_proj.bias"] = (h,)
        if family == "qwen3_moe":
            out |= {f"{attention}.q_norm.weight": (d,), f"{attention}.k_norm.weight": (d,)}
        if family == "olmoe":
            out |= {f"{attention}.q_norm.weight": (h,), f"{attention}.k_norm.weight": (kv * d,)}
        if i in config.get("mlp_only_layers", ()):
            dense = config["intermediate_size"]
            out |= {f"{layer}.mlp.{name}_proj.weight": (dense, h) for name in ("gate", "up")}
            out[f"{layer}.mlp.down_proj.weight"] = (h, dense)
            continue
        mixtral = family == "mixtral" and not fused
        block, names = f"{layer}.mlp", ("gate_proj", "up_proj", "down_proj")
        if mixtral:
            block, names = f"{layer}.block_sparse_moe", ("w1", "w3", "w2")
        out[f"{block}.gate.weight"] = (experts, h)
        if fused:
            out[f"{block}.experts.gate_up_proj"] = (experts, 2 * inner, h)
            out[f"{block}.experts.down_proj"] = (experts, h, inner)
        else:
            for j in range(experts):
                for name, shape in zip(names, ((inner, h), (inner, h), (h, inner)), strict=True):
                    out[f"{block}.experts.{j}.{name}.weight"] = shape
        if family == "qwen2_moe":
            shared = config["shared_expert_intermediate_size"]
            out |= {f"{block}.shared_expert.{name}_proj.weight": (shared, h) for name in ("gate", "up")}
            out[f"{block}.shared_expert.down_proj.weight"] = (h, shared)
            out[f"{block}.shared_expert_gate.weight"] = (1, h)
    return out


def random_tensors(config: Mapping[str, Any], *, dtype: Any = ml_dtypes.bfloat16, fused: bool = False) -> Arrays:
    """Values that differ everywhere and from tensor to tensor."""
    rng = np.random.default_rng(5)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes(config, fused=fused).items()}


def fuse(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> Arrays:
    """The same weights with fused experts, as transformers 5 lays them out in memory."""
    out = {name: a for name, a in tensors.items() if ".experts." not in name}
    if config["model_type"] == "mixtral":
        out = {name.replace(".block_sparse_moe.", ".mlp."): a for name, a in out.items()}
    experts = config.get("num_local_experts", config.get("num_experts"))
    for i in range(config["num_hidden_layers"]):
        if i in config.get("mlp_only_layers", ()):
            continue
        block, names = f"model.layers.{i}.mlp", ("gate_proj", "up_proj", "down_proj")
        if config["model_type"] == "mixtral":
            block, names = f"model.layers.{i}.block_sparse_moe", ("w1", "w3", "w2")
        gate, up, down = (
            np.stack([tensors[f"{block}.experts.{j}.{name}.weight"] for j in range(experts)]) for name in names
        )
        out[f"model.layers.{i}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        out[f"model.layers.{i}.mlp.experts.down_proj"] = down
    return out


def header_of(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The JSON header of a safetensors file with these tensors, one after the other."""
    out: dict[str, Any] = {}
    at = 0
    for name, array in tensors.items():
        offsets = [at, at + array.nbytes]
        out[name] = {"dtype": LETTERS[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        at = offsets[1]
    return out


def write_raw(file: Path, header: Any, data: bytes) -> None:
    """A safetensors file of any header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_file(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A valid safetensors file."""
    write_raw(file, header_of(tensors), b"".join(array.tobytes() for array in tensors.values()))


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], shards: Iterable[Iterable[str]] = ()
) -> Path:
    """A checkpoint of one file, or of one shard for each list of names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number:05}.safetensors"
        part = {name: tensors[name] for name in names}
        write_file(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    if weight_map:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    else:
        write_file(folder / "model.safetensors", tensors)
    return folder


def edit_header(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite a file's header, leaving its data."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    write_raw(file, header, raw[8 + length :])


def arrays_of(module: nnx.Module) -> dict[tuple[Any, ...], np.ndarray]:
    """All parameters of a module by path."""
    return {path: np.asarray(variable.get_value()) for path, variable in nnx.to_flat_state(nnx.state(module))}


def assert_same(ours: nnx.Module, theirs: nnx.Module) -> None:
    """Equal parameters: names, dtypes, shapes and bits."""
    ours_, theirs_ = arrays_of(ours), arrays_of(theirs)
    assert set(ours_) == set(theirs_)
    for path, array in ours_.items():
        assert array.dtype == theirs_[path].dtype, path
        assert array.shape == theirs_[path].shape, path
        assert array.tobytes() == theirs_[path].tobytes(), path
