"""Launch lists and the memory they name."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from toy_step import HostFunction, kernel, manifest, step_launches

from moe_jax import cache
from moe_jax.cache.launches import Buffer, Copy, Launch, LaunchList, Operand, _take, dense
from moe_jax.cache.names import one_of
from moe_jax.cache.registry import Registry
from moe_jax.cache.resources import Resource, ResourceTable, next_serial
from moe_jax.errors import InvalidArgument
from moe_jax.pallas_kernels.spec import Argument, KernelSpec

ROOT = Path(__file__).parents[2]


def resource(size: int = 64, **changes) -> Resource:
    values = {
        "address": 1 << 20,
        "bytes": size,
        "layout": dense("", "uint8", (size,)).layout,
        "serial": next_serial(),
        "use": "arena",
    }
    return Resource(**(values | changes))


def test_equal_lists_have_one_key_and_any_change_another():
    whole = step_launches(2)
    assert whole.key == step_launches(2).key and hash(whole) == hash(step_launches(2))
    embed, *rest = whole.launches
    changed = [
        step_launches(4),
        step_launches(2, layers=1),
        step_launches(2, restrided="down.0"),
        replace(whole, buffers=(*whole.buffers, dense("more", "float32", (1,)))),
        replace(whole, launches=(*rest, embed)),
        replace(whole, launches=whole.launches[:-1]),
        replace(whole, launches=(replace(embed, expert=True), *rest)),
        replace(whole, launches=(replace(embed, spec=replace(embed.spec, num_warps=2)), *rest)),
        replace(whole, launches=(replace(embed, spec=replace(embed.spec, grid=(3, 1, 1))), *rest)),
    ]
    keys = [each.key for each in (whole, *changed)]
    assert len(set(keys)) == len(keys)
    assert dense("x", "float32", (np.int64(2), 3)).layout == dense("x", "float32", (2, 3)).layout
    numbers = (np.int64(4), np.int64(1)), (4, 1)
    a, b = (LaunchList((Buffer("x", "float32", (2, 4), strides),), ()) for strides in numbers)
    assert a.key == b.key


def test_the_extent_of_a_copy_is_no_part_of_the_key_and_of_equality():
    whole, part = step_launches(2), step_launches(2, extent=64)
    assert whole.key == part.key and whole != part
    assert (whole.extents, part.extents) == ((256,), (64,))


def test_C68_keys_of_launch_lists_are_the_same_in_another_process():
    code = "from toy_step import *; from moe_jax.cache import *; print(step_launches(2).key, manifest().key)"
    found = set()
    for seed in ("1", "2"):
        paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1 and len(found.pop().split()[0]) == 64


def test_lists_are_immutable():
    launches = step_launches(1)
    with pytest.raises(FrozenInstanceError):
        launches.buffers = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda b, launch: ((*b, b[0]), (launch,)), r"buffers: got \['tokens/2'\] twice"),
        (lambda b, launch: (b[1:], (launch,)), r"LaunchList\[0\] \(embed\): tokens: buffer: got tokens/2"),
        (lambda b, launch: (b, (replace(launch, operands=launch.operands[1:]),)), r"operands: got 5, wanted 6"),
        (lambda b, launch: (b, (moved(launch, Operand("x/2")),)), "dtype of x/2: got float32, wanted int32"),
        (
            lambda b, launch: (b, (moved(launch, Operand("tokens/2", 16)),)),
            "extent: got bytes 16 to 24, wanted within 8",
        ),
        (lambda b, launch: (b, (moved(launch, Operand("arena/2", 8)),)), "offset: got 8, wanted a multiple of 16"),
        (lambda b, launch: (b, (moved(launch, Operand("arena/2", -16)),)), "offset: got -16"),
        (
            lambda b, launch: (b, (Copy(Operand("x/2"), Operand("y/2"), 33),)),
            r"\[0\] \(copy\): extent: got bytes 0 to 33",
        ),
        (lambda b, launch: (b, (Copy(Operand("x/2"), Operand("y/2"), -1),)), "extent"),
        (lambda b, launch: (b, (Copy(Operand("x/2"), Operand("no"), 1),)), "buffer: got no"),
    ],
)
def test_lists_that_cannot_be_launched_are_refused(change, problem):
    launches = step_launches(2)
    buffers, listed = change(launches.buffers, launches.launches[0])
    with pytest.raises(InvalidArgument, match=problem):
        LaunchList(tuple(buffers), tuple(listed))


def same(operand: Operand, *shape: int) -> Launch:
    """Reads as many numbers, and writes them elsewhere."""
    return Launch(kernel(lambda x: x, {"y": ("float32", *shape)}, x=("float32", *shape)), (operand, Operand("y")))


GAPS = Buffer("x", "float32", (2, 4), (8, 1))
TURNED = Buffer("x", "float32", (2, 4), (1, 2))


@pytest.mark.parametrize(
    ("buffer", "launch"),
    [
        (GAPS, same(Operand("x"), 2, 4)),
        (TURNED, same(Operand("x"), 2, 4)),
        (GAPS, same(Operand("x"), 8)),  # one axis, but not all that is there: who reads it knows no gaps
        (GAPS, same(Operand("x"), 12, 1)),
        (GAPS, same(Operand("x", 32), 4)),
        (Buffer("x", "float32", (2, 4), (0, 1)), same(Operand("x"), 1, 4)),
        (Buffer("x", "uint8", (2, 32), (64, 1)), same(Operand("x"), 8)),
    ],
)
def test_a_kernel_that_reads_side_by_side_what_does_not_lie_so_is_refused(buffer, launch):
    wanted = rf"strides of x: got \[{buffer.strides[0]}, {buffer.strides[1]}\], wanted \["
    with pytest.raises(InvalidArgument, match=rf"LaunchList\[0\] \(<lambda>\): x: {wanted}"):
        LaunchList((buffer, dense("y", "float32", (16,))), (launch,))
    written = replace(launch, operands=(Operand("y"), Operand("x", launch.operands[0].offset)))
    with pytest.raises(InvalidArgument, match=rf"LaunchList\[0\] \(<lambda>\): y: {wanted}"):
        LaunchList((buffer, dense("y", "float32", (16,))), (written,))


@pytest.mark.parametrize(
    ("buffer", "launch"),
    [
        # All that is there as one axis: the kernel finds the elements itself.
        (GAPS, same(Operand("x"), 12)),
        (TURNED, same(Operand("x"), 8)),
        # Side by side: of an axis with one entry, and where there is none, strides say nothing.
        (Buffer("x", "float32", (1, 2, 4), (99, 4, 1)), same(Operand("x"), 2, 4)),
        (Buffer("x", "float32", (2, 1, 4), (4, 99, 1)), same(Operand("x", 16), 4)),
        (Buffer("x", "float32", (0, 4), (9, 9)), same(Operand("x"), 0, 4)),
        (Buffer("x", "float32", (), ()), same(Operand("x"))),
        (dense("x", "uint8", (64,)), same(Operand("x", 16), 2, 4)),
        # A copy takes bytes as they lie.
        (GAPS, Copy(Operand("y"), Operand("x"), 48)),
    ],
)
def test_memory_that_a_kernel_reads_as_it_lies(buffer, launch):
    assert LaunchList((buffer, dense("y", "float32", (16,))), (launch,)).launches == (launch,)


@pytest.mark.parametrize(("target", "source", "size"), [(0, 0, 1), (16, 0, 17), (0, 16, 32), (32, 0, 64)])
def test_a_copy_onto_a_part_of_its_own_source_is_refused(target, source, size):
    buffers = dense("a", "uint8", (256,)), dense("b", "uint8", (256,))
    problem = rf"LaunchList\[1\] \(copy\): target: got a, bytes {target} to {target + size}, wanted none of {source} to"
    fine = Copy(Operand("b", target), Operand("a", source), size)
    with pytest.raises(InvalidArgument, match=problem):
        LaunchList(buffers, (fine, replace(fine, target=Operand("a", target))))


@pytest.mark.parametrize(("target", "source", "size"), [(0, 0, 0), (16, 0, 16), (0, 32, 32)])
def test_a_copy_within_a_buffer_beside_its_source_is_not(target, source, size):
    LaunchList((dense("a", "uint8", (256,)),), (Copy(Operand("a", target), Operand("a", source), size),))


EARLY_BUFFERS = (
    dense("arena", "uint8", (256,)),
    *(dense(name, "float32", (8,)) for name in ("position", "x", "y")),
)


def toy_launch(name: str, position: Operand, x: str = "x", y: str = "y", role: str = "in", **options) -> Launch:
    """Eight numbers each: ``position``, read early unless it is written, and ``x``; and the output ``y``."""
    roles = {"position": role, "x": "in", "y": "out"}
    options = {"early": ("position",) if role == "in" else (), "pdl": True, **options}
    spec = KernelSpec(
        name=name, function=HostFunction(None, [*roles]), constexprs=(), grid=(1, 1, 1), num_warps=1, num_stages=1,
        arguments=tuple(Argument(a, "float32", (8,), each) for a, each in roles.items()),
        enable_fp_fusion=False, **options,
    )  # fmt: skip
    return Launch(spec, (position, Operand(x), Operand(y)))


POSITION = Operand("position")
OPENS = toy_launch("embed", POSITION, early=(), opens=True)
READS = toy_launch("attend", POSITION)


@pytest.mark.parametrize(
    ("launches", "problem"),
    [
        (
            (READS,),
            r"LaunchList\[0\] \(attend\): position: early read: got attend, wanted a list whose first launch opens",
        ),
        (
            (toy_launch("embed", POSITION, early=()), READS),
            r"LaunchList\[1\] \(attend\): position: early read: got embed, wanted a list whose first launch opens",
        ),
        (
            (OPENS, toy_launch("advance", POSITION, role="inout"), READS),
            r"LaunchList\[2\] \(attend\): position: early read: got position, which launch 1 \(advance\) writes, "
            "wanted memory that neither it nor a launch before writes",
        ),
        ((OPENS, toy_launch("make", Operand("arena"), y="position"), READS), r"got position, which launch 1 \(make\)"),
        ((OPENS, Copy(POSITION, Operand("x"), 4), READS), r"got position, which launch 1 \(copy\)"),
        # Its own last bytes, and its first ones.
        ((OPENS, Copy(Operand("arena", 48), Operand("x"), 8), toy_launch("attend", Operand("arena", 32))), "got arena"),
        ((OPENS, Copy(Operand("arena"), Operand("x"), 32), toy_launch("attend", Operand("arena", 16))), "got arena"),
        (
            (
                OPENS,
                toy_launch("make", Operand("arena", 80), role="inout"),
                READS,
                toy_launch("a", Operand("arena", 64)),
            ),
            r"LaunchList\[3\] \(a\): position: early read: got arena, which launch 1 \(make\)",
        ),
        # By the first launch as well, and by itself: one program may write while another has not read.
        ((toy_launch("embed", POSITION, y="position", early=(), opens=True), READS), r"which launch 0 \(embed\)"),
        ((OPENS, toy_launch("attend", POSITION, y="position")), r"got position, which launch 1 \(attend\) writes"),
    ],
)
def test_memory_read_before_the_wait_is_written_by_no_launch_before(launches, problem):
    with pytest.raises(InvalidArgument, match=problem):
        LaunchList(EARLY_BUFFERS, launches)


@pytest.mark.parametrize(
    "launches",
    [
        (OPENS, READS, toy_launch("advance", POSITION, role="inout")),
        (OPENS, READS, Copy(POSITION, Operand("x"), 32)),
        # Beside it in the same buffer, on both sides; nothing at all.
        (OPENS, Copy(Operand("arena"), Operand("x"), 32), toy_launch("attend", Operand("arena", 32))),
        (OPENS, Copy(Operand("arena", 64), Operand("x"), 32), toy_launch("attend", Operand("arena", 32))),
        (OPENS, Copy(POSITION, Operand("x"), 0), READS),
        # What is read after the wait may be written.
        (OPENS, toy_launch("make", POSITION, y="x"), READS),
        (OPENS, toy_launch("make", POSITION, role="inout"), toy_launch("late", POSITION, early=())),
        # Without programmatic launch nothing is early, and a first launch or copy waits by itself.
        (OPENS, toy_launch("make", POSITION, role="inout"), toy_launch("attend", POSITION, pdl=False)),
        (toy_launch("embed", POSITION, pdl=False), READS),
        (Copy(Operand("x"), Operand("y"), 32), READS),
        (toy_launch("attend", POSITION, pdl=False),),
        (toy_launch("embed", POSITION, early=()), toy_launch("route", POSITION, early=())),
    ],
)
def test_lists_that_read_before_the_wait_only_what_stays(launches):
    assert LaunchList(EARLY_BUFFERS, launches).launches == launches


def moved(launch: Launch, operand: Operand) -> Launch:
    return replace(launch, operands=(operand, *launch.operands[1:]))


def test_every_mutation_of_a_table_moves_its_version():
    table, versions = ResourceTable(), []
    first, second, larger = resource(), resource(), resource(128)
    for mutate in (
        lambda: table.bind("a", first),
        lambda: table.replace("a", second),
        lambda: table.grow("a", larger),
        lambda: table.release("a"),
    ):
        mutate()
        versions.append(table.version)
    assert versions == [1, 2, 3, 4] and table.get("a") is None
    assert ResourceTable().serial != table.serial


def test_a_table_knows_which_names_moved_since_a_version():
    table = ResourceTable()
    for name in "abc":
        table.bind(name, resource())
    assert sorted(table.moved(0)) == ["a", "b", "c"] and table.moved(table.version) == []
    version = table.version
    table.replace("b", resource())
    table.replace("b", resource())
    assert table.moved(version) == ["b"]
    table.release("a")
    assert sorted(table.moved(version)) == ["a", "b"] and table.moved(version + 2) == ["a"]
    table.bind("a", resource())
    assert sorted(table.moved(version)) == ["a", "b"] and sorted(table.moved(2)) == ["a", "b", "c"]


class Interrupted(BaseException):
    pass


MUTATIONS = {
    "bind": lambda table: table.bind("d", resource()),
    "replace": lambda table: table.replace("a", resource()),
    "grow": lambda table: table.grow("a", resource()),
    "release": lambda table: table.release("a"),
}


@pytest.mark.parametrize("line", range(1, 16))
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_an_interrupt_within_a_mutation_leaves_the_old_state_or_the_new_one(mutation, line):
    """At any line of it: memory and version move together, and what has moved is among the names that it gives."""
    table, lines = ResourceTable(), []
    for name in "abc":
        table.bind(name, resource())
    version = table.version
    table.replace("a", resource())
    before, held, values = table.snapshot()
    copies = dict(held), dict(values)

    def trace(frame, event, _):
        if frame.f_code.co_name not in ("_set", "_swap", mutation):
            return trace if event == "call" else None
        # Each once: a `with` is come to again at its end, where Python lets no interrupt in.
        if event == "line" and frame.f_lineno not in lines:
            lines.append(frame.f_lineno)
            if len(lines) == line:
                raise Interrupted
        return trace

    tracer = sys.gettrace()
    sys.settrace(trace)
    try:
        MUTATIONS[mutation](table)
    except Interrupted:
        pass
    finally:
        sys.settrace(tracer)
    seen, present, witnesses = table.snapshot()
    assert (seen == before) == (present == copies[0]) and (held, values) == copies
    assert witnesses == {name: each.witness for name, each in present.items()}
    if seen != before:
        assert seen == before + 1 and table.moved(before) == ["d" if mutation == "bind" else "a"]
    assert "a" in table.moved(version)
    table.replace("b", resource())
    assert "a" in table.moved(version) and "b" in table.moved(seen) and table.version == seen + 1


def test_later_mutations_change_no_snapshot():
    table = ResourceTable()
    first, second = resource(), resource()
    table.bind("a", first)
    seen = table.snapshot()
    table.replace("a", second)
    table.bind("b", first)
    assert seen == (1, {"a": first}, {"a": first.witness})
    assert table.snapshot().resources == {"a": second, "b": first} and table.get("a") is second
    assert table.snapshot().witnesses == {"a": second.witness, "b": first.witness}


def test_tables_refuse_what_is_not_theirs_and_do_not_move():
    table = ResourceTable()
    table.bind("a", resource(128))
    table.bind("w", resource(128, use="weights"))
    for call, problem in (
        (lambda: table.bind("a", resource()), "'a' bound already"),
        (lambda: table.replace("b", resource()), r"name: got 'b', wanted one of \['a', 'w'\]"),
        (lambda: table.release("b"), "'b'"),
        (lambda: table.grow("b", resource()), "'b'"),
        (lambda: table.grow("a", resource(64)), "bytes of 'a': got 64, wanted at least 128"),
        (lambda: table.grow("w", resource(256, use="weights")), "use of 'w': got weights → weights, wanted arenas"),
    ):
        with pytest.raises(InvalidArgument, match=problem):
            call()
    assert table.version == 2


def test_an_unknown_name_among_many_is_answered_with_the_nearest():
    """A model has hundreds of them."""
    table, whole = ResourceTable(), step_launches(2)
    for buffer in whole.buffers:
        table.bind(buffer.name, resource())
    count = len(whole.buffers)
    near = rf"wanted one of {count} names, such as \['gate_up\.0', 'gate_up\.1', "
    for call in (lambda: table.release("gate_up.00"), lambda: table.replace("gate_up.00", resource())):
        with pytest.raises(InvalidArgument, match=rf"name: got 'gate_up\.00', {near}") as caught:
            call()
        assert len(str(caught.value)) < 160
    routed = replace(whole.launches[2], operands=(Operand("gate_up.00"), *whole.launches[2].operands[1:]))
    with pytest.raises(InvalidArgument, match=rf"buffer: got gate_up\.00, {near}"):
        replace(whole, launches=(routed,))
    registry = Registry()
    for name in ("main", "draft", "adapters", "other"):
        registry.accept(manifest(namespace=name))
    with pytest.raises(InvalidArgument, match=r"namespace: got mains, wanted one of 4 names, such as \['main', "):
        registry.advance_owner("mains")


def test_of_few_names_all_are_told():
    assert one_of("b", []) == "one of []" and one_of(3, {"c": 1, "a": 2}) == "one of ['a', 'c']"
    assert one_of("x", "abcd").startswith("one of 4 names, such as ['")


def test_resources_are_checked():
    with pytest.raises(InvalidArgument, match="address: got 0x8"):
        resource(address=8)
    with pytest.raises(InvalidArgument, match="bytes: got 4, wanted at least 64"):
        resource(bytes=4)
    with pytest.raises(InvalidArgument, match="address: got 0x0"):
        resource(address=0)


def test_serials_are_given_once_in_every_thread():
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.extend(next_serial() for _ in range(500))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == len(found) == 2000


def test_a_witness_is_all_of_a_resource_but_its_capsule():
    capsule = object()
    one = resource(capsule=capsule)
    assert one.witness == (one.address, one.serial, one.layout, one.use, one.bytes) and capsule not in one.witness
    assert replace(one, capsule=None).witness == one.witness
    for change in ({"address": 1 << 21}, {"serial": next_serial()}, {"use": "weights"}, {"bytes": 128}):
        assert replace(one, **change).witness != one.witness


def test_launches_of_any_number_of_operands_get_their_addresses():
    buffers = dense("a", "uint8", (256,)), dense("b", "uint8", (256,))
    launches = LaunchList(
        buffers, (Copy(Operand("b", 32), Operand("a", 16), 8), Copy(Operand("a", 16), Operand("b"), 8))
    )
    places = {name: SimpleNamespace(address=address) for name, address in (("a", 1000), ("b", 2000))}
    assert launches.addresses(places) == [(2032, 1016), (1016, 2000)]
    assert launches.uses == {"a": [(0, 1, 16), (1, 0, 16)], "b": [(0, 0, 32), (1, 1, 0)]}
    for count in range(4):
        take = _take([2, 0, 1][:count])
        assert take([10, 11, 12]) == (12, 10, 11)[:count]


def test_capsules_are_no_part_of_equality():
    one = resource(capsule=object())
    assert one == replace(one, capsule=None) and one != replace(one, serial=next_serial())


def test_every_public_name_of_the_cache_resolves():
    assert sorted(cache.__all__) == sorted(cache._HOME_OF)
    for name in cache.__all__:
        assert getattr(cache, name) is not None and name in dir(cache)
    with pytest.raises(AttributeError, match="no attribute 'graph'"):
        _ = cache.graph


def test_importing_the_cache_loads_no_device_code():
    code = "import sys, moe_jax.cache.graphs, moe_jax.cache.simulated; print([m for m in sys.modules if 'cuda' in m])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not [name for name in eval(done.stdout) if name.split(".")[0] in ("cuda", "triton", "jax_triton")]
