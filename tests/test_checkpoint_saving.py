"""Saving over a checkpoint while the file system fails: the old one or the new one is whole, at every moment."""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint_files import arrays_of, assert_same, random_tensors, small_config, write_folder
from moe_jax.checkpoint import load_module, save_module
from moe_jax.checkpoint import save as save_file
from moe_jax.checkpoint.files import whole
from moe_jax.errors import CheckpointError, InvalidArgument
from moe_jax.loading import load
from moe_jax.model import Model
from moe_jax.models.config import ModelConfig
from moe_jax.models.decoder import Decoder, abstract_decoder
from moe_jax.tokenizer import Tokenizer
from test_tokenizer import CONFIG, TEMPLATE, byte_tokenizer

Kind = Callable[..., None]  # saves a model in one file, or in several
CALLS = ("mkdir", "open", "fsync", "utime", "link", "replace", "rename", "unlink", "rmdir", "listdir", "scandir")


def one(model: Model, folder: Path) -> None:
    model.save(folder)


def several(model: Model, folder: Path) -> None:
    save_module(model.config, model.module, folder, max_shard_bytes=9000, tokenizer=model.tokenizer)


class Faults:
    """Counts what is asked of the file system, and makes one of it fail, or all from there on."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.count, self.fails, self.forever = 0, -1, False
        for name in CALLS:
            patch.setattr(os, name, self._failing(getattr(os, name)))
        for module in (builtins, io):
            patch.setattr(module, "open", self._opening(module.open))

    def hit(self) -> None:
        number, self.count = self.count, self.count + 1
        if number == self.fails or (self.forever and number > self.fails >= 0):
            raise OSError(28, "No space left on device")

    def _failing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.hit()
            return function(*args, **options)

        return call

    def _opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            self.hit()
            stream = function(file, mode, *args, **options)
            return _Written(stream, self) if "w" in mode else stream

        return call


class _Written:
    """A stream whose writes may fail, after half of the data."""

    def __init__(self, stream: Any, faults: Faults):
        self._stream, self._faults = stream, faults

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, data: Any) -> int:
        self._stream.write(data[: len(data) // 2])
        self._faults.hit()
        return self._stream.write(data[len(data) // 2 :])


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What most of the time of loading and saving something small goes into."""
    for module in ("load", "save"):
        monkeypatch.setattr(f"moe_jax.checkpoint.{module}.abstract_decoder", abstract)


@functools.cache
def abstract(config: ModelConfig) -> Decoder:
    return abstract_decoder(config)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    """Two of one layout, so that parts of both would look like a checkpoint."""
    size = {"num_hidden_layers": 1, "num_experts": 2, "vocab_size": 258}
    made = []
    for theta, special in ((10.0, CONFIG), (20.0, {})):
        raw = small_config("olmoe", rope_theta=theta, **size)
        tensors = {name: (theta * array).astype(array.dtype) for name, array in random_tensors(raw).items()}
        config, module = load_module(write_folder(tmp_path_factory.mktemp("made"), raw, tensors))
        made.append(Model(config, module, Tokenizer(byte_tokenizer(), special, TEMPLATE if special else None)))
    return made[0], made[1]


def same(found: Model, model: Model) -> bool:
    """Whether a model is the other, in its config, values and tokenizer."""
    parts = [
        (m.config, m.tokenizer and (m.tokenizer.special, m.tokenizer.chat_template), _bytes(m)) for m in (found, model)
    ]
    return parts[0] == parts[1]


def _bytes(model: Model) -> dict[Any, bytes]:
    return {path: array.tobytes() for path, array in arrays_of(model.module).items()}


