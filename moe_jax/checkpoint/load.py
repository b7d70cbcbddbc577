"""From a Hugging Face folder to a module, one packed parameter at a time."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from moe_jax.errors import CheckpointError, InvalidArgument
from moe_jax.models.config import ModelConfig
from moe_jax.models.decoder import Decoder, abstract_decoder
from moe_jax.models.families import DTYPES, parse_config
from moe_jax.pallas_kernels.checks import check_float, check_function, check_path, check_switch

from . import names
from .files import (
    CHUNK,
    FLOATS,
    INDEX,
    SINGLE,
    Identity,
    Tensor,
    identity,
    nonfinite,
    opened,
    read_bytes,
    read_folder,
    read_json,
    whole,
)

Progress = Callable[[int, int], object]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a checkpoint folder holds, from its headers alone.

    Attributes:
        config: the model.
        layouts: for each layer, ``"per_expert"`` or ``"fused"``: how its experts are stored.
        tensors: number of tensors that belong to the model.
        nbytes: their bytes in the files.
        dtypes: how many of them there are of each dtype, in safetensors' letters.
        ignored: tensors that are not loaded, and why: draft heads, a tied head's copy, old buffers.
    """

    config: ModelConfig
    layouts: tuple[names.Layout, ...]
    tensors: int
    nbytes: int
    dtypes: tuple[tuple[str, int], ...]
    ignored: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Plan:
    config: ModelConfig
    layouts: list[names.Layout]
    found: dict[str, Tensor]
    sources: dict[names.Path, list[names.Source]]
    ignored: dict[str, str]
    beside: dict[Path, Identity | None]  # which files the rest was read from, but for the tensors' own


def inspect(path: str | Path) -> Report:
    """Check a checkpoint's config and headers, and say what is in it, without reading a tensor.

    Raises:
        CheckpointError: as `load_module`, but for the values.
        InvalidArgument: no path.
    """
    plan = _plan(check_path("inspect", path))
    used = [plan.found[source.name] for sources in plan.sources.values() for source in sources]
    return Report(
        config=plan.config,
        layouts=tuple(plan.layouts),
        tensors=len(used),
        nbytes=sum(tensor.nbytes for tensor in used),
        dtypes=tuple(sorted(Counter(tensor.dtype for tensor in used).items())),
        ignored=tuple(plan.ignored.items()),
    )


def load_module(
    path: str | Path,
    *,
    dtype: Any = None,
    device: jax.Device | jax.sharding.Sharding | None = None,
    progress: Progress | None = None,
    strict: bool = False,
) -> tuple[ModelConfig, Decoder]:
    """Load a decoder from a Hugging Face folder: config.json and safetensors, never pickle.

    Config and headers are checked before any value is read, and every value read is checked to be finite. Host
    memory beyond the model's own stays under its largest packed parameter (an accelerator's) or a few MiB (the
    CPU's, where the arrays filled become the model).

    Args:
        path: the folder.
        dtype: of the parameters: bfloat16, float16 or float32; None keeps the checkpoint's. Parameters that
            the model keeps in f32 stay f32.
        device: where the arrays go; None is JAX's default.
        progress: called with bytes read and bytes in all, from ``(0, total)`` to ``(total, total)``.
        strict: raise, instead of warn, when the folder holds tensors of a draft head, which are not loaded.

    Returns:
        The config (its ``dtype`` that of the parameters) and the module.

    Raises:
        CheckpointError: names the file and tensor or key, what was got and what was wanted. Nothing of a
            failed load stays in memory.
        InvalidArgument: a dtype that parameters cannot have, or an argument of another kind.
    """
    where = "load"
    folder = check_path(where, path)
    asked = None if dtype is None else check_float("load(dtype=…)", "dtype", dtype, DTYPES).name
    if device is not None and not isinstance(device, (jax.Device, jax.sharding.Sharding)):
        wanted = "a jax.Device, a Sharding or None"
        raise InvalidArgument("device", where=where, got=repr(device), wanted=wanted)
    if progress is not None:
        check_function(where, "progress", progress)
    strict = check_switch(where, "strict", strict)
    plan = _plan(folder)
    config = plan.config
    if asked is not None:
        sources = dict(config.sources) | {"dtype": "argument of load"}
        config = replace(config, dtype=asked, sources=tuple(sources.items()))
    _tell_drafts(folder, plan, strict)
    graph, state = nnx.split(abstract_decoder(config))
    return config, nnx.merge(graph, _fill(state, plan, device, progress))


