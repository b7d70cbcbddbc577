"""From a module to a Hugging Face folder, in which at every moment the old checkpoint is whole or the new one.

Several files cannot change places at once, but a folder can. The new checkpoint is written into a folder inside
(``.saving-…``), down to the disk. Renaming that to ``.saved`` is the save: while there is a ``.saved``, it is what
`load` reads. Then its files are linked into their places, each by a rename, and ``.saved`` is taken away. A save that
is broken off in between leaves the rest to the next one. Programs that know no ``.saved`` find no config.json
meanwhile, rather than one beside weights of another model.

A save holds a lock on its ``.saving-…``. The system frees the locks of a killed process, so the next save knows the
folders of dead ones, and takes them away; it does not where the file system has no locks. Machines that save into one
folder must see each other's locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.errors import InvalidArgument
from moe_jax.models.config import ModelConfig
from moe_jax.models.decoder import abstract_decoder
from moe_jax.models.families import config_to_hf
from moe_jax.pallas_kernels.checks import check_choice, check_integer, check_kind, check_path
from moe_jax.tokenizer import TOKENIZER_FILES, Tokenizer

from . import names
from .files import DTYPE_NAMES, INDEX, SAVED, SINGLE, whole

STAGING = ".saving-"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
Part = tuple[names.Path, int, names.Source]  # a tensor: the parameter it is cut from, its first element, name and shape


def save_module(
    config: ModelConfig,
    module: nnx.Module,
    path: str | Path,
    *,
    layout: names.Layout = "per_expert",
    max_shard_bytes: int = 5_000_000_000,
    tokenizer: Tokenizer | Literal["kept"] | None = "kept",
) -> None:
    """Write a decoder as a Hugging Face folder: config.json, generation_config.json and safetensors.

    A save that fails, at any point, leaves the checkpoint that was there or the new one, whole; see the module. Other
    files of the folder are kept: of shards, those that the index of the checkpoint there does not name.

    Args:
        config: the model's config; the parameters' own dtype is the one written.
        module: a `moe_jax.models.decoder.Decoder`.
        path: the folder, made if it is not there; a ``~`` is expanded.
        layout: how experts are stored, see `moe_jax.checkpoint.names`.
        max_shard_bytes: one file up to this size, several with an index above.
        tokenizer: goes with it; None: none does; ``"kept"``: the one of the checkpoint that is there, if any.

    Raises:
        InvalidArgument: an argument of another kind, or a module that the config does not describe.
        CheckpointError: the tokenizer of two checkpoints is to be kept, see `moe_jax.checkpoint.files.whole`.
        OSError: of the file system.
    """
    where = "save_module"
    check_kind(where, "config", config, ModelConfig)
    check_kind(where, "module", module, nnx.Module)
    folder = check_path(where, path)
    check_choice(where, "layout", layout, get_args(names.Layout))
    max_shard_bytes = check_integer(where, "max_shard_bytes", max_shard_bytes, 1)
    if tokenizer not in (None, "kept") and not isinstance(tokenizer, Tokenizer):
        raise InvalidArgument("tokenizer", where=where, got=repr(tokenizer), wanted="a Tokenizer, 'kept' or None")
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

    folder.mkdir(parents=True, exist_ok=True)
    with _staging(folder) as staging:
        new = staging / "new"
        new.mkdir()
        shards = _shards(parts, arrays, max_shard_bytes)
        files = [SINGLE]
        if len(shards) > 1:
            files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
            weight_map = {part[2].name: file for file, shard in zip(files, shards, strict=True) for part in shard}
            size = sum(_nbytes(part, arrays) for part in parts)
            texts = {INDEX: {"metadata": {"total_size": size}, "weight_map": weight_map}} | texts
        for file, shard in zip(files, shards, strict=True):
            _write(new / file, shard, arrays)
        for file, contents in texts.items():
            (new / file).write_text(json.dumps(contents, indent=2) + "\n")
        if isinstance(tokenizer, Tokenizer):
            tokenizer.save(new)
        with _alone(folder):
            if tokenizer == "kept":
                _copy_tokenizer(whole(folder), new)
            for file in new.iterdir():
                _sync(file)
            if (folder / SAVED).exists():
                _move(folder, staging)
            os.utime(new)  # the time of the save, which `whole` compares with that of a config.json
            _sync(new)
            os.rename(new, folder / SAVED)
            _sync(folder)
            _move(folder, staging)


@contextlib.contextmanager
def _alone(folder: Path) -> Generator[bool]:
    """Of several saves into a folder, one at a time moves files; gives False, unguarded, where there are no locks."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        yield _locked(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def _locked(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how)
    except OSError:  # another has it, or the file system has none
        return False
    return True


@contextlib.contextmanager
def _staging(folder: Path) -> Generator[Path]:
    """A new folder inside, locked as long as it is in use. Those of saves that were killed are taken away first."""
    with contextlib.ExitStack() as stack:
        with _alone(folder) as guarded:  # so that no other save finds the new one before it is locked
            if guarded:
                _remove_dead(folder)
            staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=folder))
            stack.callback(shutil.rmtree, staging, ignore_errors=True)
            fd = os.open(staging, os.O_RDONLY)
            stack.callback(os.close, fd)
            _locked(fd, fcntl.LOCK_EX)
        yield staging


def _remove_dead(folder: Path) -> None:
    """Take away what was left by saves that were killed; what cannot be removed stays."""
    for found in folder.glob(STAGING + "*"):
        with contextlib.suppress(OSError):
            fd = os.open(found, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if _locked(fd, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    shutil.rmtree(found, ignore_errors=True)
            finally:
                os.close(fd)


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _sync(path: Path) -> None:
    """Return when a file, or a folder's list of names, is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot do it for folders
            raise
    finally:
        os.close(fd)


def _move(folder: Path, staging: Path) -> None:
    """Bring what was saved to its place, and take away what was there. May be broken off anywhere and begun again."""
    saved, links = folder / SAVED, Path(tempfile.mkdtemp(dir=staging))
    files = {file.name for file in saved.iterdir()}
    (folder / "config.json").unlink(missing_ok=True)
    # In this order: shards go before the index that names them.
    for name in (*_indexed(folder), "generation_config.json", INDEX, SINGLE, *TOKENIZER_FILES):
        if name not in files:
            (folder / name).unlink(missing_ok=True)
    for name in (*sorted(files - {"config.json"}), "config.json"):
        link = links / name
        try:
            os.link(saved / name, link)
        except OSError:  # a file system without links
            shutil.copyfile(saved / name, link)
            status = os.stat(saved / name)
            os.utime(link, ns=(status.st_atime_ns, status.st_mtime_ns))
            _sync(link)
        os.replace(link, folder / name)
    _sync(folder)
    old = tempfile.mkdtemp(dir=staging)
    os.rename(saved, old)
    # While the folder is locked: removing a link changes the file, and `whole` must not take that for another file.
    shutil.rmtree(old, ignore_errors=True)


def _indexed(folder: Path) -> list[str]:
    """Shards that the index of a folder names."""
    try:
        named = json.loads((folder / INDEX).read_text())["weight_map"].values()
        return sorted({name for name in named if _SHARD.fullmatch(name)})
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return []  # there is none, or none that names anything


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
