"""Files that are published whole, and dataclasses rebuilt from them."""

from __future__ import annotations

import dataclasses
import json
import stat
from pathlib import Path

import pytest

from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.stored import publish, rebuild


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int

    def __post_init__(self) -> None:
        if self.size > 99:
            raise InvalidArgument("size", where="Inner", got=self.size, wanted="at most 99")


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    sizes: tuple[int, ...]
    parts: tuple[Inner, ...]
    share: bool
    name: str


WHOLE = Outer(Inner(3), (1, 2), (Inner(4), Inner(5)), True, "a")


def stored() -> dict:
    return json.loads(json.dumps(dataclasses.asdict(WHOLE)))


def test_a_dataclass_comes_back_as_it_was():
    found = rebuild(Outer, stored(), "test")
    assert found == WHOLE and hash(found) == hash(WHOLE)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("inner", 3, "test: inner: got 3, wanted Inner"),
        ("inner", {}, r"test: inner: fields: got \[\], wanted \['size'\]"),
        ("inner", {"size": 3, "more": 1}, "test: inner: fields: got "),
        ("inner", {"size": -1}, "test: inner: size: got -1, wanted an int of at least 0"),
        ("inner", {"size": 100}, "Inner: size: got 100, wanted at most 99"),
        ("sizes", 3, r"test: sizes: got 3, wanted tuple\[int, ...\]|test: sizes: got 3, wanted tuple"),
        ("sizes", [1, "2"], r"test: sizes\[1\]: got '2', wanted an int of at least 0"),
        ("sizes", {"a": 1}, "test: sizes: got "),
        ("parts", [{"size": 1}, {"size": True}], r"test: parts\[1\]: size: got True"),
        ("parts", [1], r"test: parts\[0\]: got 1, wanted Inner"),
        ("share", 1, "test: share: got 1, wanted bool"),
        ("share", None, "test: share: got None, wanted bool"),
        ("name", 1, "test: name: got 1, wanted str"),
        ("name", {"a": 1}, "test: name: got {'a': 1}, wanted str"),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused(name, value, message):
    with pytest.raises(InvalidArgument, match=message):
        rebuild(Outer, stored() | {name: value}, "test")


def test_a_file_is_published_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    publish(path, b"old")
    seen = []

    def check(fresh: Path) -> None:
        seen.append((fresh.read_bytes(), path.read_bytes()))
        raise InvalidArgument("content", where="test", got="new", wanted="old")

    with pytest.raises(InvalidArgument):
        publish(path, b"new", check)
    assert seen == [(b"new", b"old")] and path.read_bytes() == b"old"
    publish(path, b"new")
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o644
    assert list(tmp_path.iterdir()) == [path]
