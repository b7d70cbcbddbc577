"""Graphs that a step refuses: it retires them, and they are destroyed when the host has time, within all bounds."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from toy_step import World, equal_list, manifest, step_launches, weights

from moe_jax.cache import store
from moe_jax.cache.identity import Mismatch
from moe_jax.cache.outcome import NotReplayed, Reason, RequiredStepFailed, StoreUnusable
from moe_jax.cache.runtime import StickyError
from moe_jax.cache.store import GraphStore, estimated_bytes
from moe_jax.pallas_kernels.errors import CudaError

ROWS = 2
# What makes a warm graph of two rows unusable, and why the step says that it runs direct.
REFUSALS: dict[str, tuple[Callable[[World], Any], Reason]] = {
    "weights": (lambda world: world.place("down.0", weights(7)["down.0"], "weights"), Reason.WEIGHTS_MOVED),
    "arena": (lambda world: world.place("kv.0", world.read("kv.0"), "arena"), Reason.REALLOCATED),
    "manifest": (lambda world: world.registry.accept(manifest()), Reason.FIRST_CALL),
    "owner": (lambda world: world.registry.advance_owner("main"), Reason.FIRST_CALL),
    "admission": (lambda world: world.registry.close_admission("main", "for one step"), Reason.ADMISSION_CLOSED),
    "property": (lambda world: {"launches": step_launches(ROWS, extent=64)}, Reason.PROPERTIES_CHANGED),
}


def queue(world: World, rows: int, launches=None) -> Any:
    """One step that is left in flight."""
    launches = launches or equal_list(rows)
    outcome = world.graphs.step(launches, world.certificate(rows, rows), world.table)
    world.oracle.run(launches)
    return outcome


def watched(world: World, monkeypatch) -> list[tuple[str, Any]]:
    """Every launch and every destruction of an executable, in order."""
    seen: list[tuple[str, Any]] = []
    launch, destroy = world.runtime.launch_graph, world.runtime.destroy

    def launched(executable, stream) -> None:
        seen.append(("launch", executable))
        launch(executable, stream)

    def destroyed(graph) -> None:
        if graph in world.runtime.executables:
            seen.append(("destroy", graph))
        destroy(graph)

    monkeypatch.setattr(world.runtime, "launch_graph", launched)
    monkeypatch.setattr(world.runtime, "destroy", destroyed)
    return seen


def warm(world: World, *rows: int) -> dict[int, Any]:
    """The executables of some row buckets, each replayed once."""
    found = {}
    for count in rows:
        world.warm(count)
        found[count] = world.graphs.last.handle
    return found


def move(world: World, *rows: int) -> None:
    """Memory that the graphs of these row buckets have, and no other."""
    for count in rows:
        world.place(f"tokens/{count}", world.oracle.arrays[f"tokens/{count}"], "arena")


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refused_step_destroys_nothing_and_the_next_graph_takes_it_along(world_for, refusal, monkeypatch):
    happen, reason = REFUSALS[refusal]
    world = world_for()
    handle = warm(world, ROWS)[ROWS]
    changes = happen(world)
    changes = changes if isinstance(changes, dict) else {}
    seen = watched(world, monkeypatch)
    outcome = world.step(ROWS, **changes)
    assert (outcome.kind, outcome.reason) == ("direct", reason)
    stats = world.counts_add_up()
    assert seen == [] and handle in world.runtime.executables
    assert (stats["graphs"], stats["retired"], stats["undestroyed"]) == (0, 1, 0)
    if refusal == "admission":
        world.registry.open_admission("main")
        assert world.step(ROWS).kind == "direct" and seen == []
    outcome = world.step(ROWS, **changes)
    assert outcome.kind == "capture" and outcome.handle is not handle
    assert seen == [("launch", outcome.handle), ("destroy", handle)], "when the device has work"
    assert world.step(ROWS, **changes).kind == "replay" and len(seen) == 3
    stats = world.counts_add_up()
    assert (stats["graphs"], stats["retired"], stats["destroy_errors"]) == (1, 0, 0)
    world.nothing_leaked()


def test_each_replay_takes_one_along_the_oldest_first(world_for, monkeypatch):
    world = world_for()
    handles = warm(world, 1, 2, 3, 4)
    move(world, 1, 2, 3)
    seen = watched(world, monkeypatch)
    for number, old in enumerate([None, handles[1], handles[2], handles[3], None]):
        assert world.step(4).handle is handles[4]
        assert seen == [("launch", handles[4])] + [("destroy", old)] * (old is not None), number
        seen.clear()
    assert world.graphs.stats()["retired"] == 0


def test_who_waits_is_not_waited_for(monkeypatch):
    """A graph whose last launch is still in flight keeps its place, and the next one is looked at."""
    world = World()
    handles = warm(world, 1, 2, 4)
    for rows in (1, 4):
        world.inputs(rows, rows)
    world.graphs.drain()
    queue(world, 1)
    for rows in (1, 2):
        move(world, rows)
        queue(world, 4)
    seen, waits = watched(world, monkeypatch), world.runtime.calls["wait"]
    for _ in range(3):
        queue(world, 4)
    assert [each for each in seen if each[0] == "destroy"] == [("destroy", handles[2])]
    assert world.runtime.calls["wait"] == waits and world.graphs.stats()["retired"] == 1
    world.check(1, 4)
    queue(world, 4)
    assert seen[-1] == ("destroy", handles[1])


@pytest.mark.parametrize("refusal", ["weights", "manifest", "admission"])
def test_memory_of_a_retired_graph_stays_until_it_is_destroyed(refusal):
    """Its last launch is in flight: memory that goes too early is poison by then, or somebody else's."""
    world = World()
    warm(world, ROWS)
    world.inputs(ROWS, ROWS)
    world.graphs.drain()
    old = world.table.get("down.0").address
    queue(world, ROWS)
    REFUSALS[refusal][0](world)
    world.place("down.0", weights(3)["down.0"], "weights")
    queue(world, ROWS)
    gc.collect()
    address, capsule = world.runtime.allocate(world.table.get("down.0").bytes)
    world.runtime.write(address, np.full(64, 0x5A, np.uint8), world.graphs.stream)
    assert old in world.runtime.space.sizes and address != old
    world.check(ROWS)
    assert old in world.runtime.space.sizes, "the executable has its address"
    world.graphs.drain()
    assert old not in world.runtime.space.sizes and not world.runtime.executables
    del capsule


