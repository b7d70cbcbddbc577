"""safetensors files, read without trusting them: https://github.com/huggingface/safetensors#format.

A file is a length (8 bytes, little-endian), a JSON header of that length with dtype, shape and byte range of each
tensor, and the data, which the ranges cover exactly. The headers are parsed here and the data read with
``preadv`` straight into its final place, rather than through the safetensors package: that gives errors naming
the tensor, one copy instead of two, no resident mapped pages, and an exception instead of SIGBUS when a file
shrinks while it is read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from moe_jax.errors import CheckpointError

# Every dtype is reinterpreted explicitly; the letters are the format's own.
FLOATS = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
DTYPE_NAMES = {dtype: name for name, dtype in FLOATS.items()}
# Bits of an element of every dtype of the format: tensors that are not loaded must still fit their ranges.
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_MAX_HEADER = 100_000_000  # the safetensors package refuses longer ones too
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# A folder inside the checkpoint's own: a checkpoint that was saved whole, and is the one that counts until all its
# files are in their places (`moe_jax.checkpoint.save`).
SAVED = ".saved"
# Bytes handled at a time: small enough for the checks to find them in the cache, large enough for the disk.
CHUNK = 4 << 20


Identity = tuple[int, int, int, int]  # device, inode, bytes and time of the last write: of a file as it is at a time


class Tensor(NamedTuple):
    """Where a tensor lies: file and which it was, dtype in the format's letters, shape, first byte in it, bytes."""

    name: str
    file: Path
    identity: Identity
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def whole(folder: Path) -> Path:
    """Where a folder's checkpoint is: beside its place, after a save that could not move it there.

    Such a save (one that was killed, say) leaves ``.saved``, which counts until the next one. Another program knows
    nothing of that, and the checkpoint that it puts into the folder must not be hidden for ever. So there are two, and
    none is taken, where the folder's own config.json came there after ``.saved``. That is told by the time at which
    the file last changed in any way, because copying programs keep the time of the last write. Links and copies of
    the saved file, which have its size and time of the last write, are the save's own unless written to since.

    Raises:
        CheckpointError: there are two; names both, and says that one has to be deleted.
    """
    saved, file = folder / SAVED, folder / "config.json"
    if not saved.is_dir():
        return folder
    try:
        then = os.stat(saved)  # a save sets its time of the last write
        own = os.stat(file)
    except FileNotFoundError:
        return saved if saved.is_dir() else folder
    kept = identity(saved / file.name)
    placed = kept is not None and kept[2:] == _identity(own)[2:]
    if (own.st_mtime_ns if placed else own.st_ctime_ns) <= then.st_mtime_ns:
        return saved
    if identity(saved) != _identity(then):  # it was moved to its place while this looked
        return whole(folder)
    got = f"two: {saved}, of a save that was broken off, and {file}, which is newer"
    wanted = f"one: delete {SAVED} to load the folder's own files, or that {file.name} to load the saved ones"
    raise CheckpointError("checkpoint", where=str(folder), got=got, wanted=wanted)


def identity(file: Path) -> Identity | None:
    """Of the file there is at present; None where there is none."""
    try:
        return _identity(os.stat(file))
    except OSError:
        return None


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def check_unchanged(files: Mapping[Path, Identity | None]) -> None:
    """Refuse files that are not the ones that they were.

    Raises:
        CheckpointError: names the first.
    """
    for file, then in files.items():
        _check(file, identity(file), then)


def _check(file: Path, now: Identity | None, then: Identity | None) -> None:
    if now != then:
        got, wanted = "one that was replaced or written to meanwhile", "the same until it is loaded"
        raise CheckpointError("file", where=str(file), got=got, wanted=wanted)


