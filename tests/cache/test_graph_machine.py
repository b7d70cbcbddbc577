"""Random events against an uncached oracle: never a stale result, nothing leaked, counts that add up."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from toy_step import World, WrongTokens, equal_list, manifest, step_launches, weight_shapes, weights

from moe_jax.cache import decision, graphs
from moe_jax.cache.outcome import FALLBACKS, RequiredStepFailed
from moe_jax.pallas_kernels.errors import CudaError

EVENTS = 20_000
FAULTS = (
    *("begin_capture", "launch", "copy", "end_capture", "instantiate", "update", "upload", "launch_graph"),
    *("destroy", "record_event", "load", "wait", "event_done"),
)
LAYERS = 1
LISTS = {
    (rows, extent): step_launches(rows, layers=LAYERS, extent=extent) for rows in (1, 2, 4) for extent in (None, 64)
}

happened: Counter[str] = Counter()
became: Counter[str] = Counter()
shapes = st.sampled_from([(1, 1), (1, 2), (2, 2), (3, 4), (4, 4)])
extents = st.sampled_from([None, None, None, 64])
seeds = st.integers(0, 5)
weight_names = st.sampled_from(sorted(weight_shapes(LAYERS)))


class Steps(RuleBasedStateMachine):
    """A world of small limits, in which anything may happen between two steps and any call may fail in one."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(layers=LAYERS, max_entries=2, decode_boundary_overlap=True)
        self.unheld: dict[str, object] = {}
        self.foreign: list[object] = []
        self.closed = False

    def event(self, name: str, count: int = 1) -> None:
        happened[name] += count

    @rule(shape=shapes, count=st.integers(2, 16), extent=extents, required=st.booleans())
    def step(self, shape, count, extent, required):
        self.event("step", count)
        for _ in range(count):
            self.one(shape, extent, required=required)

    @rule(shape=shapes, other=shapes, count=st.integers(2, 16))
    def steps_not_waited_for(self, shape, other, count):
        self.event("step", 2 * count)
        for rows, bucket in (shape, other):
            self.world.inputs(rows, bucket)
        for _ in range(count):
            for rows, bucket in (shape, other):
                launches = LISTS[bucket, None]
                self.world.graphs.step(launches, self.world.certificate(rows, bucket), self.world.table)
                self.world.oracle.run(launches)
        self.world.check(shape[1], other[1])

    @rule(shape=shapes, required=st.booleans())
    def prompt(self, shape, required):
        self.event("prompt")
        self.one(shape, None, required=required, phase="prompt", semantics="sequential", sequences=1)

    @rule(shape=shapes, required=st.booleans(), change=st.sampled_from([{"sequences": 0}, {"owner_generation": 0}]))
    def step_of_no_owner(self, shape, required, change):
        self.event("bad certificate")
        self.one(shape, None, required=required, **change)

    @rule(
        shape=shapes,
        extent=extents,
        required=st.booleans(),
        call=st.sampled_from(FAULTS),
        after=st.integers(0, 14),
        times=st.integers(1, 2),
    )
    def step_that_fails(self, shape, extent, required, call, after, times):
        self.event("fault")
        self.one(shape, extent, required=required, fault={"call": call, "after": after % 3, "times": times})

    @rule(shape=shapes, after=st.integers(0, 14), call=st.sampled_from(["launch", "copy"]))
    def step_that_fails_late(self, shape, after, call):
        self.event("fault")
        self.one(shape, None, required=False, fault={"call": call, "after": after, "times": 1})

    @rule(name=weight_names, seed=seeds)
    def rewrite(self, name, seed):
        self.event("weights rewritten")
        self.world.write(name, weights(seed)[name])

    @rule(name=weight_names, seed=seeds, held=st.booleans())
    def move(self, name, seed, held):
        """What was there is freed, by whoever holds it last; the next array gets the address."""
        self.event("weights moved")
        self.unheld.pop(name, None)
        self.world.place(name, weights(seed)[name], "weights")
        if not held:
            self.world.graphs.sweep(self.world.table)
            self.world.graphs.drain()
            resource = self.world.table.get(name)
            self.unheld[name] = resource.capsule
            self.world.table.replace(name, replace(resource, capsule=None))

    @rule(name=st.sampled_from(["kv.0", "counter", "slot_of.0"]))
    def grow(self, name):
        self.event("growth")
        self.world.grow(name)

    @rule(size=st.integers(1, 4096), drop=st.integers(0, 3))
    def allocate_elsewhere(self, size, drop):
        self.event("allocation")
        del self.foreign[:drop]
        address, capsule = self.world.runtime.allocate(size)
        self.world.runtime.write(address, np.full(size, 0x5A, np.uint8), self.world.graphs.stream)
        self.foreign.append(capsule)

    @rule()
    def change_owner(self):
        self.event("owner")
        self.world.registry.advance_owner("main")

    @rule()
    def accept_an_equal_manifest(self):
        self.event("manifest")
        self.world.registry.accept(manifest(layers=LAYERS))

    @rule()
    def close_or_open_admission(self):
        self.event("admission")
        self.closed = not self.closed
        if self.closed:
            self.world.registry.close_admission("main", "closed by the test")
        else:
            self.world.registry.open_admission("main")

    @rule(shape=shapes)
    def rebuild(self, shape):
        self.event("rebuilt")
        LISTS[shape[1], None] = step_launches(shape[1], layers=LAYERS)

    @rule(shape=shapes, extent=extents)
    def probe(self, shape, extent):
        self.event("probe")
        if shape[1] in self.world.buckets:
            before = self.world.graphs.stats()
            self.world.graphs.probe(LISTS[shape[1], extent], self.world.certificate(*shape), self.world.table)
            assert self.world.graphs.stats() == before

    @invariant()
    def counts_add_up_and_nothing_leaked(self):
        stats, runtime = self.world.counts_add_up(), self.world.runtime
        made = len(runtime.executables) + len(runtime.graphs)
        assert made == stats["graphs"] + stats["retired"] + stats["undestroyed"]
        assert stats["graphs"] + stats["retired"] <= stats["max_entries"]

    def teardown(self):
        world = self.world
        stats = world.graphs.stats()
        for name in ("direct", "captures", "updates", "replays", "evictions", "required_unsupported", "fallback"):
            became[name] += stats[name]
        world.graphs.close()
        for name in world.oracle.arrays:
            world.table.release(name)
        self.unheld.clear()
        self.foreign.clear()
        assert not world.runtime.executables and not world.runtime.graphs
        assert world.runtime.space.sizes == {}

    def one(self, shape, extent, *, required, fault=None, **changes):
        world, (rows, bucket) = self.world, shape
        launches = LISTS[bucket, extent]
        world.inputs(rows, bucket)
        certificate = world.certificate(rows, bucket, required=required, **changes)
        world.runtime.synchronize(world.graphs.stream)
        ran = world.runtime.executed.total()
        if fault:
            world.runtime.fail(**fault)
        try:
            with self.healed():
                outcome = world.graphs.step(launches, certificate, world.table)
        except RequiredStepFailed:
            assert required and world.runtime.executed.total() == ran
        except CudaError:
            assert fault and fault["call"] in ("launch", "copy", "load")
            world.runtime.synchronize(world.graphs.stream)
            world.oracle.run(launches, world.runtime.executed.total() - ran)
        else:
            assert not (required and outcome.reason in FALLBACKS)
            world.oracle.run(launches)
        world.check(bucket)

    @contextlib.contextmanager
    def healed(self):
        try:
            yield
        finally:
            self.world.runtime.heal()


