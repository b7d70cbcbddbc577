"""Manifests: accepted whole, or rejected with one reason."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from toy_step import EXPERTS, HIDDEN, TOP_K, World, manifest, step_launches

from moe_jax.cache.identity import Bank, Certificate, Group, Manifest
from moe_jax.cache.launches import Buffer, dense
from moe_jax.cache.registry import Registry, _Namespace
from moe_jax.errors import InvalidArgument


def change(**changes):
    """A manifest whose first group is changed."""
    whole = manifest()
    return replace(whole, groups=(replace(whole.groups[0], **changes), *whole.groups[1:]))


def banks(**shapes) -> tuple[Bank, ...]:
    return tuple(Bank(role, dense(f"{role}.0", "float32", shape)) for role, shape in shapes.items())


DOWN = (EXPERTS, HIDDEN, 4)
REJECTED = {
    "namespace: got": lambda: replace(manifest(), namespace=""),
    "groups: got none, wanted at least one": lambda: replace(manifest(), groups=()),
    "layer: got 0 twice": lambda: replace(manifest(), groups=(manifest().groups[0],) * 2),
    "buffer: got gate_up.0 twice": lambda: change(banks=(*manifest().groups[0].banks, manifest().groups[0].banks[0])),
    r"banks of layer 0: got \['gate_up'\]": lambda: change(banks=manifest().groups[0].banks[:1]),
    r"banks of layer 0: got \['gate', 'down'\]": lambda: change(banks=banks(gate=DOWN, down=DOWN)),
    "top_k of layer 0: got 0": lambda: change(top_k=0),
    "top_k of layer 0: got 7, wanted 1 to 6": lambda: change(top_k=EXPERTS + 1),
    r"slots of layer 0: got 1, wanted 2 \(top_k\) to 6": lambda: change(slots=TOP_K - 1),
    "slots of layer 0: got 7": lambda: change(slots=EXPERTS + 1),
    r"shape of gate_up\.0: got \[6, 8, 4\], wanted 5 slots first": lambda: change(slots=5),
    r"banks of layer 0: got \['down.0\[6, 4\]'\]": lambda: change(
        banks=banks(gate_up=(EXPERTS, 8, HIDDEN), down=(6, 4))
    ),
    r"shape of gate_up\.0: got \[6, 4, 4\], wanted \[6, 8, 4\]": lambda: change(
        banks=banks(gate_up=(EXPERTS, 4, HIDDEN), down=DOWN)
    ),
    r"dtype of gate_up\.0: got float16, wanted float32": lambda: change(
        banks=(Bank("gate_up", dense("gate_up.0", "float16", (EXPERTS, 8, HIDDEN))), *banks(down=DOWN))
    ),
    r"strides of down\.0: got \[18, 4, 1\]": lambda: change(
        banks=(*banks(gate_up=(EXPERTS, 8, HIDDEN)), Bank("down", Buffer("down.0", "float32", DOWN, (18, 4, 1))))
    ),
    r"strides of down\.0: got \[16, 1, 4\]": lambda: change(
        banks=(*banks(gate_up=(EXPERTS, 8, HIDDEN)), Bank("down", Buffer("down.0", "float32", DOWN, (16, 1, 4))))
    ),
    r"shape of scale: got \[3\], wanted 6 slots first": lambda: change(
        banks=(
            *banks(gate_up=(EXPERTS, 8, HIDDEN)),
            Bank("down", dense("down.0", "float32", DOWN), (dense("scale", "float32", (3,)),)),
        )
    ),
}


@pytest.mark.parametrize("problem", REJECTED)
def test_a_rejected_manifest_gives_one_reason_and_changes_nothing(problem):
    world = World()
    world.warm(2)
    before = world.registry.version, world.registry.manifest("main")
    with pytest.raises(InvalidArgument, match=problem):
        world.registry.accept(REJECTED[problem]())
    assert (world.registry.version, world.registry.manifest("main")) == before
    assert world.step(2).kind == "replay"


def test_C77_too_few_slots_are_refused_with_both_numbers():
    registry = Registry()
    with pytest.raises(InvalidArgument, match=r"slots of layer 0: got 1, wanted 2 \(top_k\) to 6 \(experts\)"):
        registry.accept(manifest(slots=1))
    assert registry.accept(manifest(slots=TOP_K)) == 1


def test_banks_may_be_separate_or_packed_and_carry_scales():
    scales = (dense("scale.0", "float32", (EXPERTS,)), dense("bias.0", "float32", (EXPERTS, HIDDEN)))
    separate = banks(gate=(EXPERTS, 4, HIDDEN), up=(EXPERTS, 4, HIDDEN), down=DOWN)
    group = Group(layer=3, banks=separate, experts=EXPERTS, top_k=TOP_K, slots=EXPERTS)
    riding = replace(group, banks=(*separate[:2], Bank("down", separate[2].buffer, scales)))
    registry = Registry()
    assert registry.accept(Manifest("a", (group,))) == 1
    assert registry.accept(Manifest("a", (riding,))) == 2
    assert [buffer.name for buffer in riding.buffers][-2:] == ["scale.0", "bias.0"]


def test_generations_only_grow_and_belong_to_namespaces():
    registry = Registry()
    assert [registry.accept(manifest()), registry.accept(manifest(namespace="draft")), registry.accept(manifest())] == [
        1,
        2,
        3,
    ]
    assert registry.current() == {"main": (1, 3), "draft": (1, 2)}
    assert registry.advance_owner("draft") == 2 and registry.owner_generation("main") == 1
    assert registry.current() == {"main": (1, 3), "draft": (2, 2)}
    registry.retire("main")
    assert registry.current() == {"draft": (2, 2)} and registry.manifest("main") == (None, 0)
    assert registry.accept(manifest()) == 4


class Racing(_Namespace):
    """A namespace in whose place another thread acts when a field is read, one of several times. One for each test."""

    act: Callable[[], object] | None = None
    left = 0

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if Racing.act is not None and threading.current_thread() is threading.main_thread():
            Racing.left -= 1
            if Racing.left < 0:
                thread, Racing.act = threading.Thread(target=Racing.act), None
                thread.start()
                thread.join()
        return value


def racing(world: World) -> None:
    """Make the world's namespace one."""
    spaces = world.registry._namespaces
    spaces["main"] = Racing(**vars(spaces["main"]))


