"""Launch lists bound to memory: what is resolved anew, what is only remembered, and whose memory that keeps."""

from __future__ import annotations

import pytest
from toy_step import World, equal_list, manifest, step_launches, weights

from moe_jax.cache import binding, identity
from moe_jax.cache.binding import Bindings
from moe_jax.cache.launches import Copy, LaunchList
from moe_jax.errors import InvalidArgument


@pytest.fixture
def resolved(monkeypatch) -> list[set[int]]:
    """Launches that were bound anew, a set for each time that a list was; of a list's first time, all."""
    found: list[set[int]] = []
    real = Bindings.bound

    def bound(self, where, launches, table):
        before = self._known.get(launches)
        present, resources = real(self, where, launches, table)
        if present is not before:
            known = [None] * len(present.calls) if before is None else before.calls
            found.append({i for i, (a, b) in enumerate(zip(known, present.calls, strict=True)) if a is not b})
        return present, resources

    monkeypatch.setattr(Bindings, "bound", bound)
    return found


def at(world: World, launches: LaunchList) -> list[tuple[int, ...]]:
    """Addresses of every launch, straight from the table."""
    many = [(each.target, each.source) if isinstance(each, Copy) else each.operands for each in launches.launches]
    return [tuple(world.table.get(place.buffer).address + place.offset for place in places) for places in many]


def users(launches: LaunchList, name: str) -> set[int]:
    return {i for i, each in enumerate(launches.launches) if name in {o.buffer for o in getattr(each, "operands", ())}}


def test_only_launches_whose_memory_moved_are_resolved_anew(resolved):
    world, launches = World(mode="off"), equal_list(2)
    world.step(2)
    assert resolved == [set(range(len(launches.launches)))]
    world.step(2)
    assert len(resolved) == 1, "nothing has moved"
    world.place("down.0", weights(1)["down.0"], "weights")
    world.place("router.1", weights(1)["router.1"], "weights")
    world.step(2)
    assert resolved[1:] == [users(launches, "down.0") | users(launches, "router.1")]
    world.place("tokens/2", world.oracle.arrays["tokens/2"], "arena")
    world.add_bucket(8)
    world.step(2)
    assert resolved[2:] == [users(launches, "tokens/2")], "what other lists use does not count"


@pytest.mark.parametrize("few", [0, 1, 3, binding.FEW_OPERANDS])
def test_every_address_is_that_of_the_table_after_any_mutation(few, monkeypatch):
    monkeypatch.setattr(binding, "FEW_OPERANDS", few)
    world = World()
    world.add_bucket(2)
    bindings, launches = Bindings(world.runtime, 4), step_launches(2)
    for name in (None, *launches.order):
        if name is not None:
            use = world.table.get(name).use
            world.place(name, world.oracle.arrays[name], use)
        assert [call[1] for call in bindings.bound("test", launches, world.table)[0].calls] == at(world, launches)


def test_another_table_is_resolved_as_a_whole(resolved):
    world = World()
    other = World(runtime=world.runtime)
    for one in (world, other):
        one.add_bucket(2)
    bindings, launches = Bindings(world.runtime, 4), equal_list(2)
    everything = set(range(len(launches.launches)))
    for one in (world, other, world):
        assert [call[1] for call in bindings.bound("test", launches, one.table)[0].calls] == at(one, launches)
    assert resolved == [everything] * 3


def test_a_new_owner_or_an_equal_manifest_resolves_and_compiles_nothing(resolved, monkeypatch):
    world = World()
    world.warm(2)
    loads = world.runtime.calls["load"]
    monkeypatch.setattr(identity, "compile_program", lambda *_: pytest.fail("compiled again"))
    monkeypatch.setattr(identity, "program_key", lambda *_: pytest.fail("hashed again"), raising=True)
    world.registry.advance_owner("main")
    world.warm(2)
    world.registry.accept(world.registry.manifest("main")[0])
    world.warm(2)
    assert len(resolved) == 1 and world.runtime.calls["load"] == loads
    stats = world.counts_add_up()
    assert stats["plan_compiles"] == 3, "a plan is of one owner and one generation"


