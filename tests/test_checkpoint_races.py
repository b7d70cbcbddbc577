"""Files of a checkpoint that change while it is loaded: read as they were, or refused with one error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from checkpoint_files import Arrays, assert_same, random_tensors, small_config, write_file, write_folder
from moe_jax.checkpoint import load as load_file
from moe_jax.checkpoint import load_module, save_module
from moe_jax.errors import CheckpointError

RAW = small_config("olmoe", rope_theta=10.0)
REFUSED = "file: got one that was replaced or written to meanwhile, wanted the same until it is loaded"


def other_tensors() -> Arrays:
    """Of the same layout."""
    return {name: (2 * array).astype(array.dtype) for name, array in random_tensors(RAW).items()}


def replace(file: Path, write: Callable[[Path], object]) -> None:
    """As a careful program does: written beside, then renamed."""
    write(beside := file.with_suffix(".beside"))
    os.replace(beside, file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of two shards and old files."""
    tensors = random_tensors(RAW)
    names = list(tensors)
    return aged(write_folder(tmp_path / "model", RAW, tensors, [names[:20], names[20:]]))


def aged(folder: Path) -> Path:
    for file in folder.iterdir():
        os.utime(file, (1e9, 1e9))
    return folder


def shard(folder: Path, number: int) -> Path:
    return folder / f"model-{number:05}.safetensors"


def other_shard(folder: Path, number: int) -> Callable[[Path], None]:
    tensors = other_tensors()
    part = list(tensors)[:20] if number == 0 else list(tensors)[20:]
    return lambda file: write_file(file, {name: tensors[name] for name in part})


def between(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Have it happen when all headers are read, and no tensor."""
    monkeypatch.setattr(load_file, "_tell_drafts", lambda *_: change())


@pytest.mark.parametrize("number", [0, 1])
def test_a_shard_replaced_after_its_header_was_read(number, folder, monkeypatch):
    file = shard(folder, number)
    between(monkeypatch, lambda: replace(file, other_shard(folder, number)))
    seen: list[int] = []
    with pytest.raises(CheckpointError, match=REFUSED) as caught:
        load_module(folder, progress=lambda done, total: seen.append(done))
    assert caught.value.where == str(file) and seen == []
    monkeypatch.undo()
    load_module(folder)


def test_a_shard_written_in_place_after_its_header_was_read(folder, monkeypatch):
    between(monkeypatch, lambda: other_shard(folder, 1)(shard(folder, 1)))
    with pytest.raises(CheckpointError, match=REFUSED):
        load_module(folder)


def test_a_shard_written_in_place_while_it_is_read(folder):
    total = sum(array.nbytes for array in random_tensors(RAW).values())

    def change(done: int, _: int) -> None:
        if done == total:
            other_shard(folder, 1)(shard(folder, 1))

    with pytest.raises(CheckpointError, match=REFUSED) as caught:
        load_module(folder, progress=change)
    assert caught.value.where == str(shard(folder, 1))


def test_shards_replaced_while_they_are_read_are_read_as_they_were(folder):
    wanted = load_module(folder)[1]

    def change(done: int, total: int) -> None:
        if done == 0:
            for number in (0, 1):
                replace(shard(folder, number), other_shard(folder, number))

    assert_same(load_module(folder, progress=change)[1], wanted)
    assert (np.asarray(load_module(folder)[1].embed[...]) == 2 * np.asarray(wanted.embed[...])).all()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_texts_replaced_or_added_while_a_checkpoint_is_loaded(name, folder, monkeypatch):
    file = folder / name
    text = json.dumps(RAW | {"rope_theta": 20.0}) if name == "config.json" else "{}"
    between(monkeypatch, lambda: replace(file, lambda path: path.write_text(text)))
    with pytest.raises(CheckpointError, match=REFUSED) as caught:
        load_module(folder)
    assert caught.value.where == str(file)


def test_another_save_of_the_same_layout_is_noticed(tmp_path, monkeypatch):
    """In one file, before the headers of the new one are read: its config is not that which was read."""
    first = load_module(write_folder(tmp_path / "a", RAW, random_tensors(RAW)))
    second = load_module(write_folder(tmp_path / "b", RAW | {"rope_theta": 20.0}, other_tensors()))
    save_module(*first, tmp_path / "saved")
    real = load_file.read_folder
    folder = aged(tmp_path / "saved")

    def read_folder(path: Path):
        save_module(*second, folder)
        return real(path)

    monkeypatch.setattr(load_file, "read_folder", read_folder)
    with pytest.raises(CheckpointError, match=REFUSED) as caught:
        load_module(folder)
    assert caught.value.where == str(folder / "config.json")
    monkeypatch.undo()
    assert_same(load_module(folder)[1], second[1])


def test_a_tied_head_that_is_replaced_is_not_compared(folder, monkeypatch):
    raw = RAW | {"tie_word_embeddings": True}
    tensors = random_tensors(RAW)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    for file in folder.iterdir():
        file.unlink()
    aged(write_folder(folder, raw, tensors))
    file = folder / "model.safetensors"
    real = load_file._check_tied

    def check(*given: object) -> None:
        replace(file, lambda path: write_file(path, tensors))
        real(*given)  # pyrefly: ignore[bad-argument-type]

    monkeypatch.setattr(load_file, "_check_tied", check)
    with pytest.raises(CheckpointError, match=REFUSED):
        load_module(folder)
