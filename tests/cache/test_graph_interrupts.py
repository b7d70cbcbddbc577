"""A step that is interrupted, or stopped by an error that is not of CUDA.

What is queued keeps its memory, what was made is destroyed, and later steps are right. An interrupt comes between two
lines of the store, or during a call of the device: then it is raised when that has returned, its work done.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from toy_step import World, manifest, step_launches, weights

from interrupts import interrupted, named, places
from moe_jax.cache import store
from moe_jax.cache.graphs import Graphs
from moe_jax.cache.outcome import Reason
from moe_jax.cache.resources import Resource, next_serial
from moe_jax.cache.running import Runner
from moe_jax.cache.store import GraphStore
from moe_jax.errors import InvalidArgument
from moe_jax.pallas_kernels.errors import CudaError

ROWS = 2


def interrupted_on_return(world: World, call: str, number: int, act: Callable[[], object]) -> bool:
    """Act, and interrupt it when a call of the device has returned, one of several of that name. Whether it came."""
    real, left = getattr(world.runtime, call), number

    def returning(*arguments: Any) -> Any:
        nonlocal left
        result, left = real(*arguments), left - 1
        if left == -1:
            raise KeyboardInterrupt
        return result

    setattr(world.runtime, call, returning)
    try:
        act()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        setattr(world.runtime, call, real)


def queue(world: World, launches) -> None:
    """One step that is left in flight."""
    world.graphs.step(launches, world.certificate(ROWS, ROWS), world.table, staged=world.staged(launches))


def let_go(world: World) -> None:
    """The table and the collector free what nobody claims; a launch that is in flight finds poison there if so."""
    for name in list(world.oracle.arrays):
        if world.table.get(name) is not None:
            world.table.release(name)
    gc.collect()


def watch_memory(world: World, monkeypatch) -> None:
    """Work that runs finds its memory still there."""
    real = type(world.runtime)._execute

    def execute(self, node) -> None:
        for address in node.addresses:
            assert any(a <= address < a + size for a, size in self.space.sizes.items()), "freed in flight"
        real(self, node)

    monkeypatch.setattr(type(world.runtime), "_execute", execute)


NEW = places(
    *(Runner._instantiated, Runner._upload_and_launch, Runner._commit, Runner._recorded, Runner._set_event),
    *(GraphStore.own, GraphStore.keep, GraphStore.destroy),
)
PLACES = {
    "direct": places(Runner._direct, Runner._launch_direct, Runner.finish, Runner._recorded),
    "staged": places(Runner._direct, Runner._launch_direct, Runner.finish),
    "capture": places(Runner._capture, Runner._record) + NEW,
    "update": places(Runner._update, GraphStore.take) + NEW,
    "update anew": places(Runner._update, Runner._instantiated, GraphStore.own, GraphStore.destroy),
    "replay": places(Runner._replay, Runner._recorded, Runner._set_event),
    # Another graph is retired before, by or in the step.
    "refused": places(Runner._admit_direct, GraphStore.retire, Graphs._observe),
    "swept": places(GraphStore.sweep, GraphStore.forget, GraphStore.retire, Graphs._observe),
    "put off": places(GraphStore.put_off, GraphStore.destroy_one, GraphStore._unowned, GraphStore.destroy),
    "room": places(GraphStore.make_room, GraphStore._unowned, GraphStore.destroy),
    "eviction": places(GraphStore.make_room, GraphStore.forget, GraphStore.retire, GraphStore.destroy),
    "out of date": places(
        Graphs._observe, GraphStore.make_room, GraphStore._unowned, GraphStore.retire, GraphStore.destroy
    ),
    "taken along": places(Runner.run, GraphStore.destroy_one, GraphStore._unowned, GraphStore.destroy),
}
RETIRING = ("refused", "swept", "put off", "room", "eviction", "out of date", "taken along")
CASES = [(kind, *place) for kind, places in PLACES.items() for place in places]


def world_before(kind: str, monkeypatch) -> tuple[World, Any]:
    """One whose next step, of these launches, is of a kind. Before an update or a replay another is in flight."""
    mode, entries = "off" if kind == "direct" else "simulate", 1 if kind in ("room", "eviction", "out of date") else 32
    world = World(mode=mode, layers=1, accept=False, decode_boundary_overlap=True, max_entries=entries)
    world.registry.accept(manifest(layers=1, staged=kind == "staged"))
    whole = step_launches(ROWS, layers=1)
    if kind == "capture":
        world.step(ROWS, launches=whole)
    elif kind in ("update", "update anew", "replay"):
        world.warm(ROWS, launches=whole)
    elif kind in RETIRING:
        with_a_retired_graph(kind, world, whole, monkeypatch)
    world.inputs(ROWS, ROWS)
    if kind in ("update", "update anew", "replay", "refused", "swept"):
        queue(world, whole)
    if kind == "refused":
        world.place("down.0", weights(1)["down.0"], "weights")
    elif kind == "swept":
        world.registry.advance_owner("main")
    if kind == "update anew":
        monkeypatch.setattr(world.runtime, "update", lambda executable, captured: False)
    return world, step_launches(ROWS, layers=1, extent=64) if kind.startswith("update") else whole


def with_a_retired_graph(kind: str, world: World, whole, monkeypatch) -> None:
    """Up to the step in which it is retired or destroyed."""
    if kind in ("eviction", "out of date"):
        world.warm(4, launches=step_launches(4, layers=1))
        world.step(ROWS, launches=whole)
        if kind == "out of date":
            world.place("tokens/4", world.oracle.arrays["tokens/4"], "arena")
        return
    world.warm(ROWS, launches=whole)
    if kind in ("refused", "swept"):
        return
    if kind == "put off":
        monkeypatch.setattr(store, "PATIENCE", 2)
        world.registry.close_admission("main", "for long")
    world.place(f"tokens/{ROWS}", world.oracle.arrays[f"tokens/{ROWS}"], "arena")
    world.step(ROWS, launches=whole)
    assert world.graphs.stats()["retired"] == 1


@pytest.mark.parametrize(("kind", "function", "line"), CASES, ids=named)
def test_what_is_queued_keeps_its_memory_whichever_line_is_interrupted(kind, function, line, monkeypatch):
    world, launches = world_before(kind, monkeypatch)
    watch_memory(world, monkeypatch)
    interrupted(function, line, lambda: queue(world, launches))
    let_go(world)
    world.graphs.sweep(world.table)
    world.graphs.drain()
    world.graphs.close()
    gc.collect()
    assert not world.runtime.executables and not world.runtime.graphs
    assert world.graphs.stats()["undestroyed"] == 0 and not world.runtime.space.sizes


@pytest.mark.parametrize(("kind", "function", "line"), [c for c in CASES if c[0] != "direct"], ids=named)
def test_later_steps_are_right_whichever_line_is_interrupted(kind, function, line, monkeypatch):
    world, launches = world_before(kind, monkeypatch)
    interrupted(function, line, lambda: queue(world, launches))
    world.graphs.drain()
    # How much of the step has run is not known: the state begins anew.
    for name in world.oracle.arrays:
        world.oracle.arrays[name][...] = world.read(name)
    whole = step_launches(ROWS, layers=1)
    for each in (whole, launches, launches, whole):
        world.step(ROWS, launches=each)
    world.nothing_leaked()
    assert world.graphs.stats()["undestroyed"] == 0


# What a call has made is lost where it does not return it, and is on the device for ever; nothing else is.
MAKE = ("end_capture", "instantiate")
DEVICE_CALLS = (
    *("load", "launch", "copy", "begin_capture", *MAKE, "update", "upload", "launch_graph", "destroy"),
    *("record_event", "event_done", "wait", "synchronize"),
)


# Calls that steps of a kind make among others, so that they are known to be tried.
DIRECT, CAPTURE = {"launch", "record_event"}, {"begin_capture", "launch", "launch_graph", "record_event", *MAKE}
REACHED = {
    **dict.fromkeys(("direct", "staged", "refused", "swept"), DIRECT),
    **dict.fromkeys(
        ("capture", "update anew", "room", "eviction", "out of date", "taken along"), CAPTURE | {"destroy"}
    ),
    "update": CAPTURE - {"instantiate"} | {"update", "destroy"},
    "replay": {"launch_graph", "record_event"},
    "put off": DIRECT | {"destroy"},
}


@pytest.mark.parametrize("kind", PLACES)
def test_an_interrupt_that_arrives_when_a_call_of_the_device_has_returned_loses_nothing(kind, monkeypatch):
    came = set()
    for call, number in itertools.product(DEVICE_CALLS, range(2)):
        with monkeypatch.context() as patch:
            world, launches = world_before(kind, patch)
            watch_memory(world, patch)
            if not interrupted_on_return(world, call, number, lambda w=world, each=launches: queue(w, each)):
                continue
            came.add(call)
            queue(world, launches)
            let_go(world)
            world.graphs.sweep(world.table)
            world.graphs.drain()
            world.graphs.close()
            gc.collect()
            left = len(world.runtime.executables) + len(world.runtime.graphs)
            assert left == (call in MAKE) and world.graphs.stats()["undestroyed"] == 0, call
            assert not world.runtime.space.sizes, call
    assert came >= REACHED[kind]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("way", ["sweep", "drain", "grow", "close"])
def test_a_graph_whose_destruction_is_interrupted_on_return_is_destroyed_once(way, number):
    """The device has taken it back, and the store learns that when it tries again."""
    world = World(layers=1)
    for rows in (1, 2, 4):
        world.warm(rows, launches=step_launches(rows, layers=1))
    world.registry.advance_owner("main")
    ways = {
        "sweep": world.graphs.sweep,
        "drain": lambda: (world.graphs._observe(world.table), world.graphs.drain()),
        "grow": lambda: world.grow("kv.0"),
        "close": world.graphs.close,
    }
    assert interrupted_on_return(world, "destroy", number, ways[way])
    assert len(world.runtime.executables) == 2 - number and world.graphs.stats()["retired"] == 3 - number
    ways[way]()
    assert not world.runtime.executables and world.graphs.stats()["retired"] == 0
    if way != "close":
        world.warm(2, launches=step_launches(2, layers=1))
    world.graphs.close()
    assert world.graphs.stats()["state"] == "closed" and world.graphs.stats()["destroy_errors"] == 0


def bringing_over(world: World, stop: Callable[[], None] = lambda: None) -> Callable[[], Resource]:
    """Makes larger memory for an arena and queues a copy of its contents."""

    def make() -> Resource:
        old = world.table.get("kv.0")
        address, capsule = world.runtime.allocate(2 * old.bytes)
        world.runtime.copy(address, old.address, old.bytes, world.graphs.stream)
        stop()
        return replace(old, address=address, bytes=2 * old.bytes, serial=next_serial(), capsule=capsule)

    return make


def of_cuda() -> CudaError:
    return CudaError("copy", where="make", got="x", wanted="y")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, of_cuda])
def test_growth_that_stops_when_copies_are_queued_waits_for_them(error, monkeypatch):
    """Their target goes with the error."""
    world = World(layers=1)
    watch_memory(world, monkeypatch)
    world.warm(ROWS, launches=step_launches(ROWS, layers=1))

    def stop() -> None:
        raise error()

    version = world.table.version
    with pytest.raises(type(error())):
        world.graphs.grow(world.table, "kv.0", bringing_over(world, stop))
    gc.collect()
    world.runtime.progress(world.graphs.stream)
    assert world.table.version == version
    assert world.step(ROWS, launches=step_launches(ROWS, layers=1)).kind == "replay"


@pytest.mark.parametrize(("function", "line"), places(Graphs.grow), ids=named)
def test_what_growth_has_queued_keeps_its_memory_whichever_line_is_interrupted(function, line, monkeypatch):
    world = World(layers=1)
    watch_memory(world, monkeypatch)
    whole = step_launches(ROWS, layers=1)
    world.warm(ROWS, launches=whole)
    queue(world, whole)
    world.oracle.run(whole)
    interrupted(function, line, lambda: world.graphs.grow(world.table, "kv.0", bringing_over(world)))
    gc.collect()
    world.runtime.progress(world.graphs.stream)
    for _ in range(3):
        world.step(ROWS, launches=whole)
    world.nothing_leaked()
    let_go(world)
    world.graphs.close()
    gc.collect()
    assert not world.runtime.space.sizes and not world.runtime.executables


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_host_staged_step_that_stops_after_launches_keeps_their_memory(error, monkeypatch):
    world, launches = world_before("staged", monkeypatch)
    watch_memory(world, monkeypatch)
    begun = world.staged(launches)

    def staged(stream) -> None:
        begun(stream)
        raise error

    with pytest.raises(error):
        world.graphs.step(launches, world.certificate(ROWS, ROWS), world.table, staged=staged)
    assert world.graphs.stats()["launch_error"] == 0
    let_go(world)
    world.runtime.progress(world.graphs.stream)
    world.graphs.close()
    assert not world.runtime.space.sizes


def test_a_direct_step_interrupted_after_two_launches_keeps_their_memory(monkeypatch):
    world, launches = world_before("direct", monkeypatch)
    watch_memory(world, monkeypatch)
    real, count = world.runtime.launch, 0

    def launch(*arguments) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(world.runtime, "launch", launch)
    with pytest.raises(KeyboardInterrupt):
        queue(world, launches)
    let_go(world)
    world.runtime.progress(world.graphs.stream)
    world.graphs.close()
    assert not world.runtime.space.sizes


@pytest.mark.parametrize("call", ["upload", "launch_graph", "record_event", "destroy"])
def test_an_executable_is_in_the_books_before_its_first_launch(call, monkeypatch):
    world, launches = world_before("capture", monkeypatch)

    def stop(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(world.runtime, call, stop)
    with pytest.raises(KeyboardInterrupt):
        queue(world, launches)
    monkeypatch.undo()
    world.graphs.close()
    assert not world.runtime.executables and not world.runtime.graphs


def test_a_replay_whose_event_is_not_recorded_is_waited_for_before_it_is_destroyed(monkeypatch):
    world, launches = world_before("replay", monkeypatch)
    world.graphs.drain()

    def stop(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(world.runtime, "record_event", stop)
    with pytest.raises(KeyboardInterrupt):
        queue(world, launches)
    monkeypatch.undo()
    refused = world.graphs.stats()["destroy_errors"]
    world.table.release("down.0")
    world.graphs.sweep(world.table)
    assert world.graphs.stats()["destroy_errors"] == refused and not world.runtime.executables


def test_a_host_staged_step_without_its_memory_is_refused_before_it_begins(monkeypatch):
    world, launches = world_before("staged", monkeypatch)
    kept = world.table.release("x/2")
    called = []
    arguments = launches, world.certificate(ROWS, ROWS), world.table
    with pytest.raises(InvalidArgument, match=r"memory of 'x/2': got none"):
        world.graphs.step(*arguments, staged=called.append)
    other = world.table.get("router.0")
    world.table.bind("x/2", other)
    with pytest.raises(InvalidArgument, match="layout of 'x/2'"):
        world.graphs.step(*arguments, staged=called.append)
    assert not called and world.counts_add_up()["prepare_error"] == 2
    world.table.replace("x/2", kept)
    assert world.graphs.step(*arguments, staged=world.staged(launches)).reason is Reason.HOST_STAGED


def test_a_step_of_the_staged_function_does_not_end_the_claim_of_its_own(monkeypatch):
    world, launches = world_before("staged", monkeypatch)
    watch_memory(world, monkeypatch)
    begun = world.staged(launches)

    def staged(stream) -> None:
        queue(world, launches)
        begun(stream)

    world.graphs.step(launches, world.certificate(ROWS, ROWS), world.table, staged=staged)
    let_go(world)
    world.runtime.progress(world.graphs.stream)


def test_only_an_error_of_cuda_counts_as_one(monkeypatch):
    world, launches = world_before("staged", monkeypatch)
    for error, count in ((ValueError("x"), 0), (CudaError("copy", where="staged", got="x", wanted="y"), 1)):

        def staged(stream, error=error) -> None:
            raise error

        with pytest.raises(type(error)):
            world.graphs.step(launches, world.certificate(ROWS, ROWS), world.table, staged=staged)
        assert world.graphs.stats()["launch_error"] == count
