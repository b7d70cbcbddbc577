"""Bad checkpoints: one error naming file, tensor, got and wanted; nothing stays behind."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint_files import (
    arrays_of,
    assert_same,
    edit_header,
    fuse,
    header_of,
    random_tensors,
    shapes,
    small_config,
    write_file,
    write_folder,
    write_raw,
)
from moe_jax.checkpoint import inspect, load_module
from moe_jax.checkpoint import load as load_file
from moe_jax.checkpoint.files import nonfinite, read_header
from moe_jax.errors import CheckpointError
from moe_jax.models.families import parse_config

GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
Edit = Callable[[Path], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    raw = small_config("olmoe")
    return write_folder(tmp_path / "model", raw, random_tensors(raw))


def refused(folder: Path, *words: str, read: bool = True) -> CheckpointError:
    """The error of loading; with every word in its message, and found before any tensor is read unless ``read``."""
    seen: list[int] = []
    with pytest.raises(CheckpointError) as caught:
        load_module(folder, progress=lambda done, total: seen.append(done))
    message = str(caught.value)
    for word in (*words, "got ", "wanted "):
        assert word in message
    assert seen == [] or read
    return caught.value


def retensor(
    folder: Path, change: Callable[[dict[str, np.ndarray]], Any], config: dict[str, Any] | None = None
) -> None:
    raw = small_config("olmoe") if config is None else config
    tensors = random_tensors(raw)
    change(tensors)
    write_folder(folder, raw, tensors)


def test_C90_a_renamed_key_is_named(folder):
    retensor(folder, lambda t: t.update({"model.layers.1.mlp.experts.3.gate.weight": t.pop(GATE)}))
    got = refused(folder, str(folder), read=False).got
    assert got == f"1 missing ({GATE}) and 1 unexpected (model.layers.1.mlp.experts.3.gate.weight)"


def test_C90_a_missing_expert_is_named(folder):
    lost = [f"model.layers.0.mlp.experts.4.{name}_proj.weight" for name in ("gate", "up", "down")]
    retensor(folder, lambda t: [t.pop(name) for name in lost])
    assert refused(folder, read=False).got == f"3 missing ({', '.join(lost)})"


def test_C90_an_extra_expert_is_named(folder):
    extra = [f"model.layers.0.mlp.experts.5.{name}_proj.weight" for name in ("gate", "up", "down")]
    retensor(folder, lambda t: t.update({name: t[name.replace("5", "4")] for name in extra}))
    assert refused(folder, read=False).got == f"3 unexpected ({', '.join(extra)})"


def test_C90_both_layouts_in_one_layer_are_too_much(folder):
    raw = small_config("olmoe")
    tensors = random_tensors(raw)
    write_folder(folder, raw, tensors | fuse(tensors, raw))
    assert "30 unexpected" in refused(folder, "and 22 more", read=False).got


def test_many_missing_tensors_are_counted(folder):
    edit = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 40}
    (folder / "config.json").write_text(json.dumps(edit))
    assert refused(folder, f"and {38 * 24 - 8} more", read=False).got.startswith(f"{38 * 24} missing (model.layers.2.")


def test_a_layout_is_not_guessed_when_half_of_it_is_there(folder):
    raw = small_config("olmoe")
    tensors = fuse(random_tensors(raw), raw)
    del tensors["model.layers.0.mlp.experts.down_proj"]
    write_folder(folder, raw, tensors)
    assert refused(folder, read=False).got == "1 missing (model.layers.0.mlp.experts.down_proj)"


def test_wrong_shape(folder):
    retensor(folder, lambda t: t.update({GATE: t[GATE].T.copy()}))
    refused(folder, "model.safetensors", GATE, "shape: got [16, 12], wanted [12, 16]", read=False)


def test_fused_experts_transposed_are_refused_by_their_shape(folder):
    raw = small_config("olmoe")
    tensors = fuse(random_tensors(raw), raw)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[name] = np.ascontiguousarray(tensors[name].transpose(0, 2, 1))
    write_folder(folder, raw, tensors)
    refused(folder, name, "shape: got [5, 16, 24], wanted [5, 24, 16]", read=False)


@pytest.mark.parametrize("dtype", [np.float64, np.int32])
def test_wrong_dtype(dtype, folder):
    retensor(folder, lambda t: t.update({GATE: t[GATE].astype(dtype)}))
    refused(folder, "model.safetensors", GATE, "dtype: got ", "wanted BF16 or F16 or F32", read=False)


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


def test_C107_draft_heads_are_counted_and_refused_when_strict(folder):
    names = [f"mtp.layers.0.mlp.experts.{j}.{x}_proj.weight" for j in range(4) for x in ("gate", "up", "down")]
    names.append("model.mtp.fc.weight")
    retensor(folder, lambda t: t.update(dict.fromkeys(names, np.zeros((3, 2), ml_dtypes.bfloat16))))
    report = inspect(folder)
    assert dict(report.ignored) == dict.fromkeys(names, "draft head")
    assert report.tensors == len(shapes(small_config("olmoe")))
    with pytest.warns(UserWarning, match="draft head") as caught:
        load_module(folder)
    (warning,) = caught
    assert warning.filename == __file__
    wanted = f"{folder}: draft head not loaded: 13 tensors ({', '.join(names[:8])} and 5 more)"
    assert str(warning.message) == wanted
    with pytest.raises(CheckpointError, match=r"draft head: got 13 tensors .*, wanted none: .*strict"):
        load_module(folder, strict=True)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_C39_values_that_are_not_finite_are_named(dtype, value, folder):
    raw = small_config("olmoe")
    tensors = random_tensors(raw, dtype=dtype)
    tensors[GATE][5, 9] = value
    tensors[GATE][11, 15] = value  # only the first is named
    write_folder(folder, raw, tensors)
    for asked in ("bfloat16", "float32"):
        with pytest.raises(
            CheckpointError, match=r"value: got -?(nan|inf) at \[5, 9\], wanted finite values"
        ) as caught:
            load_module(folder, dtype=asked)
        assert caught.value.where == f"{folder / 'model.safetensors'}: {GATE}"


def test_C39_a_scale_of_nan_is_named(folder):
    """The scales of the formats read here are those of the norms; also in a chunk that is not the first."""
    raw = small_config("olmoe", hidden_size=16)
    tensors = random_tensors(raw)
    tensors["model.norm.weight"][7] = np.nan
    write_folder(folder, raw, tensors)
    refused(folder, "model.norm.weight: value: got nan at [7], wanted finite values")


def test_C39_the_index_is_right_in_every_chunk(folder, monkeypatch):
    monkeypatch.setattr(load_file, "CHUNK", 64)
    for index in ((0, 0), (1, 15), (2, 0), (11, 15)):
        retensor(folder, lambda t, index=index: t[GATE].__setitem__(index, np.inf))
        refused(folder, f"{GATE}: value: got inf at {list(index)}, ")


def test_values_beyond_the_dtype_asked_for_are_named(folder):
    raw = small_config("olmoe", torch_dtype="float16")
    tensors = random_tensors(raw, dtype=np.float32)
    tensors[GATE][0, 3] = 65504.0
    write_folder(folder, raw, tensors)
    load_module(folder)
    tensors[GATE][2, 3] = 7e4
    write_folder(folder, raw, tensors)
    refused(folder, f"{GATE}: value: got 70000.0 at [2, 3], wanted values within the range of float16")
    load_module(folder, dtype="bfloat16")


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_nonfinite_agrees_with_numpy_on_every_value(dtype):
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    finite = np.isfinite(values)
    assert nonfinite(values[finite]) is None
    for value in values[~finite]:
        array = np.concatenate([values[finite], value[None], values[finite]])
        assert nonfinite(array) == finite.sum()
    assert nonfinite(values[:0]) is None


def test_nonfinite_at_the_edges_of_f32():
    largest, smallest = np.finfo(np.float32).max, np.float32(1e-45)
    for value in (
        np.nan,
        np.inf,
        -np.inf,
        np.uint32(0xFFFFFFFF).view(np.float32),
        np.uint32(0x7F800001).view(np.float32),
    ):
        assert nonfinite(np.array([largest, -largest, smallest, -0.0, value], np.float32)) == 4
    assert nonfinite(np.array([largest, -largest, smallest, -smallest, -0.0], np.float32)) is None


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


def test_a_tied_head_that_is_no_copy(folder):
    raw = small_config("olmoe", tie_word_embeddings=True)
    tensors = random_tensors(raw)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][-1, -1] += 1
    write_folder(folder, raw, tensors)
    refused(folder, "lm_head.weight: tied head: got other contents", "tie_word_embeddings false", read=False)


def test_a_file_that_shrinks_while_it_is_read(folder, monkeypatch):
    monkeypatch.setattr(load_file, "CHUNK", 64)

    def shrink(done: int, total: int) -> None:
        if done == 640:
            _cut(-100)(folder / "model.safetensors")

    with pytest.raises(CheckpointError, match=rf"{LAST}: data: got \d+ bytes \(the file shrank") as caught:
        load_module(folder, progress=shrink)
    assert "wanted 384 bytes" in str(caught.value)


def test_nothing_of_a_failed_load_stays(folder):
    raw = small_config("olmoe")
    tensors = random_tensors(raw)
    tensors["lm_head.weight"][-1, -1] = np.nan  # the last to be read
    write_folder(folder, raw, tensors)
    gc.collect()
    before = len(jax.live_arrays())
    with pytest.raises(CheckpointError) as caught:
        load_module(folder)
    assert caught.tb is not None  # the traceback is held, as an interactive session does
    assert len(jax.live_arrays()) == before
    open_files = {Path(link).resolve() for link in Path("/proc/self/fd").iterdir() if link.exists()}
    assert folder / "model.safetensors" not in open_files


def test_an_error_of_the_progress_function_reaches_the_caller(folder):
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_module(folder, progress=stop)


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
