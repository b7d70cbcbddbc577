"""Device graphs on a simulated device: warm-up, replay, bounds, threads, modes."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace

import pytest
from toy_step import GROUPS, World, equal_list, scratch_fits, step_launches, weights

from moe_jax.cache.graphs import Graphs
from moe_jax.cache.identity import Certificate
from moe_jax.cache.outcome import NotReplayed, Reason, StoreUnusable
from moe_jax.cache.registry import Registry
from moe_jax.cache.resources import Resource, ResourceTable, next_serial
from moe_jax.cache.runtime import no_collection
from moe_jax.cache.simulated import SimulatedRuntime
from moe_jax.errors import InvalidArgument
from moe_jax.pallas_kernels.errors import CudaError


@pytest.mark.parametrize("bucket", [1, 2, 4, 8])
def test_call_1_is_direct_2_captures_and_the_rest_replay_with_other_routes(bucket):
    world, handles = World(), set()
    for call in range(8):
        rows = 1 + call % bucket
        outcome = world.step(rows, bucket)
        assert outcome.kind == ("direct", "capture", *["replay"] * 6)[call]
        handles.add(outcome.handle)
    assert len(handles - {None}) == 1
    stats = world.counts_add_up()
    assert (stats["direct"], stats["captures"], stats["replays"], stats["graphs"]) == (1, 1, 6, 1)
    assert (stats["plan_compiles"], stats["declines"], stats["fallback"]) == (1, {"first call": 1}, 0)
    world.nothing_leaked()


def test_replayed_steps_equal_direct_ones_bit_for_bit():
    """Both stores are fed the same; the oracle checks each, and the devices are compared besides."""
    on, off = World(), World(mode="off")
    for call in range(24):
        rows = 1 + call % 4
        for world in (on, off):
            world.step(rows, 4, seed=call)
        for name in ("next/4", "logits/4", "counter", *(f"kv.{i}" for i in GROUPS)):
            assert on.read(name).tobytes() == off.read(name).tobytes()
    assert on.graphs.stats()["replays"] == 22 and off.graphs.stats()["direct"] == 24
    assert off.graphs.stats()["declines"] == {"graphs off": 24} and off.graphs.stats()["fallback"] == 0


def test_warm_makes_the_first_calls():
    world = World()
    for bucket in (1, 4):
        world.inputs(1, bucket)
        launches = step_launches(bucket)
        outcome = world.graphs.warm(launches, world.certificate(1, bucket), world.table)
        assert outcome.kind == "capture"
        for _ in range(2):
            world.oracle.run(launches)
        world.check(bucket)
        assert world.step(bucket).kind == "replay"
        assert world.graphs.warm(launches, world.certificate(1, bucket), world.table).kind == "replay"
        world.oracle.run(launches)


def test_row_buckets_have_graphs_of_their_own_and_the_widest_returns_unchanged():
    world = World()
    world.warm(4)
    handle = world.step(4).handle
    for rows in (3, 2, 1):
        world.warm(rows)
    assert world.step(4).handle is handle
    assert world.graphs.stats()["graphs"] == 4


def test_the_arena_of_the_toy_holds_its_scratch():
    assert scratch_fits()


def test_growth_that_fails_changes_nothing():
    world = World()
    world.warm(2)
    world.runtime.fail("allocate", name="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(Exception, match="CUDA_ERROR_OUT_OF_MEMORY"):
        world.grow("kv.0")
    assert world.step(2).kind == "replay"


def test_growth_waits_for_copies_that_bring_the_contents_over():
    """The old memory goes as soon as the caller lets go of it."""
    world = World()
    world.warm(2)

    def make() -> Resource:
        old = world.table.get("kv.0")
        address, capsule = world.runtime.allocate(old.bytes)
        world.runtime.copy(address, old.address, old.layout.bytes, world.graphs.stream)
        return replace(old, address=address, serial=next_serial(), capsule=capsule)

    world.graphs.grow(world.table, "kv.0", make)
    world.check(2)
    world.warm(2)


def test_growth_that_cannot_be_waited_for_changes_nothing_and_keeps_the_new_memory():
    world = World()
    world.warm(2)
    old = world.table.get("kv.0")
    made = []

    def make() -> Resource:
        address, capsule = world.runtime.allocate(old.bytes)
        world.runtime.copy(address, old.address, old.layout.bytes, world.graphs.stream)
        made.append(weakref.ref(capsule))
        world.runtime.fail("wait")
        return replace(old, address=address, serial=next_serial(), capsule=capsule)

    with pytest.raises(CudaError, match="wait"):
        world.graphs.grow(world.table, "kv.0", make)
    assert world.table.get("kv.0") is old and made[0]() is not None
    assert world.step(2).kind == "replay"
    world.graphs.drain()
    gc.collect()
    assert made[0]() is None


def test_no_step_of_another_thread_comes_between_the_parts_of_growth():
    world = World()
    world.warm(2)
    world.inputs(2, 2)
    outcomes = []

    def step() -> None:
        outcomes.append(world.graphs.step(equal_list(2), world.certificate(2, 2), world.table))

    other = threading.Thread(target=step)

    def make() -> Resource:
        other.start()
        other.join(0.2)
        assert not outcomes
        return world.resource(world.read("kv.0"), "arena")

    world.graphs.grow(world.table, "kv.0", make)
    other.join()
    assert [outcome.reason for outcome in outcomes] == [Reason.REALLOCATED]
    world.oracle.run(equal_list(2))
    world.check(2)


def test_bytes_bound_the_store_too():
    world = World(max_bytes=200_000)
    for rows in (1, 2, 3):
        assert world.kinds(3, rows) == ("direct", "capture", "replay")
    stats = world.counts_add_up()
    assert (stats["graphs"], stats["evictions"]) == (2, 1)
    small = World(max_bytes=1000)
    assert small.kinds(3) == ("direct",) * 3
    assert small.graphs.stats()["declines"] == {"first call": 1, "larger than the store": 2}
    assert "bytes estimated, 1000 allowed" in small.graphs.last.detail


def test_the_collector_is_off_while_any_thread_captures():
    states = []
    with no_collection():
        states.append(gc.isenabled())
        with no_collection():
            pass
        states.append(gc.isenabled())
    assert (states, gc.isenabled()) == ([False, False], True)


def test_a_capture_turns_the_collector_off_for_its_whole_length(monkeypatch):
    world, states = World(), []
    for name in ("begin_capture", "end_capture"):
        call = getattr(world.runtime, name)
        monkeypatch.setattr(world.runtime, name, lambda x, call=call: states.append(gc.isenabled()) or call(x))
    world.kinds(2)
    assert (states, gc.isenabled()) == ([False, False], True)


def test_copies_of_another_extent_update_in_place_or_recapture():
    for overlap in (False, True):
        world = World(decode_boundary_overlap=overlap)
        world.warm(2)
        handle = world.step(2).handle
        small = step_launches(2, extent=64)
        kinds = [world.step(2, launches=small) for _ in range(3)]
        assert [o.kind for o in kinds] == (
            ["update", "replay", "replay"] if overlap else ["direct", "capture", "replay"]
        )
        assert (kinds[-1].handle is handle) == overlap
        assert kinds[0].mismatch.path == "extents" and (kinds[0].mismatch.was, kinds[0].mismatch.now) == ((256,), (64,))
        stats = world.counts_add_up()
        assert (stats["plan_compiles"], stats["updates"], stats["reinstantiations"]) == (2, int(overlap), 0)
        world.nothing_leaked()


def test_an_update_that_is_refused_makes_the_executable_anew(monkeypatch):
    world = World(decode_boundary_overlap=True)
    world.warm(2)
    handle = world.step(2).handle
    monkeypatch.setattr(world.runtime, "update", lambda executable, captured: False)
    outcome = world.step(2, launches=step_launches(2, extent=64))
    assert outcome.kind == "update" and outcome.handle is not handle
    assert world.step(2, launches=step_launches(2, extent=64)).kind == "replay"
    assert world.counts_add_up()["reinstantiations"] == 1
    world.nothing_leaked()


def test_probing_commits_nothing():
    world = World()
    world.warm(2)
    stats = world.graphs.stats()
    certificate = world.certificate(2, 2)
    probes = [
        world.graphs.probe(step_launches(2, extent=64), certificate, world.table),
        world.graphs.probe(step_launches(2), replace(certificate, phase="prompt"), world.table),
        world.graphs.probe(step_launches(2), replace(certificate, rows=9), world.table),
        world.graphs.probe(step_launches(2), certificate, world.table),
    ]
    assert [p.reason for p in probes] == [Reason.PROPERTIES_CHANGED, Reason.PROMPT, Reason.MALFORMED, None]
    assert world.graphs.stats() == stats
    assert world.step(2).kind == "replay"


def test_strict_raises_where_on_would_run_direct():
    world = World(mode="strict")
    world.inputs(2, 2)
    launches, certificate = step_launches(2), world.certificate(2, 2)
    ran = dict(world.runtime.executed)
    with pytest.raises(NotReplayed, match="first call"):
        world.graphs.step(launches, certificate, world.table)
    assert dict(world.runtime.executed) == ran and world.graphs.stats()["steps"] == 0
    world.graphs.warm(launches, certificate, world.table)
    for _ in range(2):
        world.oracle.run(launches)
    assert world.kinds(2) == ("replay", "replay")
    assert world.step(2, phase="prompt").reason is Reason.PROMPT
    world.place("down.0", weights(1)["down.0"], "weights")
    with pytest.raises(NotReplayed, match=r"weights moved \(resources: down\.0\.address was"):
        world.step(2)
    assert world.graphs.warm(launches, certificate, world.table).kind == "capture"


def test_strict_raises_where_a_graph_fails():
    world = World(mode="strict")
    world.inputs(2, 2)
    launches, certificate = step_launches(2), world.certificate(2, 2)
    world.graphs.warm(launches, certificate, world.table)
    world.runtime.fail("launch_graph")
    with pytest.raises(NotReplayed, match="graph failed"):
        world.graphs.step(launches, certificate, world.table)


def test_on_without_cuda_is_inert_and_says_so():
    graphs = Graphs(None, Registry(), mode="on")
    assert graphs.stats()["state"] == "inert: no CUDA device"
    world = World()
    with pytest.raises(StoreUnusable, match="inert: no CUDA device"):
        graphs.step(step_launches(2), world.certificate(2, 2), ResourceTable())
    graphs.close()
    assert graphs.stats()["state"] == "inert: no CUDA device"


def test_modes_and_bounds_are_checked():
    runtime = SimulatedRuntime(1 << 16)
    for options, problem in (
        ({"mode": "maybe"}, "mode: got 'maybe'"),
        ({"max_entries": 0}, "max_entries: got 0"),
        ({"max_bytes": 0}, "max_bytes: got 0"),
    ):
        with pytest.raises(InvalidArgument, match=problem):
            Graphs(runtime, Registry(), **options)
    for mode, wanted in (
        ("simulate", "a SimulatedRuntime, or mode 'on'"),
        ("strict", "the runtime of a CUDA device or a SimulatedRuntime, or mode 'on'"),
    ):
        with pytest.raises(InvalidArgument, match=f"runtime: got '{mode}' with no runtime, wanted {wanted}$"):
            Graphs(None, Registry(), mode=mode)


def test_a_store_that_cannot_be_used_says_what_would_help():
    stores = {
        "inert: no CUDA device, wanted a CUDA device": Graphs(None, Registry()),
        "closed, wanted a store that is open": World().graphs,
    }
    for problem, graphs in stores.items():
        for call in (graphs.drain, graphs.sweep):
            graphs.close()
            with pytest.raises(StoreUnusable, match=f"store of graphs: got {problem}$"):
                call()


def test_close_waits_and_frees_everything_in_order():
    world = World()
    world.warm(2)
    for bucket in (2, 4):
        world.inputs(bucket, bucket)
        world.graphs.step(step_launches(bucket), world.certificate(bucket, bucket), world.table)
    for name in list(world.oracle.arrays):
        world.table.release(name)
    assert world.runtime.space.bytes > 0, "work in flight holds its memory"
    world.graphs.close()
    world.graphs.close()
    gc.collect()
    assert not world.runtime.executables and not world.runtime.graphs and world.runtime.space.bytes == 0
    with pytest.raises(StoreUnusable, match="closed"):
        world.graphs.drain()


def test_memory_released_while_a_direct_step_runs_stays_until_it_is_done():
    world = World(mode="off")
    world.inputs(2, 2)
    world.graphs.step(step_launches(2), world.certificate(2, 2), world.table)
    address = world.table.release("gate_up.0").address
    assert address in world.runtime.space.sizes
    world.oracle.run(step_launches(2))
    world.check(2)
    world.graphs.drain()
    assert address not in world.runtime.space.sizes


def test_a_graph_holds_its_memory_until_it_is_destroyed():
    world = World()
    world.warm(2)
    world.inputs(2, 2)
    world.graphs.step(equal_list(2), world.certificate(2, 2), world.table)
    address = world.table.release("gate_up.0").address
    assert address in world.runtime.space.sizes
    world.oracle.run(equal_list(2))
    world.check(2)
    assert address in world.runtime.space.sizes, "the graph may still be launched"
    world.graphs.sweep(world.table)
    assert address not in world.runtime.space.sizes and not world.runtime.executables


@pytest.mark.parametrize("steps", [(1,), (1, 2), (1, 2, 1, 1), (2, 2, 1, 2)])
def test_the_least_recently_used_graph_goes_first(steps):
    world = World(max_entries=2)
    for rows in (1, 2):
        world.warm(rows)
    assert {world.step(rows).kind for rows in steps} == {"replay"}
    world.warm(3)
    last = steps[-1]
    assert world.step(last).kind == "replay" and world.step(3).kind == "replay"
    assert world.step(3 - last).kind == "direct"


def test_missing_or_other_memory_stops_a_step_before_its_first_launch():
    world = World()
    world.inputs(2, 2)
    launches = step_launches(2)
    ran = world.runtime.calls["launch"]
    kept = world.table.release("down.0")
    with pytest.raises(InvalidArgument, match=r"memory of 'down\.0': got none"):
        world.graphs.step(launches, world.certificate(2, 2), world.table)
    other = replace(kept, layout=kept.layout._replace(strides=(32, 4, 1)), bytes=1 << 10)
    world.table.bind("down.0", other)
    with pytest.raises(InvalidArgument, match=r"layout of 'down\.0'"):
        world.graphs.step(launches, world.certificate(2, 2), world.table)
    world.table.replace("down.0", kept)
    assert world.runtime.calls["launch"] == ran and world.graphs.stats()["prepare_error"] == 2
    world.warm(2)


def test_certificates():
    good = Certificate(namespace="main", owner_generation=1, semantics="independent", rows=2, bucket=4, sequences=2)
    assert good.problem is None and good.identity == ("main", 1, "independent", "decode", 4, 4)
    for change, problem in (
        ({"rows": 0, "sequences": 0}, "0 rows in a bucket of 4"),
        ({"rows": 5, "sequences": 5}, "5 rows"),
        ({"rows": True}, "must be integers"),
        ({"owner_generation": None}, "must be integers"),
        ({"namespace": ""}, "no namespace"),
        ({"semantics": "other"}, "row semantics 'other'"),
        ({"phase": "other"}, "phase 'other'"),
        ({"sequences": 1}, "1 sequences in 2 independent rows"),
        ({"semantics": "sequential"}, "2 sequences in 2 sequential rows"),
        ({"semantics": "speculative", "rows": 3}, "2 sequences in 3 speculative rows"),
    ):
        assert problem in (replace(good, **change).problem or "")
