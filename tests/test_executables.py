"""Program keys and the store of compiled programs."""

from __future__ import annotations

import dataclasses
import enum
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.cache import Executables, program_key
from moe_jax.errors import InvalidArgument
from moe_jax.models.config import RopeConfig
from tiny_models import tiny_config

ROOT = Path(__file__).parent.parent


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Pair(NamedTuple):
    a: int
    b: int


@dataclasses.dataclass
class Thawed:
    a: int = 1


@jax.tree_util.register_pytree_node_class
class Labelled:
    """A container whose structure carries whatever it is given."""

    def __init__(self, label: object):
        self.label = label

    def tree_flatten(self) -> tuple[tuple[int], object]:
        return (1,), self.label

    @classmethod
    def tree_unflatten(cls, label: object, children: object) -> Labelled:
        return cls(label)


LABELLED_BY_OBJECT = jax.tree.structure(Labelled(object()))
PARTS = """
from moe_jax.cache import program_key
from tiny_models import tiny_config
import jax, jax.numpy as jnp, numpy as np
aval = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
tree = jax.tree.structure({"a": (1, None), "b": [2]})
print(program_key(tiny_config("olmoe"), {"b", "a", "c"}, {"x": 1, "y": (2.5, None)}, aval, tree, jnp.float32))
"""


def test_C63_equal_content_gives_equal_keys():
    a, b = tiny_config("olmoe"), tiny_config("olmoe")
    assert a is not b and program_key(a) == program_key(b)
    assert program_key(dataclasses.replace(a, sources=(("x", "y"),))) == program_key(a)
    assert program_key({"x": 1, "y": 2}) == program_key({"y": 2, "x": 1})
    assert program_key({3, 1, 2}) == program_key(frozenset([2, 3, 1]))
    assert program_key(np.arange(4)) == program_key(np.arange(8)[:4])
    assert program_key(np.float32) == program_key(jnp.dtype("float32")) == program_key(jnp.float32)


def test_structures_differ_by_all_of_their_auxiliary_data():
    """NumPy writes an array of 5000 numbers with its middle left out."""
    label = np.zeros(5000)
    same, other = label.copy(), label.copy()
    other[2500] = 1
    key, same_key, other_key = (
        program_key(jax.tree.structure([Labelled(each), {"a": None}])) for each in (label, same, other)
    )
    assert key == same_key != other_key


def test_different_content_gives_different_keys():
    values = [
        *(None, 0, 1, 1.0, True, False, "1", b"1", "", (), [], {}, set(), -0.0, 0.0, float("nan"), float("inf")),
        *(
            (1,),
            [1],
            ((1,),),
            (1, 2),
            ((1, 2),),
            ((1,), 2),
            (1, (2,)),
            Pair(1, 2),
            {1: 2},
            {1, 2},
            ("ab", "c"),
            ("a", "bc"),
        ),
        *(Colour.RED, Colour.BLUE, np.float32, np.float16, jnp.bfloat16, np.float32(1), np.float64(1)),
        *(np.arange(3), np.arange(3).astype(np.int32), np.arange(3)[None], np.arange(3)[::-1]),
        *(RopeConfig(), RopeConfig(theta=2.0), RopeConfig(kind="linear"), tiny_config("olmoe"), tiny_config("mixtral")),
        *(jax.ShapeDtypeStruct((2, 3), jnp.float32), jax.ShapeDtypeStruct((3, 2), jnp.float32)),
        jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),
        jax.ShapeDtypeStruct((2, 3), jnp.float32, weak_type=True),
        *(
            jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(d))
            for d in jax.devices()
        ),
        *(jax.tree.structure(tree) for tree in (1, None, (), (1, 2), [1, 2], (1, (2,)), ((1,), 2), Pair(1, 2))),
        *(jax.tree.structure(tree) for tree in ({"a": 1, "b": 2}, {"a": 1, "c": 2}, Labelled(1), Labelled(1.0))),
    ]
    keys = [program_key(value) for value in values]
    assert len(set(keys)) == len(keys)
    assert program_key(1, 2) != program_key((1, 2)) != program_key(12)


def test_C68_keys_are_the_same_in_another_process_and_hash_seed():
    def run(seed: str) -> str:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-c", PARTS], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    first = run("1")
    assert len(first) == 64 and first == run("2")


@pytest.mark.parametrize(
    "part",
    [object(), len, lambda x: x, Thawed(), RopeConfig, jnp.ones(2), np.asarray([object()]), LABELLED_BY_OBJECT],
    ids=["object", "builtin", "lambda", "mutable dataclass", "class", "device array", "object array", "tree"],
)
def test_parts_without_content_are_refused(part):
    with pytest.raises(InvalidArgument, match=r"program_key: parts\[0\]\['x'\]\[1\]"):
        program_key({"x": (1, part)})


def aval(size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), jnp.float32)


def get(store: Executables, size: int, function=lambda x: x + 1):
    return store.get_or_compile(program_key("add", size), function, (aval(size),))


def test_C61_the_store_is_bounded_and_evicts_the_least_recently_used():
    store = Executables(max_entries=2)
    for size in (1, 2, 1, 3):
        np.testing.assert_array_equal(get(store, size)(np.ones(size, np.float32)), np.full(size, 2.0))
    assert (store.stats().entries, store.stats().evictions) == (2, 1)
    get(store, 1)
    get(store, 2)
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.evictions, stats.entries) == (2, 4, 2, 2)
    assert stats.compile_seconds > 0
    store.clear()
    assert store.stats() == type(stats)(entries=0, max_entries=2, hits=0, misses=0, evictions=0, compile_seconds=0.0)
    with pytest.raises(InvalidArgument, match="max_entries: got 0"):
        Executables(0)


def test_C72_threads_that_ask_for_one_key_compile_it_once():
    store, traced, together = Executables(), [], threading.Barrier(4)

    def slow(x):
        traced.append(1)
        time.sleep(0.2)
        return x * 2

    def work(out: list) -> None:
        together.wait()
        out.append(np.asarray(get(store, 5, slow)(np.ones(5, np.float32))))

    results: list = []
    threads = [threading.Thread(target=work, args=(results,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(traced) == 1 and len(results) == 4
    assert all((result == 2).all() for result in results)
    assert (store.stats().misses, store.stats().hits) == (1, 3)


def test_C56_a_failed_compilation_leaves_nothing_behind():
    store = Executables()

    def broken(x):
        raise RuntimeError("no")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            get(store, 3, broken)
        assert store.stats().entries == 0
    np.testing.assert_array_equal(get(store, 3)(np.zeros(3, np.float32)), np.ones(3))


def test_donated_arguments_are_given_away():
    store = Executables()
    program = store.get_or_compile(program_key("donate"), lambda x: x + 1, (aval(4),), donate_argnums=(0,))
    x = jnp.zeros(4)
    np.testing.assert_array_equal(program(x), np.ones(4))
    assert x.is_deleted()
