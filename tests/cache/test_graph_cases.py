"""Failures that others met with graphs and caches, on a simulated device; named by their case."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from toy_step import EXPERTS, GROUPS, TOKENS, World, manifest, step_launches, weights

from moe_jax.cache.buckets import bucket_for, row_buckets
from moe_jax.cache.explain import explain
from moe_jax.cache.launches import Copy
from moe_jax.cache.outcome import Reason
from moe_jax.cache.simulated import SimulatedRuntime


def test_C42_a_replay_leaves_earlier_results_alone():
    world, kept = World(), []
    for call in range(12):
        world.step(4, seed=call)
        kept.append((world.read("next/4"), world.oracle.arrays["next/4"].copy()))
    for call in range(10):
        world.step(4, seed=100 + call)
    for got, wanted in kept:
        np.testing.assert_array_equal(got, wanted)
    for _ in range(4):  # a result is the next step's input
        assert world.step(4, tokens=world.read("next/4")).kind == "replay"


def test_C43_replaced_weights_count_at_once():
    """Moved, rewritten in place, and again after the old arrays are gone."""
    world = World()
    world.warm(2)
    for seed, name in enumerate(["gate_up.0", "down.1", "router.0", "embedding"], start=1):
        world.place(name, weights(seed)[name], "weights")
        assert world.kinds(3) == ("direct", "capture", "replay")
        world.write(name, weights(seed + 10)[name])
        assert world.kinds(2) == ("replay", "replay")
    stats = world.counts_add_up()
    assert stats["declines"] == {"first call": 1, "weights moved": 4}
    assert world.runtime.space.bytes == sum(-(-world.table.get(n).bytes // 256) * 256 for n in world.oracle.arrays), (
        "replaced weights are still held"
    )


def test_C44_a_graph_captured_under_one_routing_serves_every_other():
    world = World()
    world.add_bucket(8)
    router = np.zeros((EXPERTS, 4), np.float32)
    router[0] = 50

    def rows_for(expert: int | None) -> None:
        for i in GROUPS:
            chosen = weights(3)[f"router.{i}"] if expert is None else np.roll(router, expert, 0)
            world.write(f"router.{i}", chosen)

    for order in ((0, None, EXPERTS - 1, 2), (None, 0, None, 4)):
        for expert in order:
            rows_for(expert)
            for _ in range(2):
                world.step(8)
    assert world.graphs.stats()["replays"] == 14


def test_C46_scratch_lives_as_long_as_the_graph():
    world = World()
    world.warm(2)
    first = world.step(2, seed=5)
    rng, results = np.random.default_rng(0), []
    for round_ in range(200):
        if round_ % 20 == 0:
            world.step(8)
        size = int(rng.integers(1, 1 << 16))
        address, capsule = world.runtime.allocate(size)
        world.runtime.write(address, np.full(size, 7, np.uint8), world.graphs.stream)
        for i in GROUPS:
            world.write(f"kv.{i}", np.zeros((8, 16, 4), np.float32))
        outcome = world.step(2, seed=6)
        assert outcome.kind == "replay" and outcome.handle is first.handle
        results.append(world.read("logits/2").tobytes())
        del capsule
    assert len(set(results)) == 1


def test_C47_growth_invalidates_what_names_the_old_memory():
    world = World()
    world.warm(2)
    world.warm(4)
    assert world.graphs.stats()["graphs"] == 2
    old = world.table.get("kv.0").address
    world.grow("kv.0")
    assert world.table.get("kv.0").address != old
    assert world.graphs.stats()["graphs"] == 0, "graphs that name the old memory"
    assert world.step(2).reason is Reason.REALLOCATED
    assert world.kinds(2, 2) == ("capture", "replay")
    assert world.kinds(3, 4) == ("direct", "capture", "replay")


def test_C49_a_graph_in_flight_is_not_evicted():
    """One place, two keys, nothing waited for by the caller: whoever evicts waits."""
    world = World(max_entries=1)
    for bucket in (2, 4):
        world.inputs(bucket, bucket)
    lists = {bucket: step_launches(bucket) for bucket in (2, 4)}
    rng = np.random.default_rng(0)
    for _ in range(400):
        bucket = int(rng.choice([2, 4]))
        world.graphs.step(lists[bucket], world.certificate(bucket, bucket), world.table)
        world.oracle.run(lists[bucket])
    world.check(2, 4)
    stats = world.counts_add_up()
    assert stats["evictions"] > 50 and stats["destroy_errors"] == 0 and stats["graphs"] == 1
    world.nothing_leaked()


def test_the_device_refuses_to_destroy_a_graph_in_flight():
    """What the test before would see."""
    world = World()
    world.warm(2)
    launches = step_launches(2)
    outcome = world.graphs.step(launches, world.certificate(2, 2), world.table)
    with pytest.raises(Exception, match="in flight"):
        world.runtime.destroy(outcome.handle)
    world.graphs.wait(outcome)
    world.runtime.destroy(outcome.handle)


def test_C50_the_store_is_bounded_and_keyed_by_content():
    world = World(max_entries=4)
    held = []
    for round_ in range(2):
        for rows in range(1, 17):
            assert world.kinds(3, rows) == ("direct", "capture", "replay")
        held.append(world.runtime.space.bytes)
        stats = world.counts_add_up()
        assert stats["graphs"] == stats["plans"] == 4 and stats["evictions"] == 16 * (round_ + 1) - 4
        world.nothing_leaked()
    assert held[0] == held[1]
    for _ in range(50):  # built anew each time, as is the certificate
        assert world.step(16, launches=step_launches(16)).kind == "replay"
    assert world.graphs.stats()["captures"] == 32


def test_C51_nothing_is_loaded_during_capture():
    """The device fails any load, allocation or wait in a capturing thread, and the capture with it."""
    world = World()
    before = dict(world.runtime.calls)
    world.step(2)
    loads = world.runtime.calls["load"] - before.get("load", 0)
    assert loads == len(step_launches(2).specs)
    assert world.kinds(2) == ("capture", "replay")
    assert world.runtime.calls["load"] == loads
    assert world.graphs.stats()["graph_error"] == {}


def test_C54_a_capture_is_a_chain_of_all_launches():
    """There is no side stream that could be left out: all is recorded, once, in order, on one stream."""
    world = World()
    outcomes = [world.step(4) for _ in range(3)]
    (executable,) = world.runtime.executables
    assert outcomes[2].handle is executable
    recorded = [(node.kernel and node.kernel.spec.key, node.addresses) for node in executable.nodes]
    wanted = []
    for one in step_launches(4).launches:
        key, operands = (None, (one.target, one.source)) if isinstance(one, Copy) else (one.spec.key, one.operands)
        wanted.append((key, tuple(world.table.get(o.buffer).address + o.offset for o in operands)))
    assert recorded == wanted


def test_C53_other_threads_may_use_the_device_during_capture():
    world, stop, copied = World(), threading.Event(), []
    other = world.runtime.new_stream()

    def work() -> None:
        while not stop.is_set():
            address, capsule = world.runtime.allocate(1 << 12)
            values = np.full(1 << 12, len(copied) % 251, np.uint8)
            world.runtime.write(address, values, other)
            copied.append((world.runtime.read(address, "uint8", values.shape, other) == values).all())
            world.runtime.synchronize(other)
            del capsule

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for seed in range(20):
            world.place("down.0", weights(seed)["down.0"], "weights")
            assert world.kinds(2) == ("direct", "capture")
    finally:
        stop.set()
        thread.join()
    assert copied and all(copied)
    assert world.graphs.stats()["graph_error"] == {}


@pytest.mark.parametrize("maximum", [7, 12, 20, 700])
def test_C60_the_declared_largest_batch_is_captured(maximum):
    buckets = row_buckets(maximum)
    assert buckets[-1] == maximum and list(buckets) == sorted(set(buckets))
    assert all(bucket_for(rows, buckets) >= rows for rows in range(1, maximum + 1))
    assert bucket_for(maximum + 1, buckets) is None and bucket_for(0, buckets) is None
    if maximum > 20:
        return
    world = World()
    for bucket in buckets:
        world.warm(1, bucket)
    assert all(world.step(rows, bucket_for(rows, buckets)).kind == "replay" for rows in range(1, maximum + 1))


@pytest.mark.parametrize("shapes", [(1, 4), (1, 2, 4), (1, 2, 4, 6, 8)])
def test_C62_alternating_shapes_keep_graphs_of_their_own(shapes):
    world = World()
    for _ in range(40):
        for rows in shapes:
            world.step(rows)
    stats = world.counts_add_up()
    assert stats["captures"] == stats["direct"] == len(shapes)
    assert stats["replays"] == 38 * len(shapes)


def test_C62_draft_and_verify_keep_graphs_of_their_own():
    """One shape, told apart by what its rows mean."""
    world = World()
    meanings = [{}, {"semantics": "sequential", "sequences": 1}, {"semantics": "speculative", "sequences": 2}]
    for _ in range(20):
        for meaning in meanings:
            world.step(4, **meaning)
    assert (world.graphs.stats()["captures"], world.graphs.stats()["replays"]) == (3, 54)


def test_C63_an_equal_step_built_anew_is_the_same_step():
    world = World()
    for _ in range(50):
        world.step(2, launches=step_launches(2))
    stats = world.counts_add_up()
    assert (stats["plan_compiles"], stats["captures"], stats["replays"]) == (1, 1, 48)


def test_C63_explain_names_the_field_that_differs():
    a, b = step_launches(2), step_launches(2)
    assert a is not b and a == b and explain(a, b) == ()
    changed = explain(a, step_launches(2, restrided="down.1"))
    place = [buffer.name for buffer in a.buffers].index("down.1")
    assert tuple(changed[0]) == (f"buffers[{place}].strides[0]", 16, 32)
    assert {d.path.split(".")[1] for d in changed[1:]} == {"spec"}, "the kernel that knows it"
    world = World()
    certificates = world.certificate(2, 2), world.certificate(2, 4)
    assert {d.path for d in explain(*certificates)} == {"bucket"}
    plans = [world.graphs.probe(step_launches(2), c, world.table).plan for c in certificates]
    assert {d.path for d in explain(plans[0].key, plans[1].key)} == {"bucket", "sequences"}
    wider = replace(manifest(), groups=(replace(manifest().groups[0], top_k=1), *manifest().groups[1:]))
    assert [d.path for d in explain(manifest(), wider)] == ["groups[0].top_k"]


def test_C66_launch_options_stay_with_their_kernel():
    world = World()
    lists = []
    for warps in (1, 8):
        launches = step_launches(2)
        changed = tuple(
            replace(launch, spec=replace(launch.spec, num_warps=warps)) if hasattr(launch, "spec") else launch
            for launch in launches.launches
        )
        lists.append(replace(launches, launches=changed))
    for order in ((0, 1), (1, 0)):
        for which in order:
            outcomes = [world.step(2, launches=lists[which]) for _ in range(3)]
            nodes = outcomes[-1].handle.nodes
            assert {node.kernel.spec.num_warps for node in nodes if node.kernel} == {(1, 8)[which]}
    assert world.graphs.stats()["captures"] == 2


def test_C72_threads_that_share_a_store_capture_each_plan_once():
    world, errors = World(), []
    locks = {bucket: threading.Lock() for bucket in (2, 4)}
    for bucket in locks:
        world.add_bucket(bucket)
    lists = {bucket: step_launches(bucket) for bucket in locks}
    together = threading.Barrier(4)

    def work(number: int) -> None:
        bucket = (2, 4)[number % 2]
        together.wait()
        try:
            for call in range(50):
                with locks[bucket]:
                    tokens = np.full(bucket, (number + call) % TOKENS, np.int32)
                    world.runtime.write(world.table.get(f"tokens/{bucket}").address, tokens, world.graphs.stream)
                    outcome = world.graphs.step(lists[bucket], world.certificate(bucket, bucket), world.table)
                    world.graphs.wait(outcome)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    stats = world.counts_add_up()
    assert (stats["captures"], stats["direct"], stats["replays"]) == (2, 2, 196)


def test_C72_two_stores_on_one_device_are_safe_in_two_threads():
    runtime, errors = SimulatedRuntime(1 << 23), []
    worlds = [World(runtime=runtime, max_entries=2) for _ in range(2)]

    def work(world: World, offset: int) -> None:
        try:
            for call in range(60):
                world.step(1 + (call + offset) % 4)
                if call % 10 == 9:
                    world.place("down.0", weights(call)["down.0"], "weights")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(world, i)) for i, world in enumerate(worlds)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for world in worlds:
        assert world.counts_add_up()["graph_error"] == {}
        world.graphs.close()
    assert not runtime.executables and not runtime.graphs
