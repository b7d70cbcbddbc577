"""Files of a checkpoint that change while it is loaded: read as they were, or refused with one error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from checkpoint_files import Arrays, assert_same, random_tensors, small_config, write_file, write_folder
from moe_jax import loading
from moe_jax.checkpoint import load as load_file
from moe_jax.checkpoint import load_module, save_module
from moe_jax.errors import CheckpointError
from moe_jax.tokenizer import Tokenizer
from test_tokenizer import CONFIG, byte_tokenizer

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


TOKENIZERS = {"one": Tokenizer(byte_tokenizer(), CONFIG), "other": Tokenizer(byte_tokenizer(), {}), "none": None}
OTHER = "got (another checkpoint, saved meanwhile|one that was replaced or written to meanwhile), wanted the same until"


@pytest.mark.parametrize("after", list(TOKENIZERS))
@pytest.mark.parametrize("before", list(TOKENIZERS))
@pytest.mark.parametrize("moment", ["before the weights", "after the weights"])
def test_a_model_is_not_given_the_tokenizer_of_another_save(moment, before, after, tmp_path, monkeypatch):
    first = load_module(write_folder(tmp_path / "a", RAW, random_tensors(RAW)))
    second = load_module(write_folder(tmp_path / "b", RAW | {"rope_theta": 20.0}, other_tensors()))
    save_module(*first, folder := tmp_path / "saved", tokenizer=TOKENIZERS[before])
    aged(folder)

    def load_with_save(path: Path, **options: object):
        if moment == "before the weights":
            save_module(*second, folder, tokenizer=TOKENIZERS[after])
            return load_module(path)
        found = load_module(path)
        save_module(*second, folder, tokenizer=TOKENIZERS[after])
        return found

    monkeypatch.setattr(loading, "load_module", load_with_save)
    if before == after == "none":
        model = loading.load(folder)
        assert model.tokenizer is None
        assert_same(model.module, (second if moment == "before the weights" else first)[1])
        return
    with pytest.raises(CheckpointError, match=OTHER):
        loading.load(folder)


@pytest.mark.parametrize("moved", ["before the weights", "after the weights"])
def test_a_save_that_is_moved_to_its_place_while_it_is_loaded(moved, tmp_path, monkeypatch):
    """What is loaded from beside its place goes from there; the model does not lose its tokenizer."""
    first = load_module(write_folder(tmp_path / "a", RAW, random_tensors(RAW)))
    save_module(*first, folder := tmp_path / "saved", tokenizer=TOKENIZERS["one"])
    (folder / ".saved").mkdir()
    for file in list(folder.iterdir()):
        if file.is_file():
            os.link(file, folder / ".saved" / file.name)

    def load_with_move(path: Path, **options: object):
        if moved == "before the weights":
            (folder / ".saved").rename(tmp_path / "gone")
        found = load_module(path)
        if moved == "after the weights":
            (folder / ".saved").rename(tmp_path / "gone")
        return found

    monkeypatch.setattr(loading, "load_module", load_with_move)
    with pytest.raises(CheckpointError):
        loading.load(folder)
    monkeypatch.undo()
    assert loading.load(folder).tokenizer is not None


def test_a_save_that_is_not_yet_moved_when_it_is_loaded(tmp_path, monkeypatch):
    """The folder's tokenizer is still that of the old checkpoint, and the same as it was."""
    first = load_module(write_folder(tmp_path / "a", RAW, random_tensors(RAW)))
    second = load_module(write_folder(tmp_path / "b", RAW | {"rope_theta": 20.0}, other_tensors()))
    save_module(*first, folder := tmp_path / "saved", tokenizer=TOKENIZERS["one"])
    save_module(*second, tmp_path / "new", tokenizer=TOKENIZERS["other"])

    def load_with_commit(path: Path, **options: object):
        os.utime(tmp_path / "new")
        (tmp_path / "new").rename(folder / ".saved")
        return load_module(path)

    monkeypatch.setattr(loading, "load_module", load_with_commit)
    with pytest.raises(CheckpointError, match="folder: got another checkpoint, saved meanwhile"):
        loading.load(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_file_of_the_tokenizer_that_cannot_be_read(name, tmp_path):
    tokenizer = TOKENIZERS["one"]
    assert tokenizer is not None
    tokenizer.save(tmp_path)
    (tmp_path / name).write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.from_folder(tmp_path)
