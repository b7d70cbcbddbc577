"""`moe_jax.load`: folders, the shipped model, repositories, devices."""

from __future__ import annotations

import sys
import types

import jax
import pytest
from flax import nnx

from moe_jax import loading
from moe_jax.errors import InvalidArgument
from moe_jax.loading import checkpoint_folder, load
from moe_jax.models.config import ModelConfig
from moe_jax.tokenizer import Tokenizer
from test_tokenizer import CONFIG, byte_tokenizer
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
    assert seen == {"path": tmp_path, "dtype": "bfloat16", "device": jax.devices("cpu")[0], "progress": None}
    assert model.config == config
    assert model.tokenizer is not None
    load()
    assert str(seen["path"]).endswith("moe_jax/assets/tiny_moe") and seen["device"] is None
    with pytest.raises(InvalidArgument, match="device: got 'tpu', wanted 'cpu', 'cuda'"):
        load(tmp_path, device="tpu")
    with pytest.raises(InvalidArgument, match="no such model: got '/nowhere'"):
        load("/nowhere")


def test_load_says_that_there_is_no_gpu(tmp_path):
    if jax.default_backend() != "cpu":
        pytest.skip("this machine has one")
    with pytest.raises(InvalidArgument, match=r"no cuda device .*: got cpu; .*wanted a CUDA device"):
        load(tmp_path, device="cuda")


def test_repository_ids_come_from_the_cache_first(tmp_path, monkeypatch):
    calls: list[bool] = []

    class LocalEntryNotFoundError(Exception):
        pass

    def snapshot_download(repository: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        assert repository == "org/name" and "*.safetensors" in allow_patterns and "*" not in allow_patterns
        calls.append(local_files_only)
        if repository == "org/name" and not any(tmp_path.iterdir()):
            raise LocalEntryNotFoundError
        return str(tmp_path)

    errors = types.SimpleNamespace(LocalEntryNotFoundError=LocalEntryNotFoundError)
    hub = types.SimpleNamespace(snapshot_download=snapshot_download, errors=errors)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    with pytest.raises(InvalidArgument, match="cannot get the repository: got 'org/name'"):
        checkpoint_folder("org/name")
    assert calls == [True, False]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'
    )
    (tmp_path / "1.safetensors").write_text("")
    calls.clear()
    assert checkpoint_folder("org/name") == tmp_path
    assert calls == [True, False]  # a shard is missing from the cache
    (tmp_path / "2.safetensors").write_text("")
    calls.clear()
    assert checkpoint_folder("org/name") == tmp_path
    assert calls == [True]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InvalidArgument, match=r"moe-jax\[hub\]"):
        checkpoint_folder("org/name")