def _plan(folder: Path) -> _Plan:
    """Everything that config and headers tell, checked."""
    if not folder.is_dir():
        raise CheckpointError("checkpoint", where=str(folder), got="no such folder", wanted="a Hugging Face folder")
    folder = whole(folder)
    file, second = folder / "config.json", folder / "generation_config.json"
    beside = {name: identity(name) for name in (file, second, folder / INDEX, folder / SINGLE)}
    raw = read_json(file)
    generation = read_json(second) if second.exists() else None
    config = parse_config(raw, where=str(file), generation=generation)
    found = read_folder(folder)
    if raw.get("dtype") is None and raw.get("torch_dtype") is None:
        config = _dtype_of_files(config, found.values())

    layouts = names.layouts(found, config)
    sources = names.parameter_sources(config, layouts)
    embed, head = sources["embed",][0], names.Source("lm_head.weight", sources["embed",][0].shape)
    ignored = {name: "draft head" for name in found if names.DRAFT.match(name)}
    ignored |= {name: "buffer that the config determines" for name in found if names.BUFFERS.fullmatch(name)}
    if config.tie_embeddings and head.name in found:
        if embed.name in found:
            ignored[head.name] = "copy of the tied embedding"
        else:
            sources["embed",] = [head]
    wanted = {source.name: source.shape for each in sources.values() for source in each}
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted and name not in ignored]
    if missing or extra:
        got = " and ".join(filter(None, (_listed(missing, "missing"), _listed(extra, "unexpected"))))
        raise CheckpointError("tensor names", where=str(folder), got=got, wanted=f"the {len(wanted)} of {file.name}")
    for name, shape in wanted.items():
        tensor = found[name]
        if tensor.shape != shape:
            where = f"{tensor.file}: {name}"
            raise CheckpointError("shape", where=where, got=list(tensor.shape), wanted=list(shape))
        if tensor.dtype not in FLOATS:
            where, letters = f"{tensor.file}: {name}", " or ".join(FLOATS)
            raise CheckpointError("dtype", where=where, got=tensor.dtype, wanted=letters)
    if ignored.get(head.name, "").startswith("copy"):
        _check_tied(found[embed.name], found[head.name], file)
    return _Plan(config, layouts, found, sources, ignored, beside)


def _listed(found: list[str], kind: str) -> str:
    if not found:
        return ""
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"{len(found)} {kind} ({', '.join(found[:8])}{more})"


