"""Folders of cubins: published whole, and refused with a typed error where a file is cut off, foreign or missing."""

from __future__ import annotations

import base64
import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from moe_jax.pallas_kernels import compiled
from moe_jax.pallas_kernels.compiled import CompiledKernel
from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.plan import plan_spec

SPEC, OTHER = plan_spec(64, 8, 128, 16), plan_spec(4, 8, 128, 8)


def built(spec=SPEC, *, cubin: bytes = b"\x7fELF cubin", capability: int = 90, builder: str = "triton 3.9.0", shared=0):
    return CompiledKernel(
        key=spec.key,
        source_hash=spec.source_hash,
        capability=capability,
        builder=builder,
        symbol="plan",
        threads=128,
        shared=shared,
        global_scratch=0,
        profile_scratch=0,
        cubin=cubin,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    compiled.save(tmp_path, [built()])
    assert compiled.load(tmp_path, SPEC, 90) == built()
    return tmp_path


def the(folder: Path, suffix: str) -> Path:
    (path,) = folder.glob(f"*{suffix}")
    return path


# What stands in the JSON file in place of what was saved there.
DAMAGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "empty": lambda meta: b"",
    "cut off": lambda meta: json.dumps(meta)[:40].encode(),
    "no text": lambda meta: b"\xff\xfe\x00",
    "deep": lambda meta: b"[" * 200_000,
    "list": lambda meta: [],
    "null": lambda meta: None,
    "no fields": lambda meta: {},
    "no threads": lambda meta: {name: value for name, value in meta.items() if name != "threads"},
    "no source": lambda meta: {name: value for name, value in meta.items() if name != "source_hash"},
    "more": lambda meta: meta | {"more": 1},
    "threads as text": lambda meta: meta | {"threads": "32"},
    "threads null": lambda meta: meta | {"threads": None},
    "threads half": lambda meta: meta | {"threads": 1.5},
    "threads true": lambda meta: meta | {"threads": True},
    "threads negative": lambda meta: meta | {"threads": -32},
    "threads object": lambda meta: meta | {"threads": {"a": 1}},
    "threads list": lambda meta: meta | {"threads": [32]},
    "symbol number": lambda meta: meta | {"symbol": 3},
    "digest number": lambda meta: meta | {"sha256": 3},
    "another digest": lambda meta: meta | {"sha256": "0" * 64},
    "another key": lambda meta: meta | {"key": "0" * 64},
    "another source": lambda meta: meta | {"source_hash": "0" * 64},
    "another capability": lambda meta: meta | {"capability": 80},
    "no digest": lambda meta: {name: value for name, value in meta.items() if name != "sha256"},
    "cubin number": lambda meta: meta | {"cubin": 3},
    "cubin no base64": lambda meta: meta | {"cubin": "*" + meta["cubin"][1:]},
    "cubin no ASCII": lambda meta: meta | {"cubin": "ä" + meta["cubin"][1:]},
    "cubin half a byte": lambda meta: meta | {"cubin": meta["cubin"][:-1]},
}


@pytest.mark.parametrize("damaged", DAMAGED.values(), ids=DAMAGED)
def test_C69_a_file_that_is_no_kernels_is_refused(folder, damaged):
    path = the(folder, ".json")
    found = damaged(json.loads(path.read_text()))
    path.write_bytes(found if isinstance(found, bytes) else json.dumps(found).encode())
    with pytest.raises(InvalidArgument, match=r"^load\('"):
        compiled.load(folder, SPEC, 90)
    compiled.save(folder, [built()])
    assert compiled.load(folder, SPEC, 90) == built()


@pytest.mark.parametrize("how", ["missing", "a folder"])
def test_C69_a_kernel_whose_file_is_not_there_is_refused(folder, how):
    path = the(folder, ".json")
    path.unlink()
    if how == "a folder":
        path.mkdir()
    with pytest.raises(InvalidArgument, match=r"no cubin: got .*\.json.*, wanted plan for sm_90"):
        compiled.load(folder, SPEC, 90)
    with pytest.raises(InvalidArgument, match="no cubin"):
        compiled.load(folder / "not there", SPEC, 90)
    with pytest.raises(InvalidArgument, match="no cubin"):
        compiled.load(__file__, SPEC, 90)


def stored(cubin: bytes) -> dict[str, str]:
    return {"cubin": base64.b64encode(cubin).decode()}