@pytest.mark.parametrize("patience", [1, 3, store.PATIENCE])
def test_where_no_graph_comes_it_goes_after_so_many_direct_steps(world_for, patience, monkeypatch):
    monkeypatch.setattr(store, "PATIENCE", patience)
    world = world_for()
    handles = warm(world, ROWS, 4)
    world.registry.close_admission("main", "for long")
    seen = watched(world, monkeypatch)
    world.step(4)
    for _ in range(2 * patience):
        assert world.step(ROWS).reason is Reason.ADMISSION_CLOSED
    assert {each for each in seen if each[0] == "destroy"} == {("destroy", handle) for handle in handles.values()}
    assert not any(kind == "launch" for kind, _ in seen)
    world.nothing_leaked()


def test_direct_steps_that_follow_a_refusal_are_not_burdened(world_for, monkeypatch):
    """They are counted from the last refusal on."""
    world = world_for()
    handles = warm(world, ROWS, 4)
    world.registry.close_admission("main", "for long")
    seen = watched(world, monkeypatch)
    for rows in (ROWS, 4):
        for _ in range(store.PATIENCE - 1):
            world.step(rows)
    assert seen == [] and world.graphs.stats()["retired"] == 2
    world.step(ROWS)
    assert seen == [("destroy", handles[ROWS])] and world.graphs.stats()["retired"] == 1


@pytest.mark.parametrize("way", ["drain", "sweep", "sweep of a table", "close", "growth"])
def test_outside_a_step_it_goes_at_once(world_for, way):
    world = world_for()
    warm(world, ROWS, 4)
    world.registry.advance_owner("main")
    world.inputs(ROWS, ROWS)
    queue(world, ROWS)
    assert world.graphs.stats()["retired"] == 2
    ways = {
        "drain": world.graphs.drain,
        "sweep": world.graphs.sweep,
        "sweep of a table": lambda: world.graphs.sweep(world.table),
        "close": world.graphs.close,
        "growth": lambda: world.grow("kv.0"),
    }
    ways[way]()
    assert not world.runtime.executables and not world.runtime.graphs
    assert world.graphs.stats()["retired"] == world.graphs.stats()["undestroyed"] == 0


@pytest.mark.parametrize("way", ["sweep of a table", "growth"])
def test_what_is_out_of_date_goes_at_once_without_a_step(way):
    world = World()
    warm(world, ROWS, 4)
    if way == "growth":
        world.grow("kv.0")
    else:
        world.place("down.0", weights(1)["down.0"], "weights")
        world.graphs.sweep(world.table)
    assert not world.runtime.executables and world.graphs.stats()["retired"] == 0


