"""Where a model comes from: a folder, the package itself or a Hugging Face repository; and onto which device."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from .checkpoint import load_module
from .checkpoint.files import check_unchanged, identity, whole
from .errors import CheckpointError, InvalidArgument
from .model import Model
from .tokenizer import TOKENIZER_FILES, Tokenizer

_REPOSITORY = re.compile(r"(?!\.\.?/)[\w.-]+/(?!\.\.?$)[\w.-]+")  # no part is . or ..
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer*", "chat_template.jinja"]


def load(
    path: str | Path | None = None,
    *,
    dtype: Any = None,
    device: str | jax.Device | None = None,
    progress: Callable[[int, int], None] | None = None,
    strict: bool = False,
) -> Model:
    """Load a model from a Hugging Face folder.

    Args:
        path: the folder; None takes the small model shipped with this package. A repository id ``"org/name"`` that
            is no folder here comes from the local Hugging Face cache, or is downloaded into it (extra ``hub``).
        dtype: of the parameters; None keeps the checkpoint's.
        device: ``"cpu"``, ``"cuda"`` (or ``"gpu"``) or a `jax.Device`; None takes JAX's default.
        progress: called with (bytes done, bytes in all) while weights load.
        strict: raise, instead of warn, when the folder holds tensors of a draft head, which are not loaded.

    Raises:
        CheckpointError: the folder is no checkpoint that can be loaded, or another was saved there before the end;
            says which file and why.
        InvalidArgument: no such folder or device, a repository that cannot be had, or a dtype parameters cannot have.
    """
    place = checkpoint_folder(path)
    on = _device(device)
    folder = whole(place)
    read = {folder / name: identity(folder / name) for name in TOKENIZER_FILES}
    tokenizer = Tokenizer.from_folder(folder)
    try:
        config, module = load_module(folder, dtype=dtype, device=on, progress=progress, strict=strict)
    except CheckpointError as error:
        if folder != place or (folder / "config.json").exists():
            raise
        got, wanted = "a folder without config.json", "a Hugging Face folder: config.json, and weights in safetensors"
        raise CheckpointError("no checkpoint", where=str(folder), got=got, wanted=wanted) from error
    # The tokenizer is that of the weights if none was saved meanwhile. A save shows first in where the checkpoint is,
    # then in the files of that place, so they are looked at in this order.
    if whole(place) != folder:
        got, wanted = "another checkpoint, saved meanwhile", "the same until it is loaded"
        raise CheckpointError("folder", where=str(place), got=got, wanted=wanted)
    check_unchanged(read)
    return Model(config, module, tokenizer)


def _device(device: str | jax.Device | None) -> jax.Device | None:
    if device is None or isinstance(device, jax.Device):
        return device
    if device not in ("cpu", "cuda", "gpu"):
        raise InvalidArgument("device", where="load", got=repr(device), wanted="'cpu', 'cuda', 'gpu' or a jax.Device")
    try:
        return jax.local_devices(backend="cpu" if device == "cpu" else "cuda")[0]
    except RuntimeError as error:
        present = sorted({d.platform for d in jax.local_devices()})
        raise InvalidArgument(
            f"no {device} device (`moe-jax doctor` says why)",
            where="load(device=…)",
            got=f"{', '.join(present)}; JAX says: {error}",
            wanted="a CUDA device that JAX can use, or device='cpu'",
        ) from error


def checkpoint_folder(path: str | Path | None) -> Path:
    """The folder that `load` reads: the shipped model's, the one named, or a repository's in the local cache."""
    if path is None:
        return Path(__file__).parent / "assets" / "tiny_moe"
    if not isinstance(path, (str, Path)) or not str(path) or "\0" in str(path):
        raise InvalidArgument("model", where="load", got=repr(path), wanted="a folder, a repository id, or None")
    folder = Path(os.path.expanduser(path))  # leaves the ~ of an unknown user, where Path.expanduser raises
    if folder.is_dir():
        return folder
    wanted = "a checkpoint folder, or a repository id 'org/name'"
    if isinstance(path, str) and _REPOSITORY.fullmatch(path):
        first = path.split("/")[0]
        if not Path(first).is_dir():
            return _from_hub(path)
        wanted = f"a checkpoint folder ({first!r} is a folder here, so this is taken for a path, not for a repository)"
    problem = "a file, not a folder" if folder.is_file() else "no such folder"
    raise InvalidArgument(problem, where="load", got=repr(str(path)), wanted=wanted)


def _from_hub(repository: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise InvalidArgument(
            "a repository id needs huggingface_hub",
            where="load",
            got=repr(repository),
            wanted="`pip install 'moe-jax[hub]'`, or a checkpoint folder",
        ) from error

    def snapshot(**options: Any) -> Path:
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES, **options))

    try:
        with contextlib.suppress(LocalEntryNotFoundError):
            cached = snapshot(local_files_only=True)
            if _complete(cached):
                return cached
        return snapshot()
    except Exception as error:  # network, permission and naming errors have no common base
        raise InvalidArgument(
            "cannot get the repository",
            where="load",
            got=f"{repository!r}: {type(error).__name__}: {error}",
            wanted="a repository in the local cache or on the hub, or a checkpoint folder",
        ) from error


def _complete(folder: Path) -> bool:
    """Whether a cached snapshot has its config and all the weight files that its index names."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            weights = all((folder / name).is_file() for name in names)
        except (ValueError, KeyError, TypeError, AttributeError):  # cut off, or no index at all
            return False
    else:
        weights = any(folder.glob("*.safetensors"))
    return weights and (folder / "config.json").is_file()