@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (one, one),
        (several, several),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((one, several), (several, one))),
    ],
)
def test_a_save_that_fails_anywhere_leaves_the_old_or_the_new_checkpoint(
    before, after, forever, models, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # slow, and nobody pulls the plug
    old, new = models
    before(old, tmp_path / "old")
    (tmp_path / "old" / "notes.txt").write_text("kept")
    after(new, tmp_path / "whole")
    wanted = {file.name for file in (tmp_path / "whole").iterdir()} | {"notes.txt"}
    found: list[Model] = []
    number, finished = 0, False
    while not finished:
        folder = shutil.copytree(tmp_path / "old", tmp_path / f"{number}")
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch)
            faults.fails, faults.forever = number, forever
            try:
                after(new, folder)
            except OSError as error:
                assert error.errno == 28
            finished, faults.fails = faults.count <= number, -1
            loaded = load(folder)
            found.append(new if same(loaded, new) else old)
            assert same(loaded, found[-1]), f"neither is whole after a failure of call {number}"
            # And it is no obstacle for the next one.
            after(new, folder)
            assert same(load(folder), new)
        assert {file.name for file in folder.iterdir()} == wanted
        shutil.rmtree(folder)
        number += 1
    # A failure that is of no importance, such as that of a link, may leave the new one earlier.
    last = max(index for index, model in enumerate(found) if model is old)
    assert 20 < last < number - 20
    assert not forever or all(model is old for model in found[:last])


def test_a_save_that_fails_in_an_empty_folder_leaves_none_or_the_new_one(models, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch)
        one(models[0], tmp_path / "counted")
        calls = faults.count
    for number in range(calls):
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch)
            faults.fails, faults.forever = number, True
            with contextlib.suppress(OSError):
                one(models[0], tmp_path / str(number))
        try:
            assert same(load(tmp_path / str(number)), models[0])
        except ValueError as error:
            assert "no such folder" in str(error) or "no checkpoint" in str(error)


