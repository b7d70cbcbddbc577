"""Room for a capture: who goes for it, in which order, and who does not."""

from __future__ import annotations

from typing import Any

import pytest
from toy_step import SEQUENCES, World, equal_list, manifest

from moe_jax.cache.store import PLANS_PER_GRAPH, estimated_bytes

SIZE = estimated_bytes(equal_list(2))
BOUNDS: dict[str, dict[str, Any]] = {"entries": {"max_entries": 2}, "bytes": {"max_bytes": 2 * SIZE}}


def warm(world: World, *rows: int, **changes: Any) -> dict[int, Any]:
    """The executables of some row buckets, each replayed once."""
    found = {}
    for count in rows:
        world.warm(count, **changes)
        found[count] = world.graphs.last.handle
    return found


def move(world: World, rows: int) -> None:
    """Memory that the graph of this row bucket has, and no other."""
    world.place(f"tokens/{rows}", world.oracle.arrays[f"tokens/{rows}"], "arena")


def of_draft(world: World) -> dict[str, Any]:
    """What is another in the certificate of a second namespace, whose owner may change alone."""
    return {"namespace": "draft", "owner_generation": world.registry.owner_generation("draft")}


def counts(world: World) -> tuple[int, int, int]:
    stats = world.counts_add_up()
    return stats["graphs"], stats["evictions"], stats["undestroyed"]


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("times", [1, None])
def test_no_live_graph_goes_in_place_of_one_that_is_not_taken_back(world_for, bound, times):
    """However often: it is tried again when the device has work, and before the next capture."""
    world = world_for(**BOUNDS[bound])
    handles = warm(world, 1, 2)
    move(world, 1)
    assert world.step(1).kind == "direct" and world.graphs.stats()["retired"] == 1
    world.runtime.fail("destroy", times=times)
    assert world.step(1).kind == "capture"
    # The failure of a single call is over when it is tried again, in the same step.
    assert counts(world) == (2, 0, 0 if times else 2)  # beside it what was recorded
    assert world.step(2).handle is handles[2]
    world.runtime.heal()
    assert world.step(1).kind == world.step(1).kind == "replay"
    assert counts(world) == (2, 0, 0)
    world.nothing_leaked()


@pytest.mark.parametrize("bound", BOUNDS)
def test_as_many_live_graphs_go_as_the_bound_demands_whether_cuda_takes_them_back_or_not(world_for, bound):
    """One that is evicted and not taken back does not take the next one along."""
    world = world_for(**BOUNDS[bound])
    handles = warm(world, 1, 2)
    world.step(4)
    world.runtime.fail("destroy", times=None)
    assert world.step(4).kind == "capture"
    assert counts(world) == (2, 1, 2)
    assert world.step(2).handle is handles[2], "the one that was used last"
    world.runtime.heal()
    for _ in range(2):
        world.step(4)
    world.nothing_leaked()


@pytest.mark.parametrize("way", ["owner", "manifest", "memory"])
@pytest.mark.parametrize("noticed", [False, True])
def test_who_is_out_of_date_goes_before_a_live_one(world_for, way, noticed):
    """Also where no step has found that out yet, and though it was used after the live one."""
    world = world_for(max_entries=2)
    world.registry.accept(manifest(namespace="draft"))
    live = warm(world, 1)[1]
    dead = warm(world, 2, **of_draft(world))[2]
    world.step(4)
    if way == "owner":
        world.registry.advance_owner("draft")
    elif way == "manifest":
        world.registry.accept(manifest(namespace="draft"))
    else:
        move(world, 2)
    if noticed:
        world.step(3, phase="prompt", semantics="sequential", sequences=1)
        assert world.graphs.stats()["retired"] == 1
    assert world.step(4).kind == "capture"
    stats = world.counts_add_up()
    assert (stats["graphs"], stats["retired"], stats["evictions"]) == (2, 0, 0)
    assert stats["swept"] == (1 if way != "memory" else 0)
    assert dead not in world.runtime.executables and world.step(1).handle is live
    world.nothing_leaked()


@pytest.mark.parametrize("moves", [False, True])
def test_a_plan_without_a_graph_goes_before_a_live_graph(world_for, moves):
    """Though it was used after that: it is small, and its owner may have moved, which is found out after the step."""
    world = world_for(max_entries=1)
    world.registry.accept(manifest(namespace="draft"))
    live = warm(world, 1)[1]
    prompt = {"phase": "prompt", "semantics": "sequential", "sequences": 1}
    for rows in range(2, SEQUENCES + 1):
        if moves and rows % 3 == 2:
            world.registry.advance_owner("draft")
        world.step(rows, **prompt, **of_draft(world))
        stats = world.counts_add_up()
        assert (stats["graphs"], stats["retired"], stats["evictions"]) == (1, 0, 0)
        assert stats["plans"] <= PLANS_PER_GRAPH
    assert world.step(1).handle is live
    world.nothing_leaked()


@pytest.mark.parametrize("mover", ["owner", "weights"])
def test_what_moves_between_decision_and_capture_is_looked_at_after_it(mover, monkeypatch):
    """By another thread: the graph that is being made is out of date at once, and not lost."""
    world = World(max_entries=2)
    warm(world, 1)
    world.step(2)
    real = world.graphs._decide

    def decide(*arguments):
        decision = real(*arguments)
        if mover == "owner":
            world.registry.advance_owner("main")
        else:
            world.place("embedding", world.oracle.arrays["embedding"], "weights")
        return decision

    monkeypatch.setattr(world.graphs, "_decide", decide)
    assert world.step(2).kind == "capture"
    monkeypatch.undo()
    stats = world.counts_add_up()
    graphs = 0 if mover == "owner" else 1  # with the new weights it is right
    assert stats["graphs"] == graphs
    assert len(world.runtime.executables) == graphs + stats["retired"]
    world.nothing_leaked()