def read_json(file: Path) -> dict[str, Any]:
    """Contents of a JSON file that must hold an object; its integers have 64 bits at most."""

    def plain(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, value in pairs:
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, int) and item.bit_length() > 63:
                    got = f"an integer of {item.bit_length()} bits"
                    raise CheckpointError(key, where=str(file), got=got, wanted="at most 64 bits, sign included")
        return dict(pairs)

    try:
        value = json.loads(file.read_bytes(), object_pairs_hook=plain)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError("file", where=str(file), got="no such file", wanted="a JSON file") from None
    except OSError as error:
        raise CheckpointError("file", where=str(file), got=error.strerror, wanted="a readable JSON file") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError("contents", where=str(file), got=str(error), wanted="JSON") from error
    if not isinstance(value, dict):
        raise CheckpointError("contents", where=str(file), got=type(value).__name__, wanted="a JSON object")
    return value


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Headers of all weight files of a checkpoint folder, checked against its index.

    Like transformers, takes ``model.safetensors`` where there is one, else the shards that the index names.
    """
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    index = folder / INDEX
    if not index.exists():
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        got = f"only {', '.join(pickles)} (pickle runs code; it is never read)" if pickles else "neither"
        raise CheckpointError("weight files", where=str(folder), got=got, wanted=f"{SINGLE} or {INDEX}")
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError("weight_map", where=str(index), got=repr(listed)[:80], wanted="tensor names and files")
    found: dict[str, Tensor] = {}
    for shard in _shards(index, listed):
        for name, tensor in read_header(folder / shard).items():
            if name in found:
                got = f"one in {found[name].file.name} and one in {shard}"
                raise CheckpointError(f"tensor {name}", where=str(folder), got=got, wanted="one")
            found[name] = tensor
    for name, shard in listed.items():
        if name not in found or found[name].file.name != shard:
            got = f"it in {found[name].file.name}" if name in found else "no such tensor there"
            raise CheckpointError(f"tensor {name}", where=str(folder / shard), got=got, wanted=f"it, as {INDEX} says")
    return found


def _shards(index: Path, listed: Mapping[str, Any]) -> list[str]:
    shards: dict[str, str] = {}
    for name, shard in listed.items():
        if not isinstance(shard, str) or shard in ("", ".", "..") or set(shard) & set("/\\\0"):
            raise CheckpointError(f"file of {name}", where=str(index), got=repr(shard), wanted="a plain file name")
        shards.setdefault(shard, name)
    for shard, name in shards.items():
        if not (index.parent / shard).exists():
            problem = f"shard {shard} of {name}"
            raise CheckpointError(problem, where=str(index), got="no such file", wanted="a file beside the index")
    return sorted(shards)


def read_header(file: Path) -> dict[str, Tensor]:
    """Tensors of one safetensors file, after checking everything that the header and the file's size tell.

    Raises:
        CheckpointError: truncated, no safetensors file, ranges that do not fit dtype and shape or the file.
    """

    def fail(problem: str, got: object, wanted: object) -> CheckpointError:
        return CheckpointError(problem, where=str(file), got=got, wanted=wanted)

    try:
        with open(file, "rb") as stream:
            status = os.fstat(stream.fileno())
            size = status.st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
                wanted = f"2 to {max(0, min(size - 8, _MAX_HEADER))}: the file has {size} bytes"
                raise fail("header length (truncated, or no safetensors file)", length, wanted)
            text = stream.read(length)
    except OSError as error:
        raise fail("file", error.strerror, "a readable safetensors file") from error
    try:
        header = json.loads(text.decode(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise fail("header", str(error)[:200], "JSON") from error
    if not isinstance(header, dict):
        raise fail("header", type(header).__name__, "a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise fail("__metadata__", repr(metadata)[:80], "texts by name")

    out = {name: _entry(file, _identity(status), name, entry, 8 + length) for name, entry in header.items()}
    # Ranges must follow each other without overlap or hole, and end where the file ends.
    at, before = 8 + length, "the header"
    for tensor in sorted(out.values(), key=lambda tensor: (tensor.start, tensor.nbytes)):
        if tensor.start != at:
            problem = f"data_offsets of {tensor.name} ({'overlap' if tensor.start < at else 'hole'})"
            raise fail(problem, f"a start of {tensor.start - 8 - length}", f"{at - 8 - length}, the end of {before}")
        at, before = at + tensor.nbytes, tensor.name
        if at > size:
            problem = f"data of {tensor.name} (file truncated, or offsets out of bounds)"
            raise fail(problem, f"a file of {size} bytes", f"at least {at}")
    if at != size:
        raise fail("size of the file", f"{size} bytes", f"{at}, where the last tensor ends")
    return out


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in out if names.count(name) > 1)!r} twice")
    return out


def _entry(file: Path, identity: Identity, name: str, entry: Any, data: int) -> Tensor:
    def fail(problem: str, got: object, wanted: object) -> CheckpointError:
        return CheckpointError(f"{problem} of {name}", where=str(file), got=repr(got)[:80], wanted=wanted)

    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or set(entry) != keys:
        raise fail("header entry", entry, f"an object with {', '.join(sorted(keys))}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise fail("dtype", dtype, "a dtype of the format: " + ", ".join(_BITS))
    for problem, value in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 1 << 63 for item in value):
            raise fail(problem, value, "a list of integers, none negative")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fail("data_offsets", offsets, "a start and an end")
    if len(shape) > 64:  # as many as NumPy has, and a product that can be printed
        raise fail("number of axes", len(shape), "at most 64")
    bits = _BITS[dtype] * math.prod(shape)
    if bits != 8 * (offsets[1] - offsets[0]):
        raise fail("data_offsets", offsets, f"{bits // 8} bytes, for {dtype} {shape}")
    return Tensor(name, file, identity, dtype, tuple(shape), data + offsets[0], offsets[1] - offsets[0])


@contextmanager
def opened(tensors: Iterable[Tensor], beside: Mapping[Path, Identity | None]) -> Generator[Mapping[Path, int]]:
    """Opens the files that tensors lie in and closes them all at the end: gives their descriptors.

    A file that is replaced from now on is read as it was. What was replaced before, since its header was read, or is
    written to until the end, is refused: half of one checkpoint and half of another may look like one.

    Args:
        beside: other files that were read, and which they were.

    Raises:
        CheckpointError: a file is not the one that it was, or cannot be opened.
    """
    seen = {tensor.file: tensor.identity for tensor in tensors}
    held: dict[Path, int] = {}

    try:
        for file in seen:
            try:
                held[file] = os.open(file, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError("file", where=str(file), got=error.strerror, wanted="a readable file") from error
        check_unchanged(beside)
        for file, fd in held.items():
            _check(file, _identity(os.fstat(fd)), seen[file])
        yield held
        for file, fd in held.items():
            _check(file, _identity(os.fstat(fd)), seen[file])
    finally:
        for fd in held.values():
            os.close(fd)


def read_bytes(fd: int, tensor: Tensor, at: int, out: np.ndarray) -> None:
    """Fill a contiguous array with a tensor's bytes from offset ``at`` on."""
    view, done = out.reshape(-1).view(np.uint8).data, 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], tensor.start + at + done)
        except OSError as error:
            where = f"{tensor.file}: {tensor.name}"
            raise CheckpointError("data", where=where, got=error.strerror, wanted="readable bytes") from error
        if count == 0:
            where, got = f"{tensor.file}: {tensor.name}", f"{at + done} bytes (the file shrank while it was read)"
            raise CheckpointError("data", where=where, got=got, wanted=f"{tensor.nbytes} bytes")
        done += count


def nonfinite(values: np.ndarray) -> int | None:
    """Position of the first NaN or infinity of a flat bf16, f16 or f32 array, or None.

    A float is not finite when its exponent bits are all ones. Read as signed integers, such positive values are
    above every other value; read as unsigned, such negative ones are: two maxima decide, without a temporary array.
    """
    if not values.size:
        return None
    limit = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}[values.dtype.name]
    bits = 8 * values.dtype.itemsize
    signed, unsigned = values.view(f"i{bits // 8}"), values.view(f"u{bits // 8}")
    if signed.max() < limit and unsigned.max() < limit + (1 << (bits - 1)):
        return None
    return int(np.argmax((unsigned & limit) == limit))