# More than a step reads.
READS = range(16)


@pytest.mark.parametrize("read", READS)
def test_a_manifest_that_comes_while_a_step_is_decided_is_never_taken_for_the_one_before(read):
    """Its groups are host-staged: what is captured for good was decided by the old one."""
    world = World(layers=1)
    launches = step_launches(2, layers=1)
    racing(world)
    world.inputs(2, 2)
    certificate = world.certificate(2, 2)
    Racing.left, Racing.act = read, lambda: world.registry.accept(manifest(layers=1, staged=True))
    for _ in range(4):
        world.graphs.step(launches, certificate, world.table, staged=world.staged(launches))
    came, Racing.act = Racing.act is None, None
    present, generation = world.registry.manifest("main")
    for key, entry in world.graphs._store.entries.items():
        assert key.generation != generation or entry.plan.manifest is present
    if came:
        assert present.groups[0].staged
        assert world.graphs.step(launches, certificate, world.table, staged=world.staged(launches)).kind == "direct"
    assert came or read > 4


@pytest.mark.parametrize("read", READS)
def test_admission_that_is_opened_meanwhile_was_closed_for_a_reason_or_not_at_all(read):
    world = World(layers=1)
    racing(world)
    world.registry.close_admission("main", "draining")
    certificate = world.certificate(2, 2)
    Racing.left, Racing.act = read, lambda: world.registry.open_admission("main")
    found = world.registry.admit(certificate)
    Racing.act = None
    assert found in (None, ("admission closed", "draining"))


def test_every_change_moves_the_version():
    registry, versions = Registry(), [0]
    for act in (
        lambda: registry.accept(manifest()),
        lambda: registry.advance_owner("main"),
        lambda: registry.close_admission("main", "why"),
        lambda: registry.open_admission("main"),
        lambda: registry.retire("main"),
    ):
        act()
        versions.append(registry.version)
    assert versions == sorted(set(versions))
    with pytest.raises(InvalidArgument, match=r"advance_owner: namespace: got other, wanted one of \['main'\]"):
        registry.advance_owner("other")


def test_admission():
    registry = Registry()
    certificate = Certificate(
        namespace="main", owner_generation=1, semantics="independent", rows=1, bucket=1, sequences=1
    )
    assert registry.admit(certificate) == ("no grouped context", "no manifest of namespace 'main'")
    registry.accept(manifest())
    assert registry.admit(certificate) is None
    registry.close_admission("main", "draining")
    assert registry.admit(certificate) == ("admission closed", "draining")
    registry.open_admission("main")
    registry.advance_owner("main")
    assert registry.admit(certificate) == ("stale owner generation", "owner generation 1, now 2")
