"""The four nested checks, each by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toy_step import World, manifest, step_launches

from moe_jax.cache.binding import memory
from moe_jax.cache.identity import (
    Fingerprint,
    Held,
    Plan,
    check_plan_key,
    check_program,
    check_properties,
    check_resources,
)
from moe_jax.cache.resources import next_serial


def plan(world: World | None = None, *, launches=None, bucket: int = 2, **changes) -> Plan:
    world = world or World()
    launches = launches or step_launches(bucket)
    found = world.graphs.probe(launches, world.certificate(bucket, bucket, **changes), world.table).plan
    assert found is not None
    return found


def held(world: World) -> Held:
    world.add_bucket(2)
    launches = step_launches(2)
    found, moved = memory("test", launches, world.table, world.table.snapshot())
    assert [*moved] == [*launches.order]
    return found


def test_1_programs_are_compared_by_content_alone():
    one = plan()
    assert check_program(one.program.key, plan().program.key) is None
    other_compiler = World()
    other_compiler.runtime.compiler = "another"
    others = [
        plan(launches=step_launches(4), bucket=4),
        plan(world=with_manifest(top_k=1)),
        plan(world=World(runtime=type(other_compiler.runtime)(1 << 23, "another"))),
    ]
    for key in (other.program.key for other in others):
        found = check_program(one.program.key, key)
        assert found is not None and found.check == "program" and (found.was, found.now) == (one.program.key, key)
    for change in ({"owner_generation": 1}, {"phase": "prompt"}, {"semantics": "sequential", "sequences": 1}):
        assert plan(**change).program.key == one.program.key, "owners and rows are no part of a program"


def with_manifest(**changes) -> World:
    world, whole = World(accept=False), manifest()
    groups = (replace(whole.groups[0], **changes), *whole.groups[1:])
    world.registry.accept(replace(whole, groups=groups))
    return world


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("program", lambda world: plan(world, launches=step_launches(2, restrided="down.0"))),
        ("owner_generation", lambda world: world.registry.advance_owner("main") and plan(world)),
        ("semantics", lambda world: plan(world, semantics="speculative")),
        ("phase", lambda world: plan(world, phase="prompt")),
        ("bucket", lambda world: bucket_of_4(world)),
        ("sequences", lambda world: plan(world, semantics="speculative", sequences=1)),
        ("generation", lambda world: world.registry.accept(manifest()) and plan(world)),
    ],
)
def test_2_plan_keys_differ_by_every_field(field, change):
    world = World()
    one = plan(world, semantics="speculative") if field == "sequences" else plan(world)
    assert check_plan_key(one.key, plan(world, semantics=one.key.semantics).key) is None
    found = check_plan_key(one.key, change(world).key)
    assert found is not None and (found.check, found.path) == ("plan key", field)


def bucket_of_4(world: World) -> Plan:
    """The same launch list under another bucket, which a caller cannot mean but a check must see."""
    found = world.graphs.probe(step_launches(2), world.certificate(2, 4), world.table).plan
    assert found is not None
    return found


def test_2_namespaces_are_told_apart():
    world = World()
    world.registry.accept(manifest(namespace="draft"))
    found = check_plan_key(plan(world).key, plan(world, namespace="draft").key)
    assert found is not None and found.path == "namespace"


def test_2_which_independent_rows_live_is_no_part_of_a_key():
    world = World()
    one_row = world.graphs.probe(step_launches(2), world.certificate(1, 2), world.table).plan
    assert one_row is not None and one_row.key == plan(world).key


def test_3_properties():
    world = World()
    one = plan(world)
    assert check_properties(one.properties, plan(world).properties) is None
    found = check_properties(one.properties, plan(world, launches=step_launches(2, extent=64)).properties)
    assert found is not None and (found.path, found.was, found.now) == ("extents", (256,), (64,))
    for path, value in (("coverage", "other"), ("certificate", ("other",))):
        found = check_properties(one.properties, one.properties._replace(**{path: value}))
        assert found is not None and (found.check, found.path) == ("properties", path)


def test_4_resources_by_address_and_by_owner():
    world = World()
    known = held(world)
    assert check_resources(known, world.table) is None
    was = world.table.get("down.0")
    for change in ({"address": was.address + 256}, {"serial": next_serial()}, {"use": "arena"}, {"bytes": 1 << 20}):
        world.table.replace("down.0", replace(was, **change))
        found = check_resources(known, world.table)
        (field,) = change
        assert found is not None and (found.check, found.path) == ("resources", f"down.0.{field}")
        world.table.replace("down.0", was)
        assert check_resources(known, world.table) is None, "put back: nothing differs, whatever the version"
    world.table.release("down.0")
    found = check_resources(known, world.table)
    assert found is not None and found.now is None


def test_4_a_table_that_did_not_move_is_not_looked_into(monkeypatch):
    world = World()
    known = held(world)
    monkeypatch.setattr(world.table, "snapshot", lambda names: pytest.fail("looked into"))
    assert check_resources(known, world.table) is None


def test_4_memory_of_other_steps_does_not_count():
    world = World()
    world.warm(2)
    world.add_bucket(8)
    world.place("tokens/8", world.oracle.arrays["tokens/8"], "arena")
    assert world.step(2).kind == "replay"


def test_4_of_several_differences_the_first_buffers_is_given():
    """Whichever moved last."""
    for names in (("router.0", "down.1"), ("down.1", "router.0")):
        world = World()
        known = held(world)
        first = min(names, key=known.launches.order.__getitem__)
        for name in names:
            world.table.replace(name, replace(world.table.get(name), serial=next_serial()))
        found = check_resources(known, world.table)
        assert found is not None and found.path == f"{first}.serial"


def test_4_another_table_is_another_owner_of_everything():
    world, other = World(), World()
    known = held(world)
    held(other)
    assert check_resources(known, other.table) is not None


def fingerprint(world: World) -> Fingerprint:
    found = held(world)
    return Fingerprint(plan(world).program.key, tuple((n, found.witnesses[n]) for n in found.launches.order))


def test_fingerprints_have_a_portable_part_and_one_of_this_process():
    worlds = World(), World()
    prints = [fingerprint(world) for world in worlds]
    assert prints[0].program == prints[1].program and prints[0].resource != prints[1].resource
    assert hash(prints[0]) != hash(prints[1])
    entry = worlds[0]
    entry.warm(2)
    (captured,) = entry.graphs._store.captured
    assert captured.fingerprint == fingerprint(entry)


def test_coverage_names_launches_groups_and_reasons():
    world = World()
    found = plan(world).program
    assert [(c.layer, c.launches, c.reason) for c in found.coverage] == [(0, (2,), None), (1, (6,), None)]
    assert (found.uncovered, found.refusal, found.staged, found.routes) == ((), None, None, 4)
    launches = step_launches(2)
    silent = tuple(replace(x, expert=False) if getattr(x, "expert", False) else x for x in launches.launches)
    assert plan(world, launches=replace(launches, launches=silent)).program.refusal == (
        "group of layer 0: no expert launch reads gate_up.0"
    )
