"""Bad files of a checkpoint: one error naming the file, got and wanted; no byte of a header is trusted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint_files import (
    arrays_of,
    assert_same,
    edit_header,
    header_of,
    random_tensors,
    shapes,
    small_config,
    write_file,
    write_folder,
    write_raw,
)
from checkpoint_refusals import GATE, folder, refused
from moe_jax.checkpoint import load as load_file
from moe_jax.checkpoint import load_module
from moe_jax.checkpoint.files import read_header
from moe_jax.errors import CheckpointError
from moe_jax.models.families import parse_config

__all__ = ["folder"]

Edit = Callable[[Path], Any]


# Faults of one file: a name, what is done to the file, words of the message.
def _entry(name: str, key: str, value: Any) -> Edit:
    return lambda file: edit_header(file, lambda header: header[name].update({key: value}))


def _offsets(by: int, name: str = GATE) -> Edit:
    def change(header: dict[str, Any]) -> None:
        header[name]["data_offsets"] = [at + by for at in header[name]["data_offsets"]]

    return lambda file: edit_header(file, change)


def _cut(by: int) -> Edit:
    return lambda file: file.write_bytes(file.read_bytes()[:by])


LAST = "model.layers.1.mlp.experts.4.down_proj.weight"
FILE_FAULTS: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "empty": (_cut(0), ("header length (truncated, or no safetensors file)", "the file has 0 bytes")),
    "cut in the length": (_cut(5), ("header length", "the file has 5 bytes")),
    "cut in the header": (_cut(99), ("header length (truncated", "the file has 99 bytes")),
    "cut in the data": (_cut(-1), (f"data of {LAST} (file truncated, or offsets out of bounds)", "at least ")),
    "longer": (
        lambda file: file.write_bytes(file.read_bytes() + b"\0"),
        ("size of the file: got ", "where the last tensor ends"),
    ),
    "zeros": (lambda file: file.write_bytes(bytes(999)), ("header length", "got 0, wanted 2 to 991")),
    "a huge header": (lambda file: file.write_bytes(b"\xff" * 99), ("header length", f"got {(1 << 64) - 1}")),
    "no JSON": (lambda file: write_raw(file, b"pickled!", b""), ("header: got Expecting value", "wanted JSON")),
    "no UTF-8": (lambda file: write_raw(file, b"\xff\xff\xff", b""), ("header: got 'utf-8' codec", "wanted JSON")),
    "nested": (lambda file: write_raw(file, b"[" * 99999, b""), ("header: got ", "wanted JSON")),
    "a list": (lambda file: write_raw(file, [1], b""), ("header: got list, wanted a JSON object",)),
    "a key twice": (lambda file: write_raw(file, b'{"a":1,"a":2}', b""), ("header: got the key 'a' twice",)),
    "metadata": (
        lambda file: edit_header(file, lambda header: header.update(__metadata__={"a": 1})),
        ("__metadata__: got {'a': 1}",),
    ),
    "an entry": (
        lambda file: edit_header(file, lambda header: header.update({GATE: [1]})),
        (f"header entry of {GATE}: got [1]",),
    ),
    "an unknown dtype": (
        _entry(GATE, "dtype", "BF17"),
        (f"dtype of {GATE}: got 'BF17', wanted a dtype of the format",),
    ),
    "an unhashable dtype": (_entry(GATE, "dtype", ["BF16"]), (f"dtype of {GATE}: got ['BF16']",)),
    "a negative size": (_entry(GATE, "shape", [-12, -16]), (f"shape of {GATE}: got [-12, -16]",)),
    "a float size": (_entry(GATE, "shape", [12.0, 16]), (f"shape of {GATE}: got [12.0, 16]",)),
    "a boolean size": (_entry(GATE, "shape", [True, 192]), (f"shape of {GATE}: got [True, 192]",)),
    "a size beyond 64 bits": (_entry(GATE, "shape", [1 << 70]), (f"shape of {GATE}: got [11805",)),
    "an overflowing product": (_entry(GATE, "shape", [1 << 62] * 60), (f"data_offsets of {GATE}",)),
    "too many axes": (_entry(GATE, "shape", [1] * 65), (f"number of axes of {GATE}: got 65, wanted at most 64",)),
    "another shape": (
        _entry(GATE, "shape", [12, 17]),
        (f"data_offsets of {GATE}", "wanted 408 bytes, for BF16 [12, 17]"),
    ),
    "another dtype": (_entry(GATE, "dtype", "F32"), (f"data_offsets of {GATE}", "wanted 768 bytes, for F32 [12, 16]")),
    "one offset": (_entry(GATE, "data_offsets", [0]), (f"data_offsets of {GATE}: got [0], wanted a start and an end",)),
    "an end before its start": (_entry(GATE, "data_offsets", [384, 0]), (f"data_offsets of {GATE}: got [384, 0]",)),
    "an overlap": (_offsets(-2), (f"data_offsets of {GATE} (overlap)",)),
    "a hole": (_offsets(2), (f"data_offsets of {GATE} (hole)",)),
    "out of bounds": (_offsets(1 << 40, LAST), (f"data_offsets of {LAST} (hole)",)),
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_faults_of_a_file(fault, folder):
    edit, words = FILE_FAULTS[fault]
    edit(folder / "model.safetensors")
    refused(folder, str(folder / "model.safetensors"), *words, read=False)


def test_tensors_of_every_dtype_of_the_format_may_stand_beside(folder):
    """What is not loaded is still measured."""
    raw = small_config("olmoe")
    tensors = random_tensors(raw)
    header = header_of(tensors)
    at = sum(array.nbytes for array in tensors.values())
    for dtype, bits in {"F4": 4, "F6_E2M3": 6, "U8": 8, "F8_E4M3": 8, "I16": 16, "U32": 32, "I64": 64}.items():
        header[f"mtp.{dtype}"] = {"dtype": dtype, "shape": [4, 2], "data_offsets": [at, at + bits]}
        at += bits
    data = b"".join(array.tobytes() for array in tensors.values())
    write_raw(folder / "model.safetensors", header, data + bytes(at - len(data)))
    with pytest.warns(UserWarning, match="draft head not loaded: 7 tensors"):
        load_module(folder)


# Faults of a folder: what is done to it, words of the message.
def _json(name: str, value: Any) -> Edit:
    return lambda folder: (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


FOLDER_FAULTS: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "no config": (lambda f: (f / "config.json").unlink(), ("config.json: file: got no such file",)),
    "config is no JSON": (_json("config.json", "{"), ("config.json: contents: got Expecting", "wanted JSON")),
    "config is a list": (_json("config.json", [1]), ("config.json: contents: got list, wanted a JSON object",)),
    "unknown family": (
        _json("config.json", {"model_type": "gpt2"}),
        ("model_type: got 'gpt2', wanted one of mixtral",),
    ),
    "generation config": (_json("generation_config.json", "x"), ("generation_config.json: contents: got Expecting",)),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        ("weight files: got neither, wanted model.safetensors",),
    ),
    "only pickle": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        ("weight files: got only pytorch_model.bin (pickle runs code; it is never read)",),
    ),
    "weights are a folder": (
        lambda f: ((f / "model.safetensors").unlink(), (f / "model.safetensors").mkdir()),
        ("model.safetensors: file: got Is a directory",),
    ),
}


@pytest.mark.parametrize("fault", FOLDER_FAULTS)
def test_faults_of_a_folder(fault, folder):
    edit, words = FOLDER_FAULTS[fault]
    edit(folder)
    refused(folder, *words, read=False)


def test_no_folder(tmp_path):
    refused(tmp_path / "absent", "absent: checkpoint: got no such folder", read=False)


def _sharded(folder: Path) -> dict[str, str]:
    raw = small_config("olmoe")
    tensors = random_tensors(raw)
    names = list(tensors)
    (folder / "model.safetensors").unlink()
    write_folder(folder, raw, tensors, [names[:20], names[20:]])
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


INDEX_FAULTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no JSON": ("]", ("contents: got Expecting value",)),
    "no weight_map": ({"metadata": {}}, ("weight_map: got None, wanted tensor names and files",)),
    "weight_map is a list": ({"weight_map": [1]}, ("weight_map: got [1]",)),
    "weight_map is empty": ({"weight_map": {}}, ("weight_map: got {}",)),
    "an absent shard": ("model-00007.safetensors", (f"shard model-00007.safetensors of {GATE}: got no such file",)),
    "the other shard": ("model-00000.safetensors", (f"tensor {GATE}: got it in model-00001.safetensors",)),
    "a path": ("../model-00001.safetensors", (f"file of {GATE}: got '../model-00001.safetensors', wanted a plain",)),
    "an absolute path": ("/etc/passwd", (f"file of {GATE}: got '/etc/passwd', wanted a plain file name",)),
    "a number": (7, (f"file of {GATE}: got 7",)),
}


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_faults_of_an_index(fault, folder):
    weight_map = _sharded(folder)
    load_module(folder)
    value, words = INDEX_FAULTS[fault]
    if isinstance(value, dict) or value == "]":
        _json("model.safetensors.index.json", value)(folder)
    else:
        _json("model.safetensors.index.json", {"weight_map": weight_map | {GATE: value}})(folder)
    refused(folder, *words, read=False)


def test_a_tensor_of_the_index_that_no_shard_has(folder):
    weight_map = _sharded(folder)
    ghost = {"model.ghost.weight": "model-00001.safetensors"}
    _json("model.safetensors.index.json", {"weight_map": weight_map | ghost})(folder)
    refused(folder, "model-00001.safetensors: tensor model.ghost.weight: got no such tensor there", read=False)


def test_a_tensor_in_two_shards(folder):
    _sharded(folder)
    tensors = random_tensors(small_config("olmoe"))
    names = list(tensors)
    write_file(folder / "model-00000.safetensors", {name: tensors[name] for name in [*names[:20], GATE]})
    words = f"tensor {GATE}: got one in model-00000.safetensors and one in model-00001.safetensors, wanted one"
    refused(folder, words, read=False)


def test_a_fault_of_one_shard_names_that_shard(folder):
    _sharded(folder)
    _cut(-2)(folder / "model-00001.safetensors")
    refused(folder, str(folder / "model-00001.safetensors"), "truncated", read=False)


def test_a_file_that_shrinks_while_it_is_read(folder, monkeypatch):
    monkeypatch.setattr(load_file, "CHUNK", 64)

    def shrink(done: int, total: int) -> None:
        if done == 640:
            _cut(-100)(folder / "model.safetensors")

    with pytest.raises(CheckpointError, match=rf"{LAST}: data: got \d+ bytes \(the file shrank") as caught:
        load_module(folder, progress=shrink)
    assert "wanted 384 bytes" in str(caught.value)


def test_headers_are_not_trusted_for_memory(tmp_path):
    """A header that claims a terabyte is refused before anything is allocated."""
    file = tmp_path / "model.safetensors"
    size = 1 << 40
    write_raw(file, {"a": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}, b"")
    with pytest.raises(CheckpointError, match=r"data of a .*got a file of \d+ bytes, wanted at least 1\d+"):
        read_header(file)


SMALL = small_config("olmoe", num_hidden_layers=1, num_experts=2, vocab_size=4)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, Any]:
    folder = write_folder(tmp_path_factory.mktemp("fuzz"), SMALL, random_tensors(SMALL))
    return folder, (folder / "model.safetensors").read_bytes(), load_module(folder)[1]


EDITS = st.lists(
    st.tuples(st.sampled_from(["set", "flip", "delete", "insert"]), st.integers(0, 1 << 20), st.integers(0, 255)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=EDITS, cut=st.none() | st.integers(0, 1 << 20))
def test_bytes_of_the_header_are_never_trusted(edits, cut, valid):
    """Whatever happens to length and header: equal arrays or a `CheckpointError`, nothing else."""
    folder, good, module = valid
    end = 8 + int.from_bytes(good[:8], "little")
    bad = bytearray(good)
    for kind, at, byte in edits:
        at %= end
        if kind == "set":
            bad[at] = byte
        elif kind == "flip":
            bad[at] ^= 1 << (byte % 8)
        elif kind == "delete":
            del bad[at]
        else:
            bad.insert(at, byte)
    if cut is not None:
        del bad[cut % len(bad) :]
    (folder / "model.safetensors").write_bytes(bad)
    try:
        _, loaded = load_module(folder)
    except CheckpointError:
        return
    assert_same(loaded, module)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 1 << 65) | st.floats() | st.text(max_size=5) | st.just("BF16"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(list(shapes(SMALL))), key=st.sampled_from(["dtype", "shape", "data_offsets", ""]), junk=JUNK
)
def test_values_of_the_header_are_never_trusted(name, key, junk, valid):
    folder, good, module = valid
    (folder / "model.safetensors").write_bytes(good)

    def change(header: dict[str, Any]) -> None:
        if key:
            header[name][key] = junk
        else:
            header[name] = junk

    edit_header(folder / "model.safetensors", change)
    try:
        _, loaded = load_module(folder)
    except CheckpointError:
        return
    assert_same(loaded, module)


@settings(max_examples=200, deadline=None)
@given(key=st.sampled_from([*small_config("qwen2_moe"), "rope_scaling", "layer_types", "eos_token_id"]), junk=JUNK)
def test_values_of_a_config_are_never_trusted(key, junk):
    try:
        parse_config(small_config("qwen2_moe", use_sliding_window=True) | {key: junk})
    except CheckpointError:
        return


def test_a_good_file_still_loads(valid):
    folder, good, module = valid
    (folder / "model.safetensors").write_bytes(good)
    loaded = load_module(folder)[1]
    assert_same(loaded, module)
    assert set(arrays_of(loaded)) == set(arrays_of(module))