@pytest.mark.parametrize("cubin", [b"", b"\x7fELF", b"\x7fELF cubix"])
def test_C69_a_cubin_that_is_not_the_one_that_was_built_is_refused(folder, cubin):
    """A part of it, or what another compiler builds: its threads and memory would be others."""
    path = the(folder, ".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | stored(cubin)))
    with pytest.raises(InvalidArgument, match="content of cubin: got SHA-256"):
        compiled.load(folder, SPEC, 90)


def test_a_folder_of_the_earlier_form_is_refused_until_it_is_built_again(folder):
    """The cubin beside its description, which were of two builders where both wrote at once."""
    path = the(folder, ".json")
    meta = json.loads(path.read_text())
    path.with_suffix(".cubin").write_bytes(base64.b64decode(meta.pop("cubin")))
    path.write_text(json.dumps(meta))
    with pytest.raises(InvalidArgument, match="content of cubin: got None, wanted base64, as save writes it"):
        compiled.load(folder, SPEC, 90)
    compiled.save(folder, [built()])
    assert compiled.load(folder, SPEC, 90) == built()


def test_C69_a_builder_that_is_stopped_leaves_no_half_of_a_kernel(tmp_path, monkeypatch):
    """Before its file is in its place; what was there stays."""

    class Stopped(BaseException):
        pass

    def move(*arguments):
        raise Stopped

    for there in ([], [built(builder="triton 3.8.0")]):
        compiled.save(tmp_path, there)
        with monkeypatch.context() as patch, pytest.raises(Stopped):
            patch.setattr(os, "replace", move)
            compiled.save(tmp_path, [built()])
        assert len(list(tmp_path.iterdir())) == len(there)
        assert [compiled.load(tmp_path, SPEC, 90) for _ in there] == there
    compiled.save(tmp_path, [built()])
    assert compiled.load(tmp_path, SPEC, 90) == built()


@pytest.mark.parametrize("order", sorted(set(itertools.permutations("aabb"))), ids="".join)
def test_builders_whose_files_appear_in_any_order_leave_a_whole_kernel(order, tmp_path, monkeypatch):
    """One builder's turn: up to and with the next file that it puts into its place, or to its end."""
    builds = {name: built(cubin=name.encode(), builder=f"triton {name}", shared=ord(name)) for name in "ab"}
    turns = {name: threading.Semaphore(0) for name in "ab"}
    done, replace = threading.Semaphore(0), os.replace

    def move(*arguments):
        turns[threading.current_thread().name].acquire()
        replace(*arguments)
        done.release()

    monkeypatch.setattr(os, "replace", move)
    writers = [
        threading.Thread(target=compiled.save, args=(tmp_path, [kernel]), name=name) for name, kernel in builds.items()
    ]
    for thread in writers:
        thread.start()
    for name in order:
        turns[name].release()
        done.acquire(timeout=0.05)  # it may have no more files
    for thread in writers:
        thread.join(60)
        assert not thread.is_alive()
    assert compiled.load(tmp_path, SPEC, 90) in builds.values()


def test_C69_builders_at_once_leave_whole_kernels(tmp_path):
    """Two compilers' kernels under one key, written over each other: a reader gets one of them."""
    builds = [built(cubin=bytes([n]) * 50_000, builder=f"triton {n}", shared=n) for n in (1, 2)]
    compiled.save(tmp_path, builds[:1])
    over, seen, errors = threading.Event(), set(), []

    def read() -> None:
        while not over.is_set():
            try:
                kernel = compiled.load(tmp_path, SPEC, 90)
                assert kernel in builds
                seen.add(kernel.shared)
            except BaseException as error:
                errors.append(error)

    def write(kernel: CompiledKernel) -> None:
        for _ in range(100):
            compiled.save(tmp_path, [kernel])

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(kernel,)) for kernel in builds]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    over.set()
    reader.join()
    assert errors == [] and seen
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
    assert compiled.load(tmp_path, SPEC, 90) in builds


def test_what_built_a_folder_is_said_whatever_else_lies_in_it(folder):
    pytest.importorskip("cuda.core")
    from moe_jax.cache.cuda_runtime import _builder

    assert _builder(folder) == "triton 3.9.0"
    for name, text in (
        ("foreign.json", "{}"),
        ("list.json", "[1]"),
        ("list-sm90.json", json.dumps({"builder": ["triton"]})),
        ("report-sm90.json", json.dumps({"builder": 3})),
        ("x-sm90.json", '{"builder": "tri'),
        ("y-sm90.json", "[1]"),
        ("z-sm90.json", "[" * 200_000),
    ):
        (folder / name).write_text(text)
    (folder / "folder-sm90.json").mkdir()
    assert _builder(folder) == "triton 3.9.0"
    compiled.save(folder, [built(OTHER, builder="triton 3.10.0"), built(OTHER, capability=80)])
    assert _builder(folder) == "triton 3.10.0 and triton 3.9.0"
