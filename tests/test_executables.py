"""Program keys and the store of compiled programs."""

from __future__ import annotations

import dataclasses
import enum
import gc
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

from moe_jax.cache import Executables, executables, program_key
from moe_jax.cache.keys import Tokens, fields
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
    def start(seed: str) -> subprocess.Popen:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
        return subprocess.Popen([sys.executable, "-c", PARTS], env=environment, stdout=subprocess.PIPE, text=True)

    first, second = (process.communicate(timeout=120)[0].strip() for process in [start("1"), start("2")])
    assert len(first) == 64 and first == second


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
    assert store.stats() == type(stats)(
        entries=0, max_entries=2, bytes=0, max_bytes=None, hits=0, misses=0, evictions=0, compile_seconds=0.0
    )
    with pytest.raises(InvalidArgument, match="max_entries: got 0"):
        Executables(0)
    with pytest.raises(InvalidArgument, match="max_bytes: got 0"):
        Executables(max_bytes=0)


def live() -> int:
    """Compiled programs that are alive in this process, JAX's own caches included."""
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


def test_C61_dropped_programs_are_freed_and_clear_frees_all():
    """One function, as in the report: as long as it lives JAX would keep every program made of it."""
    store, before, counts = Executables(max_entries=4), live(), []

    def function(x):
        return x + 1

    for size in range(1, 13):
        get(store, size, function)
        counts.append(live() - before)
    assert counts == [*range(1, 5), *[4] * 8]
    store.clear()
    assert live() == before


def test_C61_the_store_is_bounded_by_estimated_bytes(monkeypatch):
    store = Executables(max_bytes=250)
    monkeypatch.setattr(executables, "_bytes", lambda program: 100)
    for size in (1, 2, 1, 3):
        get(store, size)
    assert (store.stats().entries, store.stats().bytes, store.stats().evictions) == (2, 200, 1)
    assert store.holds(program_key("add", 1)) and not store.holds(program_key("add", 2))
    monkeypatch.setattr(executables, "_bytes", lambda program: 1000)
    get(store, 4)  # needs more than there may be: kept alone
    assert (store.stats().entries, store.stats().bytes) == (1, 1000)


def test_bytes_are_what_xla_says():
    program = jax.jit(lambda x: jnp.sort(x @ x.T, axis=0) @ x).lower(jnp.ones((64, 64))).compile()
    analysis = program.memory_analysis()
    found = executables._bytes(program)
    assert found == analysis.generated_code_size_in_bytes + analysis.temp_size_in_bytes > 0


def test_a_program_in_use_is_not_among_the_first_to_go():
    store = Executables(max_entries=2)

    def acquire(size):
        recipe = executables.Recipe(lambda x: x + 1, (aval(size),))
        return store.acquire(program_key(size), lambda: recipe)[0]

    first, second = acquire(1), acquire(2)
    first.touch()
    acquire(3)
    assert first.program is not None and second.program is None


def test_C63_every_compilation_has_a_reason():
    store = Executables()

    def compile_with(parts, size):
        store.get_or_compile(program_key(parts), lambda x: x + 1, (aval(size),), parts=parts)

    compile_with({"rows": "1", "dtype": "bf16", "k": "2"}, 1)
    compile_with({"rows": "4", "dtype": "bf16", "k": "2"}, 2)
    compile_with({"rows": "4", "dtype": "f32", "k": "2", "slots": "8"}, 3)
    compile_with({"rows": "4", "dtype": "f32", "k": "2", "slots": "8"}, 3)
    get(store, 4)
    first, second, third, fourth = store.compilations()
    assert first.reason == "no program was there" and first.differences == ()
    assert second.reason == "rows was 1, is 4" and second.differences == (("rows", "1", "4"),)
    assert third.reason == "dtype was bf16, is f32; slots was absent, is 8"
    assert fourth.reason == "rows was 1, is absent; dtype was bf16, is absent; k was 2, is absent"
    assert sum(each.seconds for each in store.compilations()) == store.stats().compile_seconds > 0


@pytest.fixture
def compiler_options(monkeypatch) -> list:
    """What is given to XLA for each program from here on."""
    given, compile_ = [], jax.stages.Lowered.compile

    def spy(self, compiler_options=None, **more):
        given.append(compiler_options)
        return compile_(self, compiler_options, **more)

    monkeypatch.setattr(jax.stages.Lowered, "compile", spy)
    return given


def test_C66_options_of_one_program_do_not_leak_into_the_next(compiler_options, monkeypatch):
    monkeypatch.setattr(executables, "_platform", lambda arguments: "gpu")  # XLA checks the options on a CPU too
    for order in ((True, False, None), (None, False, True)):
        store = Executables()
        for size, command_buffers in enumerate(order, 1):
            key = program_key("add", size, command_buffers)
            run = store.get_or_compile(key, lambda x: x + 1, (aval(size),), command_buffers=command_buffers)
            np.testing.assert_array_equal(run(np.ones(size, np.float32)), np.full(size, 2.0))
        assert [each.command_buffers for each in store.compilations()] == list(order)
    on, off, default = compiler_options[:3]
    assert compiler_options[3:] == [default, off, on]
    assert default is None and off == {"xla_gpu_enable_command_buffer": ""}
    assert "CUSTOM_CALL" in on["xla_gpu_enable_command_buffer"] and on["xla_gpu_graph_min_graph_size"] == 1