def test_file_systems_without_links_and_locks(models, tmp_path, monkeypatch):
    def refused(*args: Any, **options: Any) -> None:
        raise OSError(1, "Operation not permitted")

    one(models[0], tmp_path)
    monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr("moe_jax.checkpoint.save.fcntl.flock", refused)
    several(models[1], tmp_path)
    assert same(load(tmp_path), models[1])
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_a_file_system_that_cannot_sync_folders(models, tmp_path, monkeypatch):
    real = os.fsync

    def fsync(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").resolve().is_dir():
            raise OSError(22, "Invalid argument")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    one(models[0], tmp_path)
    assert same(load(tmp_path), models[0])


def _noted(name: str, function: Callable[..., Any], events: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        what = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else os.fspath(args[0])
        events.append(f"{name} {os.path.basename(what)}")
        return function(*args, **options)

    return call


def test_everything_is_on_the_disk_before_it_counts(models, tmp_path, monkeypatch):
    """Files, then the list of their names, then the rename; and that before the old files go."""
    one(models[0], tmp_path)
    events: list[str] = []
    for name in ("fsync", "rename", "unlink"):
        monkeypatch.setattr(os, name, _noted(name, getattr(os, name), events))
    several(models[1], tmp_path)
    monkeypatch.undo()
    commit = events.index("rename new")
    synced = {event.removeprefix("fsync ") for event in events[:commit] if event.startswith("fsync ")}
    assert synced == {file.name for file in tmp_path.iterdir()} | {"new"} and events[commit - 1] == "fsync new"
    assert events[commit + 1 : commit + 3] == [f"fsync {tmp_path.name}", "unlink config.json"]
    placed = events.index("rename .saved")
    assert events[placed - 1] == f"fsync {tmp_path.name}"


def test_saves_into_one_folder_at_a_time(models, tmp_path):
    errors: list[BaseException] = []

    def run(model: Model, kind: Kind) -> None:
        try:
            for _ in range(10):
                kind(model, tmp_path)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=each) for each in zip(models, (one, several), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    found = load(tmp_path)
    assert same(found, models[0]) or same(found, models[1])
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_a_tokenizer_is_kept_replaced_or_removed(models, tmp_path):
    config: ModelConfig = models[0].config
    module: Any = models[0].module
    assert isinstance(module, Decoder)
    one(models[0], tmp_path)
    save_module(config, module, tmp_path)
    assert same(load(tmp_path), models[0])
    save_module(config, module, tmp_path, tokenizer=models[1].tokenizer)
    assert (found := load(tmp_path).tokenizer) is not None and found.special == {}
    save_module(config, module, tmp_path, tokenizer=None)
    assert load(tmp_path).tokenizer is None
    assert_same(load_module(tmp_path)[1], module)
    np.testing.assert_array_equal(*(np.asarray(m.embed[...]) for m in (load_module(tmp_path)[1], module)))


def test_shards_that_no_index_names_are_somebody_elses(models, tmp_path):
    other = "model-00001-of-00002.safetensors"
    (tmp_path / other).write_text("of somebody else")
    for save in (several, one, several, one):
        save(models[0], tmp_path)
        shards = {file.name for file in tmp_path.glob("model-*")}
        assert (shards == {other}) == (save is one)
    assert (tmp_path / other).read_text() == "of somebody else"


@pytest.mark.parametrize(
    "index", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../b"}}']
)
def test_an_index_that_names_no_shards_is_only_replaced(models, tmp_path, index):
    (tmp_path / "b").write_text("kept")
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(index)
    one(models[0], folder)
    assert same(load(folder), models[0])
    assert (tmp_path / "b").read_text() == "kept"


def test_a_home_folder_is_found_by_its_sign(models, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    models[0].save("~/model")
    assert same(load("~/model"), models[0])
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("kind", ["a file", "a link to nothing"])
def test_what_is_no_folder_is_refused(models, tmp_path, kind):
    path = tmp_path / "model"
    path.write_text("kept") if kind == "a file" else path.symlink_to(tmp_path / "nothing")
    with pytest.raises(InvalidArgument, match=r"Model\.save: path: got .*model.*wanted a folder"):
        models[0].save(path)
    assert kind != "a file" or path.read_text() == "kept"


class Killed(BaseException):
    """Stands in for the end of the process."""


@pytest.fixture
def killed(models, tmp_path, monkeypatch) -> Callable[..., Path]:
    """A folder with the first model, into which the second was being saved until some call."""

    def make(call: str, which: Callable[[Any], bool]) -> Path:
        def kill(*args: Any, **options: Any) -> Any:
            if which(args):
                raise Killed
            return real(*args, **options)

        one(models[0], tmp_path)
        real = getattr(os, call)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, call, kill)
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # nothing is tidied up
            with pytest.raises(Killed):
                several(models[1], tmp_path)
        return tmp_path

    return make


def before_the_move(args: Any) -> bool:
    return Path(args[0]).name == "config.json" and len(args) == 1


def config_in_its_place(args: Any) -> bool:
    return Path(args[0]).name == ".saved"


def hidden(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.name.startswith("."))


def test_the_next_save_takes_away_what_killed_ones_left(models, killed):
    folder = killed("rename", lambda args: Path(args[0]).name == "new")
    (left,) = hidden(folder)
    assert left.startswith(".saving-") and (folder / left / "new" / "config.json").exists()
    (folder / ".saving-notes").write_text("a file of somebody's")
    (folder / ".saving-elsewhere").symlink_to(folder.parent)
    one(models[1], folder)
    assert hidden(folder) == [".saving-elsewhere", ".saving-notes"] and same(load(folder), models[1])


def test_the_folder_of_a_process_that_was_killed_is_free(models, tmp_path):
    """And that of a living one is not."""
    code = """
import sys
from pathlib import Path
from moe_jax.checkpoint.save import _staging
with _staging(Path(sys.argv[1])) as staging:
    (staging / "weights").write_text("many")
    print("ready", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            (left,) = hidden(tmp_path)
            one(models[0], tmp_path)
            assert hidden(tmp_path) == [left] and (tmp_path / left / "weights").exists()
        finally:
            process.kill()
    assert hidden(tmp_path) == [left]
    one(models[0], tmp_path)
    assert hidden(tmp_path) == []


def test_a_save_does_not_take_away_one_that_goes_on(models, tmp_path, monkeypatch):
    """Another, of the whole model, in the middle of writing it."""
    real, inner = save_file._write, []

    def write(*args: Any) -> None:
        real(*args)
        if not inner:
            inner.append(True)
            one(models[1], tmp_path)
            assert len(hidden(tmp_path)) == 1

    monkeypatch.setattr(save_file, "_write", write)
    one(models[0], tmp_path)
    assert same(load(tmp_path), models[0]) and hidden(tmp_path) == []


@pytest.mark.parametrize("copied", [False, True], ids=["written", "copied with its times"])
@pytest.mark.parametrize("when", [("unlink", before_the_move), ("rename", config_in_its_place)], ids=["early", "late"])
def test_a_checkpoint_of_another_program_after_a_killed_save_is_not_hidden(when, copied, models, killed, tmp_path):
    folder = killed(*when)
    assert hidden(folder)[0] == ".saved" and same(load(folder), models[1])
    time.sleep(0.05)  # a tick of the clock of files
    one(models[0], other := tmp_path / "other")
    for file in other.iterdir():
        if copied:
            os.utime(file, (1e9, 1e9))
        (folder / file.name).unlink(missing_ok=True)
        shutil.copy2(file, folder / file.name)
    with pytest.raises(CheckpointError, match=r"checkpoint: got two: .*wanted one: delete .saved to load") as caught:
        load(folder)
    assert f"{folder / '.saved'}, " in str(caught.value) and f"{folder / 'config.json'}, " in str(caught.value)
    config, module = models[0].config, models[0].module
    with pytest.raises(CheckpointError, match="two"):
        save_module(config, module, folder)
    # Each of the ways that it names.
    shutil.copytree(folder, saved := tmp_path / "without the file")
    (saved / "config.json").unlink()
    assert same(load(saved), models[1])
    shutil.rmtree(folder / ".saved")
    assert same(load(folder), models[0])


def test_a_config_written_through_the_link_of_a_killed_save_is_not_taken_for_its_own(killed):
    folder = killed("rename", config_in_its_place)
    file = folder / "config.json"
    assert file.samefile(folder / ".saved" / "config.json")
    time.sleep(0.05)
    file.write_text(file.read_text().replace("20.0", "30.0"))
    with pytest.raises(CheckpointError, match="two"):
        load(folder)


def test_a_save_over_two_checkpoints_leaves_its_own(models, killed):
    folder = killed("unlink", before_the_move)
    time.sleep(0.05)
    (folder / "config.json").write_text("{}")
    one(models[0], folder)
    assert same(load(folder), models[0]) and hidden(folder) == []


def test_copies_in_the_place_of_links_are_the_saves_own(models, killed, monkeypatch):
    """On a file system without links, where they are newer than what they are copied from."""

    def refused(*args: Any) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    folder = killed("rename", config_in_its_place)
    assert not (folder / "config.json").samefile(folder / ".saved" / "config.json")
    assert whole(folder) == folder / ".saved" and same(load(folder), models[1])


def test_a_save_that_goes_on_is_never_taken_for_two(models, tmp_path):
    """Nor one after the other: the files of the first are older than the second."""
    one(models[0], tmp_path)
    stop, errors = threading.Event(), []

    def look() -> None:
        try:
            while not stop.is_set():
                whole(tmp_path)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(15):
        several(models[1], tmp_path)
        one(models[0], tmp_path)
    stop.set()
    thread.join()
    assert errors == []


def test_a_checkpoint_placed_while_a_save_writes_is_older_than_it(models, killed, tmp_path, monkeypatch):
    """What counts is when a save was done, and not when its files were written."""
    real, placed = os.fsync, []

    def fsync(fd: int) -> None:
        if not placed and list(tmp_path.glob(".saving-*/new/model.safetensors.index.json")):  # of the second model
            time.sleep(0.05)
            os.utime(tmp_path / "config.json")
            placed.append(True)
            time.sleep(0.05)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = killed("unlink", before_the_move)
    assert placed and same(load(folder), models[1])


def test_nothing_of_a_save_that_let_the_next_one_go_on_is_linked(models, tmp_path, monkeypatch):
    """To remove a link later would make the file in its place look newer than the next save."""
    real, links = shutil.rmtree, []

    def rmtree(path: Any, **options: Any) -> None:
        if Path(path).parent == tmp_path:
            links.append({file.stat().st_nlink for file in tmp_path.iterdir() if file.is_file()})
        real(path, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    one(models[0], tmp_path)
    assert links == [{1}]