def play(examples: int, number: int = 0) -> None:
    """Run the machine; the same events every time for one number."""
    run_state_machine_as_test(
        seed(number)(Steps),
        settings=settings(
            max_examples=examples,
            stateful_step_count=60,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_no_event_makes_a_step_stale():
    happened.clear()
    became.clear()
    start = time.perf_counter()
    for number in itertools.count():
        play(25, number)
        if happened.total() >= EVENTS:
            break
    seconds = time.perf_counter() - start
    print(f"{happened.total()} events in {seconds:.1f} s: {dict(happened)}; {dict(became)}")
    assert min(happened.values()) > 50 and min(became.values()) > 20
    assert became["replays"] > became["direct"]


def test_with_the_witness_check_broken_it_emits_wrong_tokens(monkeypatch):
    """The test of the test: a store that takes every resource for the one it knew is found out."""
    for module in (decision, graphs):
        monkeypatch.setattr(module, "check_resources", lambda recorded, table: None)
    with pytest.raises(WrongTokens, match="in place of"):
        play(25)


def test_with_generations_not_swept_it_leaks(monkeypatch):
    """And one that keeps what is over."""
    monkeypatch.setattr(graphs.GraphStore, "sweep", lambda *_: None)
    world = World()
    world.warm(2)
    world.registry.advance_owner("main")
    world.warm(2)
    assert world.graphs.stats()["graphs"] == 2


def test_with_the_witness_check_broken_moved_weights_are_not_seen(monkeypatch):
    """The smallest such run."""
    for module in (decision, graphs):
        monkeypatch.setattr(module, "check_resources", lambda recorded, table: None)
    world = World()
    world.warm(2)
    world.place("out_weights", -weights(0)["out_weights"], "weights")
    with pytest.raises(WrongTokens, match="next/2"):
        world.step(2, launches=equal_list(2))
