"""Bad tensors of a checkpoint: one error naming file, tensor, got and wanted; nothing stays behind."""

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

from checkpoint_files import fuse, random_tensors, shapes, small_config, write_folder
from checkpoint_refusals import GATE, folder, refused
from moe_jax.checkpoint import inspect, load_module
from moe_jax.checkpoint import load as load_file
from moe_jax.checkpoint.files import nonfinite
from moe_jax.errors import CheckpointError

__all__ = ["folder"]


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


def test_a_tied_head_that_is_no_copy(folder):
    raw = small_config("olmoe", tie_word_embeddings=True)
    tensors = random_tensors(raw)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][-1, -1] += 1
    write_folder(folder, raw, tensors)
    refused(folder, "lm_head.weight: tied head: got other contents", "tie_word_embeddings false", read=False)


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