def test_command_buffers_are_of_gpus_only(compiler_options):
    store = Executables()
    store.get_or_compile("key", lambda x: x + 1, (aval(1),), command_buffers=True)
    assert compiler_options == [None]
    with jax.default_device(jax.devices("cpu")[1]):
        assert executables._platform((aval(1),)) == "cpu"
    on_one = jax.device_put(np.ones(1), jax.devices()[1])
    assert executables._platform(([1.0], on_one)) == "cpu"


def test_tokens_name_what_has_no_content():
    tokens = Tokens()

    def make():
        def inner():
            return None

        return inner

    first, second = make(), make()
    key, same, other = (program_key(("x", each), tokens=tokens) for each in (first, first, second))
    assert key == same != other
    assert program_key(make(), tokens=Tokens()) == program_key(make(), tokens=Tokens())  # each the first of its name
    assert len({program_key(each, tokens=tokens) for each in (RopeConfig, object, len, LABELLED_BY_OBJECT)}) == 4
    assert program_key(1, tokens=tokens) == program_key(1)
    with pytest.raises(InvalidArgument, match=r"program_key: parts\[0\]\[1\]"):
        program_key((1, Thawed()), tokens=tokens)


def test_a_class_defined_again_under_its_name_is_another():
    def define():
        class Option:
            def __eq__(self, other):
                return type(other).__name__ == "Option"

            def __hash__(self):
                return 1

        return Option

    tokens, (first, second) = Tokens(), (define(), define())
    assert first() == second() and program_key(first(), tokens=tokens) == program_key(first(), tokens=tokens)
    assert program_key(first(), tokens=tokens) != program_key(second(), tokens=tokens)


def test_a_token_is_never_given_twice():
    tokens = Tokens(most=2)
    objects = [object() for _ in range(3)]
    names = [tokens.token(each, "") for each in (*objects, objects[0], objects[0])]
    assert len(set(names[:4])) == 4 and names[3] == names[4]
    tokens.clear()
    assert tokens.token(objects[0], "") not in names


def test_fields_say_what_a_value_is_made_of():
    aval = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    found = fields({"moe": RopeConfig(theta=2.0), "shapes": (aval, [1, None]), "pair": Pair(1, 2)}, "plan")
    assert found["plan['moe'].theta"] == "2.0"
    assert found["plan['shapes'][0]"] == "bfloat16[2, 3]"
    assert found["plan['shapes'][1][1]"] == "None"
    assert found["plan['pair'].b"] == "2"
    assert fields(1) == {"": "1"} and fields((), "x") == {"x": "()"}
    zeros, other = np.zeros(5000), np.zeros(5000)
    other[2500] = 1
    assert fields(zeros) != fields(other)
    assert fields("a" * 500) != fields("a" * 501)
    assert fields(jnp.float32, "dtype") == {"dtype": "jax.numpy.float32"}


def test_C63_whatever_gives_another_key_reads_differently_too():
    """But for types that print alike; for those the reason of a compilation is "new key"."""
    values = [*(1, 1.0, True, "1", None, 0.0, -0.0), *((1,), (1, 2), {"a": 1}, {"a": 2}, RopeConfig(theta=2.0))]
    texts = [tuple(fields(value).items()) for value in values]
    assert len(set(texts)) == len(texts)


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


def test_C72_a_thread_that_comes_too_late_to_compile_waits_for_the_one_that_does():
    """Both have seen that nothing is there before either begins."""
    store, both, records = Executables(), threading.Barrier(2, timeout=60), []

    def parts():
        both.wait()
        return {}

    def work() -> None:
        recipe = executables.Recipe(lambda x: x + 1, (aval(3),))
        records.append(store.acquire("key", lambda: recipe, parts=parts)[1])

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [record is None for record in records].count(True) == 1
    assert (store.stats().misses, store.stats().hits) == (1, 1)


def test_C56_a_failed_compilation_leaves_nothing_behind():
    store = Executables()

    def broken(x):
        raise RuntimeError("no")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            get(store, 3, broken)
        assert store.stats().entries == 0
    np.testing.assert_array_equal(get(store, 3)(np.zeros(3, np.float32)), np.ones(3))


def test_C56_who_waited_for_a_compilation_that_failed_compiles_itself():
    store, inside, results = Executables(), threading.Event(), []

    def broken(x):
        inside.set()
        time.sleep(0.2)
        raise RuntimeError("no")

    def first() -> None:
        with pytest.raises(RuntimeError, match="no"):
            get(store, 6, broken)
        results.append("failed")

    def second() -> None:
        inside.wait()
        results.append(float(get(store, 6)(np.zeros(6, np.float32))[0]))

    threads = [threading.Thread(target=work, daemon=True) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(map(str, results)) == ["1.0", "failed"]
    assert (store.stats().misses, store.stats().hits, store.stats().entries) == (2, 0, 1)


def test_donated_arguments_are_given_away():
    store = Executables()
    program = store.get_or_compile(program_key("donate"), lambda x: x + 1, (aval(4),), donate_argnums=(0,))
    x = jnp.zeros(4)
    np.testing.assert_array_equal(program(x), np.ones(4))
    assert x.is_deleted()