@pytest.mark.parametrize("options", [{"max_entries": 2}, {"max_bytes": 200_000}], ids=str)
def test_bounds_hold_with_those_that_wait(world_for, options, monkeypatch):
    """At any time: looked at where an executable is made."""
    world = world_for(**options)
    real, most = world.runtime.instantiate, []
    size = estimated_bytes(equal_list(ROWS))

    def instantiate(captured):
        executable = real(captured)
        most.append(len(world.runtime.executables))
        return executable

    monkeypatch.setattr(world.runtime, "instantiate", instantiate)
    rng = np.random.default_rng(0)
    retired = 0
    for _ in range(120):
        event = int(rng.integers(4))
        if event == 0:
            world.registry.advance_owner("main")
        elif event == 1 and world.buckets:
            move(world, int(rng.choice(sorted(world.buckets))))
        world.step(int(rng.integers(1, 5)))
        retired = max(retired, world.counts_add_up()["retired"])
    assert retired and max(most) == 2 == min(options.get("max_entries", 2), options.get("max_bytes", 1 << 30) // size)
    world.nothing_leaked()


def test_those_that_wait_make_room_before_a_live_one_does(world_for, monkeypatch):
    world = world_for(max_entries=2)
    handles = warm(world, 1, 2)
    move(world, 1)
    seen = watched(world, monkeypatch)
    assert world.kinds(2, 1) == ("direct", "capture")
    assert seen[0] == ("destroy", handles[1]) and world.graphs.stats()["evictions"] == 0
    assert world.step(2).handle is handles[2]


@pytest.mark.parametrize("call", ["destroy", "event_done"])
def test_an_error_there_does_not_disturb_the_step(world_for, call):
    world = world_for()
    handles = warm(world, 2, 4)
    move(world, 2)
    world.step(4)
    world.graphs.wait(world.graphs.last)
    world.inputs(4, 4)
    world.runtime.fail(call)
    outcome = queue(world, 4)
    assert outcome.handle is handles[4] and outcome.event is not None
    world.check(4)
    stats = world.counts_add_up()
    assert (stats["destroy_errors"], stats["retired"], stats["undestroyed"], stats["graphs"]) == (1, 0, 1, 1)
    assert not stats["graph_error"] and stats["fallback"] == 0
    assert world.step(4).handle is handles[4]
    assert world.graphs.stats()["undestroyed"] == 0
    world.nothing_leaked()


@pytest.mark.parametrize("call", ["destroy", "event_done"])
def test_one_that_is_not_taken_back_keeps_no_other_from_its_turn(call, monkeypatch):
    world = World()
    handles = warm(world, 1, 2, 4)
    entry = next(e for e in world.graphs._store.captured if e.executable is handles[1])
    refused = handles[1] if call == "destroy" else entry.event
    move(world, 1, 2)
    real = getattr(world.runtime, call)

    def failing(given) -> Any:
        if given is refused:
            raise CudaError(call, where="test", got="CUDA_ERROR_UNKNOWN", wanted="CUDA_SUCCESS")
        return real(given)

    monkeypatch.setattr(world.runtime, call, failing)
    for _ in range(3):
        world.step(4)
    assert world.runtime.executables == {handles[1], handles[4]}
    monkeypatch.undo()
    world.step(4)
    world.nothing_leaked()


def test_a_sticky_error_there_ends_the_store_which_lets_go_of_the_memory():
    world = World()
    warm(world, 2, 4)
    old = world.table.get("tokens/2").address
    move(world, 2)
    world.step(4)
    world.inputs(4, 4)
    world.runtime.fail("event_done", sticky=True, name="CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(StickyError):
        queue(world, 4)
    with pytest.raises(StoreUnusable, match="dead"):
        queue(world, 4)
    world.graphs.close()
    gc.collect()
    assert old not in world.runtime.space.sizes and world.graphs.stats()["retired"] == 0


def test_a_dead_store_lets_go_of_the_memory_of_those_that_wait():
    world = World()
    warm(world, ROWS)
    old = world.table.get("down.0").address
    REFUSALS["weights"][0](world)
    world.inputs(ROWS, ROWS)
    queue(world, ROWS)
    world.runtime.fail("wait", sticky=True)
    with pytest.raises(StickyError):
        world.graphs.drain()
    assert old in world.runtime.space.sizes
    world.graphs.close()
    gc.collect()
    assert old not in world.runtime.space.sizes


def test_a_required_step_that_fails_closed_has_time(world_for):
    """Nothing is launched, so nobody waits."""
    world = world_for()
    warm(world, ROWS)
    world.registry.close_admission("main", "for one step")
    with pytest.raises(RequiredStepFailed):
        world.graphs.step(equal_list(ROWS), world.certificate(ROWS, ROWS, required=True), world.table)
    assert not world.runtime.executables and world.graphs.stats()["retired"] == 0


@pytest.mark.parametrize("mode", ["simulate", "strict"])
def test_a_step_that_raises_retires_what_is_out_of_date_all_the_same(mode):
    world = World(mode=mode)
    for rows in (2, 4):
        world.inputs(rows, rows)
        world.graphs.warm(equal_list(rows), world.certificate(rows, rows), world.table)
    world.registry.advance_owner("main")
    if mode == "simulate":
        world.runtime.fail("launch")
    with pytest.raises(NotReplayed if mode == "strict" else CudaError):
        world.graphs.step(equal_list(2), world.certificate(2, 2), world.table)
    stats = world.graphs.stats()
    assert (stats["graphs"], stats["swept"], stats["retired"]) == (0, 2, 2)
    world.graphs.drain()
    world.nothing_leaked()


def test_graphs_of_other_keys_are_looked_at_when_the_step_is_queued(monkeypatch):
    world = World()
    warm(world, 2, 4)
    world.registry.advance_owner("main")
    world.inputs(2, 2)
    before, real, seen = world.runtime.calls["launch"], world.graphs._store.sweep, []

    def sweep(*arguments) -> None:
        seen.append(world.runtime.calls["launch"] - before)
        real(*arguments)

    monkeypatch.setattr(world.graphs._store, "sweep", sweep)
    queue(world, 2)
    assert seen == [sum(hasattr(launch, "spec") for launch in equal_list(2).launches)]


def test_why_is_put_into_words_when_somebody_asks(monkeypatch):
    world = World()
    warm(world, ROWS)
    REFUSALS["weights"][0](world)
    monkeypatch.setattr(Mismatch, "__str__", lambda self: pytest.fail("nobody has asked"))
    outcome = world.step(ROWS)
    monkeypatch.undo()
    was = outcome.mismatch.was, outcome.mismatch.now
    assert outcome.detail == f"resources: {outcome.mismatch.path} was {was[0]}, is {was[1]}"
    assert world.step(ROWS).detail is None


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("event", ["owner", "weights"])
def test_what_an_interrupted_step_has_not_looked_at_the_next_one_does(event, number, monkeypatch):
    """Registry and table do not move again, and no step comes to the keys of the graphs that are out of date."""
    world = World()
    warm(world, 1, 2, 4)
    old = world.table.get("down.0").address
    world.inputs(3, 3)
    world.graphs.drain()
    REFUSALS[event][0](world)
    prompt = {"phase": "prompt", "semantics": "sequential", "sequences": 1}
    step = equal_list(3), world.certificate(3, 3, **prompt), world.table
    real, calls = GraphStore.retire, 0

    def retire(store, entry) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            raise KeyboardInterrupt
        real(store, entry)

    monkeypatch.setattr(GraphStore, "retire", retire)
    with pytest.raises(KeyboardInterrupt):
        world.graphs.step(*step)
    monkeypatch.undo()
    world.graphs.step(*step)
    stats = world.counts_add_up()
    assert (stats["graphs"], stats["retired"]) == (0, 3)
    world.graphs.drain()
    gc.collect()
    assert not world.runtime.executables
    assert (old in world.runtime.space.sizes) == (event == "owner"), "the memory of graphs that no step comes to"


def test_one_that_is_not_taken_back_is_waited_for_once():
    world = World()
    warm(world, 2, 4)
    for rows in (2, 4):
        world.inputs(rows, rows)
    world.graphs.drain()
    world.runtime.fail("launch_graph")
    world.runtime.fail("destroy", times=None)
    queue(world, 2)
    waits = world.runtime.calls["synchronize"]
    for _ in range(3):
        queue(world, 4)
    assert world.graphs.stats()["undestroyed"] and world.runtime.calls["synchronize"] == waits
    world.runtime.heal()
    world.check(2, 4)


def test_an_update_keeps_the_memory_of_the_launch_before(monkeypatch):
    """Another thread replaces an array after the step was decided, and the launch before is in flight."""
    world = World(decode_boundary_overlap=True)
    warm(world, ROWS)
    world.inputs(ROWS, ROWS)
    world.graphs.drain()
    old = world.table.get("down.0").address
    queue(world, ROWS)
    real = world.graphs._decide

    def decide(*arguments):
        decision = real(*arguments)
        world.place("down.0", weights(5)["down.0"], "weights")
        return decision

    monkeypatch.setattr(world.graphs, "_decide", decide)
    assert queue(world, ROWS, step_launches(ROWS, extent=64)).kind == "update"
    gc.collect()
    assert old in world.runtime.space.sizes, "a launch that is in flight reads it"
    world.graphs.drain()
    monkeypatch.undo()
    queue(world, ROWS, step_launches(ROWS, extent=64))
    gc.collect()
    assert old not in world.runtime.space.sizes