def test_a_manifest_of_other_content_makes_another_program():
    world = World()
    world.warm(2)
    first = world.graphs.probe(equal_list(2), world.certificate(2, 2), world.table).plan
    world.registry.accept(manifest(staged=True))
    second = world.graphs.probe(equal_list(2), world.certificate(2, 2), world.table).plan
    assert first.program.key != second.program.key
    assert first.program.staged is None and second.program.staged is not None
    world.registry.accept(manifest())
    third = world.graphs.probe(equal_list(2), world.certificate(2, 2), world.table).plan
    assert third.program is first.program and third.key != first.key


def test_of_programs_only_so_many_are_remembered(monkeypatch):
    monkeypatch.setattr(identity, "MOST_PROGRAMS", 2)
    world = World()
    for rows in (1, 2, 4, 1):
        world.step(rows)
        assert len(world.graphs._store.programs) <= 2


def test_rules_are_values_and_a_probe_remembers_nothing():
    world = World()
    world.warm(2)
    hash(world.graphs._rules)
    programs = dict(world.graphs._store.programs)
    world.add_bucket(4)
    assert world.graphs.probe(equal_list(4), world.certificate(4, 4), world.table).kind == "direct"
    assert world.graphs._store.programs == programs and len(programs) == 1


@pytest.mark.parametrize("mode", ["off", "simulate"])
def test_what_is_remembered_holds_no_memory(mode):
    world = World(mode=mode)
    world.step(2)
    world.graphs.drain()
    for name in list(world.oracle.arrays):
        address = world.table.release(name).address
        assert address not in world.runtime.space.sizes


def test_a_graph_holds_the_memory_that_it_names_and_no_other():
    world = World()
    world.add_bucket(8)
    world.warm(2)
    world.graphs.drain()
    named, other = (world.table.release(name).address for name in ("x/2", "x/8"))
    assert named in world.runtime.space.sizes and other not in world.runtime.space.sizes


def test_a_sweep_resolves_what_the_next_step_would(resolved):
    world = World()
    world.warm(2)
    world.place("down.0", weights(1)["down.0"], "weights")
    world.graphs.sweep(world.table)
    swept = len(resolved)
    assert swept == 2
    assert world.step(2).kind == "direct" and len(resolved) == swept
    kept = world.table.release("down.0")
    world.graphs.sweep(world.table)
    world.inputs(2, 2)
    with pytest.raises(InvalidArgument, match=r"memory of 'down\.0': got none"):
        world.graphs.step(equal_list(2), world.certificate(2, 2), world.table)
    world.table.bind("down.0", kept)
    assert world.kinds(2, 2) == ("capture", "replay"), "the memory that the direct step had"


def test_the_list_that_was_run_least_recently_is_forgotten_first():
    world = World()
    bindings = Bindings(world.runtime, 2)
    for rows in (1, 2, 4):
        world.add_bucket(rows)
    for rows in (1, 2, 1, 4):
        bindings.bound("test", equal_list(rows), world.table)
    assert list(bindings._known) == [equal_list(1), equal_list(4)]
    bindings.clear()
    assert not bindings._known


def test_a_mutation_while_a_list_is_bound_is_seen_by_the_next_step(monkeypatch):
    world = World()
    world.add_bucket(2)
    bindings, launches = Bindings(world.runtime, 4), equal_list(2)
    bindings.bound("test", launches, world.table)
    world.place("router.0", weights(1)["router.0"], "weights")
    real = binding.suspects

    def suspects(recorded, table):
        found = real(recorded, table)
        monkeypatch.undo()
        world.place("down.0", weights(1)["down.0"], "weights")
        return found

    monkeypatch.setattr(binding, "suspects", suspects)
    for _ in range(2):
        calls = bindings.bound("test", launches, world.table)[0].calls
    assert [call[1] for call in calls] == at(world, launches)