def _dtype_of_files(config: ModelConfig, tensors: Iterable[Tensor]) -> ModelConfig:
    """A config that does not say: the dtype of most values in the files."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in FLOATS:
            sizes[tensor.dtype] += tensor.nbytes
    if not sizes:
        return config
    sources = dict(config.sources) | {"dtype": "the weight files"}
    return replace(config, dtype=FLOATS[sizes.most_common(1)[0][0]].name, sources=tuple(sources.items()))


def _check_tied(embed: Tensor, head: Tensor, config_file: Path) -> None:
    """A head stored beside the embedding it is tied to must be its copy: transformers versions differ on others."""
    same = embed.dtype == head.dtype and embed.shape == head.shape
    with opened((embed, head), {}) as descriptors:
        buffers = np.empty((2, min(CHUNK, embed.nbytes)), np.uint8)
        for at in range(0, embed.nbytes if same else 0, CHUNK):
            parts = buffers[:, : min(CHUNK, embed.nbytes - at)]
            for part, tensor in zip(parts, (embed, head), strict=True):
                read_bytes(descriptors[tensor.file], tensor, at, part)
            if not np.array_equal(parts[0], parts[1]):
                same = False
                break
    if not same:
        wanted = f"a copy of {embed.name}, or tie_word_embeddings false in {config_file.name}"
        raise CheckpointError("tied head", where=f"{head.file}: {head.name}", got="other contents", wanted=wanted)


def _tell_drafts(folder: Path, plan: _Plan, strict: bool) -> None:
    drafts = [name for name, why in plan.ignored.items() if why == "draft head"]
    if not drafts:
        return
    listed = _listed(drafts, "tensors")
    if strict:
        wanted = "none: draft heads are not loaded (strict)"
        raise CheckpointError("draft head", where=str(folder), got=listed, wanted=wanted)
    # It points at the first caller outside this package, whichever of its functions was called.
    package = str(Path(__file__).parents[1]) + os.sep
    warnings.warn(f"{folder}: draft head not loaded: {listed}", UserWarning, skip_file_prefixes=(package,))


def _fill(state: nnx.State, plan: _Plan, device: Any, progress: Progress | None) -> nnx.State:
    """The state with an array for every abstract value."""
    flat = dict(nnx.to_flat_state(state))
    if set(flat) != set(plan.sources):
        # The decoder and the names disagree: a fault of this package, not of the file.
        raise AssertionError(f"parameters without sources or the reverse: {set(flat) ^ set(plan.sources)}")
    used = [plan.found[source.name] for each in plan.sources.values() for source in each]
    total = sum(tensor.nbytes for tensor in used)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    filled: dict[names.Path, nnx.Variable] = {}
    try:
        with opened(used, plan.beside) as descriptors:
            advance(0)
            for path, sources in plan.sources.items():
                want = flat[path].get_value()
                host = _aligned(want.shape, want.dtype)
                at, parts = 0, host.reshape(-1)
                for source in sources:
                    tensor = plan.found[source.name]
                    size = int(np.prod(source.shape))
                    _read(descriptors[tensor.file], tensor, parts[at : at + size], advance)
                    at += size
                assert at == host.size, path
                # The copy to an accelerator ends before the next parameter's host memory is taken.
                filled[path] = flat[path].replace(jax.block_until_ready(jax.device_put(host, device)))
                del host, parts
    except BaseException:
        # A traceback keeps this frame, and would keep what was loaded.
        filled.clear()
        raise
    return nnx.from_flat_state(filled.items())


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Uninitialised memory that JAX's CPU client takes over instead of copying, which needs 64-byte alignment."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _read(fd: int, tensor: Tensor, out: np.ndarray, advance: Callable[[int], None]) -> None:
    """Read a tensor into a flat array, converting where dtypes differ and refusing NaN and infinity.

    Raises:
        CheckpointError: a value that is not finite, in the file or after conversion, with its index.
    """
    dtype = FLOATS[tensor.dtype]
    step = CHUNK // dtype.itemsize
    staging = None if dtype == out.dtype else np.empty(min(step, out.size), dtype)
    for at in range(0, out.size, step):
        part = out[at : at + step]
        values = part if staging is None else staging[: part.size]
        read_bytes(fd, tensor, at * dtype.itemsize, values)
        bad, wanted = nonfinite(values), "finite values"
        if bad is None and staging is not None:
            with np.errstate(over="ignore"):
                part[...] = values
            bad, wanted = nonfinite(part), f"values within the range of {out.dtype.name}"
        if bad is not None:
            index = [int(i) for i in np.unravel_index(at + bad, tensor.shape)]
            where = f"{tensor.file}: {tensor.name}"
            raise CheckpointError("value", where=where, got=f"{float(values[bad])} at {index}", wanted=wanted)
        advance(values.nbytes)
