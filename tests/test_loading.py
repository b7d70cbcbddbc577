"""`moe_jax.load`: folders, the shipped model, repositories, devices."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import moe_jax
from checkpoint_files import random_tensors, small_config, write_folder
from moe_jax import loading
from moe_jax.errors import CheckpointError, InvalidArgument
from moe_jax.loading import checkpoint_folder, load
from moe_jax.model import Model
from moe_jax.models.config import ModelConfig
from moe_jax.tokenizer import Tokenizer
from test_tokenizer import CONFIG, TEMPLATE, byte_tokenizer
from tiny_models import tiny_config, tiny_module


def test_load_puts_the_parts_together(tmp_path, monkeypatch):
    config = tiny_config("qwen3_moe", vocab_size=258, eos_token_ids=(1,))
    seen: dict[str, object] = {}

    def load_module(path, **options) -> tuple[ModelConfig, nnx.Module]:
        seen.update(options, path=path)
        return config, tiny_module(config)

    monkeypatch.setattr(loading, "load_module", load_module)
    Tokenizer(byte_tokenizer(), CONFIG).save(tmp_path)
    model = load(tmp_path, dtype="bfloat16", device="cpu")
    assert seen == {
        "path": tmp_path,
        "dtype": "bfloat16",
        "device": jax.devices("cpu")[0],
        "progress": None,
        "strict": False,
    }
    assert model.config == config
    assert model.tokenizer is not None
    load()
    assert str(seen["path"]).endswith("moe_jax/assets/tiny_moe") and seen["device"] is None
    with pytest.raises(InvalidArgument, match="device: got 'tpu', wanted 'cpu', 'cuda'"):
        load(tmp_path, device="tpu")
    load(tmp_path, strict=True)
    assert seen["strict"] is True


@pytest.mark.parametrize("path", [3, b"x", [], "", "a\0b"])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(InvalidArgument, match=r"^load: model: got .*, wanted a folder, a repository id, or None"):
        load(path)


def test_load_says_that_there_is_no_gpu(tmp_path):
    if jax.default_backend() != "cpu":
        pytest.skip("this machine has one")
    with pytest.raises(InvalidArgument, match=r"no cuda device .*: got cpu; .*wanted a CUDA device"):
        load(tmp_path, device="cuda")


class Hub:
    """Stands in for huggingface_hub: a cache folder, and what its download raises or brings."""

    def __init__(self, cache: Path):
        self.cache = cache
        self.calls: list[bool] = []
        self.error: Exception | None = None

    def snapshot_download(self, repository: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        assert "*.safetensors" in allow_patterns and "*" not in allow_patterns
        self.calls.append(local_files_only)
        if self.error is not None:
            raise self.error
        if not any(self.cache.iterdir()):
            raise LocalEntryNotFoundError
        return str(self.cache)


class LocalEntryNotFoundError(Exception):
    pass


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Hub:
    """A fake hub; the working directory is another, empty folder."""
    for name in ("cache", "work"):
        (tmp_path / name).mkdir()
    fake = Hub(tmp_path / "cache")
    errors = types.SimpleNamespace(LocalEntryNotFoundError=LocalEntryNotFoundError)
    module = types.SimpleNamespace(snapshot_download=fake.snapshot_download, errors=errors)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    monkeypatch.chdir(tmp_path / "work")
    return fake


def test_repository_ids_come_from_the_cache_first(hub, monkeypatch):
    with pytest.raises(InvalidArgument, match="cannot get the repository: got 'org/name'"):
        checkpoint_folder("org/name")
    assert hub.calls == [True, False]
    (hub.cache / "config.json").write_text("{}")
    index = hub.cache / "model.safetensors.index.json"
    whole = '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'
    (hub.cache / "1.safetensors").write_text("")
    # A shard is missing from the cache, or the index is cut off or none.
    for text in (whole, whole[:20], "", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        hub.calls.clear()
        assert checkpoint_folder("org/name") == hub.cache
        assert hub.calls == [True, False], text
    index.write_text(whole)
    (hub.cache / "2.safetensors").write_text("")
    hub.calls.clear()
    assert checkpoint_folder("org/name") == hub.cache
    assert hub.calls == [True]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InvalidArgument, match=r"moe-jax\[hub\]"):
        checkpoint_folder("org/name")


@pytest.mark.parametrize("error", [ValueError("Cannot have -- or .. in repo_id"), OSError("no network")])
def test_every_failure_of_the_hub_is_an_invalid_argument(error, hub):
    hub.error = error  # from the look into the cache already
    with pytest.raises(InvalidArgument, match=f"cannot get the repository: got 'a/b--c': .*{error}, wanted a repo"):
        checkpoint_folder("a/b--c")
    assert hub.calls == [True]


@pytest.mark.parametrize(
    "path",
    ["/nowhere", "nothing", "../nothing", "./nothing", "org/..", "org/.", "~/no/such", "~nobody-here/x", "a/b/c"],
)
def test_paths_are_not_taken_for_repositories(path, hub):
    with pytest.raises(InvalidArgument, match=f"no such folder: got '{path}', wanted a checkpoint folder, or"):
        checkpoint_folder(path)
    assert hub.calls == []


def test_a_file_is_named_as_one(hub):
    with pytest.raises(InvalidArgument, match="load: a file, not a folder"):
        checkpoint_folder(__file__)
    assert hub.calls == []


def test_a_folder_without_a_config_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint: got a folder without config\.json, wanted a Hugging"):
        moe_jax.load(tmp_path)


def test_a_path_through_a_folder_that_is_here_is_not_a_repository(hub):
    Path("models").mkdir()
    with pytest.raises(
        InvalidArgument, match=r"no such folder: got 'models/nothing', wanted .*'models' is a folder here"
    ):
        checkpoint_folder("models/nothing")
    with pytest.raises(InvalidArgument, match="no such folder"):
        checkpoint_folder(Path("org/name"))
    assert hub.calls == []


@pytest.mark.parametrize("dtype", ["nonsense", 5, "int32", {"names": ["a"], "formats": []}])
def test_a_dtype_that_is_none_is_refused(dtype):
    with pytest.raises(InvalidArgument, match=r"dtype: got .*, wanted bfloat16 or float16 or float32") as caught:
        load(dtype=dtype)
    assert (str(dtype) if isinstance(dtype, str) else repr(dtype)) in str(caught.value)


def test_C107_a_draft_head_is_told_to_the_caller_of_load(tmp_path):
    raw = small_config("olmoe")
    tensors = random_tensors(raw) | {"mtp.fc.weight": np.zeros((3, 2), np.float32)}
    write_folder(tmp_path, raw, tensors)
    with pytest.warns(UserWarning, match="draft head not loaded") as caught:
        moe_jax.load(tmp_path)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(CheckpointError, match=r"draft head: got 1 tensors .*strict"):
        moe_jax.load(tmp_path, strict=True)


def test_saving_over_another_model_leaves_nothing_of_its_tokenizer(tmp_path):
    config = tiny_config("olmoe", vocab_size=258)
    chatty = Tokenizer(byte_tokenizer(), CONFIG, TEMPLATE)
    Model(config, tiny_module(config), chatty).save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("old")
    Model(config, tiny_module(config), Tokenizer(byte_tokenizer(), {})).save(tmp_path)
    again = load(tmp_path).tokenizer
    assert again is not None and (again.chat_template, again.special) == (None, {})
    (tmp_path / "chat_template.jinja").write_text("old")
    (tmp_path / "notes.txt").write_text("kept")
    Model(config, tiny_module(config)).save(tmp_path)
    assert load(tmp_path).tokenizer is None
    assert {file.name for file in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "notes.txt",
    }
