"""From a module to a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.errors import InvalidArgument
from moe_jax.models.config import ModelConfig
from moe_jax.models.decoder import abstract_decoder
from moe_jax.models.families import config_to_hf

from . import names
from .files import DTYPE_NAMES, INDEX, SINGLE

Part = tuple[names.Path, int, names.Source]  # a tensor: the parameter it is cut from, its first element, name and shape


def save_module(
    config: ModelConfig,
    module: nnx.Module,
    path: str | Path,
    *,
    layout: names.Layout = "per_expert",
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a decoder as a Hugging Face folder: config.json, generation_config.json and safetensors.

    Everything is first written beside its place and moved when complete, config.json last, so that a save which
    fails leaves the checkpoint that was there, or none that looks whole. Other files of the folder are kept.

    Args:
        config: the model's config; the parameters' own dtype is the one written.
        module: a `moe_jax.models.decoder.Decoder`.
        path: the folder, made if it is not there.
        layout: how experts are stored, see `moe_jax.checkpoint.names`.
        max_shard_bytes: one file up to this size, several with an index above.

    Raises:
        InvalidArgument: a layout there is not, or a module that the config does not describe.
    """
    where = "save_module"
    if layout not in ("per_expert", "fused"):
        raise InvalidArgument("layout", where=where, got=repr(layout), wanted="'per_expert' or 'fused'")
    arrays: dict[names.Path, Any] = {tuple(p): v.get_value() for p, v in nnx.to_flat_state(nnx.state(module))}
    sources = names.parameter_sources(config, [layout] * config.layers)
    if set(arrays) != set(sources):
        got = sorted(map(str, set(arrays) ^ set(sources)))
        raise InvalidArgument("parameters in one of module and config only", where=where, got=got, wanted="none")
    described = nnx.to_flat_state(nnx.state(abstract_decoder(config)))
    shapes = {tuple(p): v.get_value().shape for p, v in described}
    parts: list[Part] = []
    for key, each in sources.items():
        start = 0
        for source in each:
            parts.append((key, start, source))
            start += int(np.prod(source.shape))
        if arrays[key].shape != shapes[key] or np.dtype(arrays[key].dtype) not in DTYPE_NAMES:
            got = f"{arrays[key].dtype.name} {list(arrays[key].shape)}"
            wanted = f"{list(shapes[key])} of {' or '.join(dtype.name for dtype in DTYPE_NAMES)}"
            raise InvalidArgument(f"parameter {key}", where=where, got=got, wanted=wanted)
    config = replace(config, dtype=arrays["embed",].dtype.name)
    texts = {"generation_config.json": _generation(config), "config.json": config_to_hf(config)}

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        shards = _shards(parts, arrays, max_shard_bytes)
        files = [SINGLE]
        if len(shards) > 1:
            files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
            weight_map = {part[2].name: file for file, shard in zip(files, shards, strict=True) for part in shard}
            size = sum(_nbytes(part, arrays) for part in parts)
            texts = {INDEX: {"metadata": {"total_size": size}, "weight_map": weight_map}} | texts
        for file, shard in zip(files, shards, strict=True):
            _write(staging / file, shard, arrays)
        for file, contents in texts.items():
            (staging / file).write_text(json.dumps(contents, indent=2) + "\n")
        # Without config.json the folder is no checkpoint: it goes first and comes back last.
        shard = "model-" + "[0-9]" * 5 + "-of-" + "[0-9]" * 5 + ".safetensors"
        for old in ("config.json", INDEX, SINGLE, *(file.name for file in folder.glob(shard))):
            (folder / old).unlink(missing_ok=True)
        for file in (*files, *texts):
            os.replace(staging / file, folder / file)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _generation(config: ModelConfig) -> dict[str, Any]:
    eos = config.eos_token_ids
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "pad_token_id": config.pad_token_id,
    }


def _nbytes(part: Part, arrays: Mapping[names.Path, Any]) -> int:
    return int(np.prod(part[2].shape)) * np.dtype(arrays[part[0]].dtype).itemsize


def _shards(parts: list[Part], arrays: Mapping[names.Path, Any], limit: int) -> list[list[Part]]:
    """Parts in order, a new shard where the next would not fit."""
    shards: list[list[Part]] = [[]]
    size = 0
    for part in parts:
        nbytes = _nbytes(part, arrays)
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += nbytes
    return shards


def _write(file: Path, parts: list[Part], arrays: Mapping[names.Path, Any]) -> None:
    """One safetensors file; one parameter at a time is on the host."""
    # Wider dtypes first, so that every tensor is aligned for its own.
    parts = sorted(parts, key=lambda part: -np.dtype(arrays[part[0]].dtype).itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for part in parts:
        end = at + _nbytes(part, arrays)
        dtype = DTYPE_NAMES[np.dtype(arrays[part[0]].dtype)]
        header[part[2].name] = {"dtype": dtype, "shape": list(part[2].shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        held: tuple[names.Path, np.ndarray] | None = None
        for key, start, source in parts:
            if held is None or held[0] != key:
                held = (key, _on_host(arrays[key]).reshape(-1))
            values = held[1][start : start + int(np.prod(source.shape))]
            stream.write(values.view(np.uint8).data)


def _on_host(array: jax.Array) -> np.ndarray:
    """Values of an array. JAX keeps the host copy of an accelerator's array with it, so that of a copy is taken."""
    cpu = all(device.platform == "cpu" for device in array.devices())
    return np.ascontiguousarray(array if cpu else jnp.copy(array))
