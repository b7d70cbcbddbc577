"""Every row of the table of events, for ordinary and for required steps, on the simulated device and on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from toy_step import APART, EXPERTS, GROUPS, World, equal_list, manifest, step_launches, weights

from moe_jax.cache.events import EFFECTS, Event, markdown
from moe_jax.cache.launches import Operand, dense
from moe_jax.cache.outcome import Reason, RequiredStepFailed
from moe_jax.cache.resources import Resource, next_serial
from moe_jax.errors import InvalidArgument

ROWS = 2


def rerouted(world: World):
    """Other routes; and an expert evicted from its slot, another in its place, and back."""
    for i in GROUPS:
        world.write(f"router.{i}", weights(8)[f"router.{i}"])
        order = np.random.default_rng(i).permutation(EXPERTS).astype(np.int32)
        for name in (f"gate_up.{i}", f"down.{i}"):
            experts = world.oracle.arrays[name].copy()
            moved = np.empty_like(experts)
            moved[order] = experts
            world.write(name, moved)
        world.write(f"slot_of.{i}", order)


def restrided(world: World):
    """A bank with gaps between its experts, and the launch list that knows it. Who reads a gap gets no number."""
    values = np.full((EXPERTS, APART, 4, 4), np.nan, np.float32)
    values[:, 0] = world.oracle.arrays["down.0"]
    resource = world.resource(values, "weights")
    launches = step_launches(ROWS, restrided="down.0")
    world.table.replace("down.0", replace(resource, layout=launches.by_name["down.0"].layout))
    world.oracle.arrays["down.0"] = values.reshape(-1)[: launches.by_name["down.0"].layout.bytes // 4].copy()
    return {"launches": launches}


def other_consumer(world: World):
    """An expert launch that reads banks of two groups."""
    launches = step_launches(ROWS)
    changed = [
        replace(launch, operands=tuple(Operand("down.1") if o.buffer == "down.0" else o for o in launch.operands))
        if getattr(launch, "expert", False)
        else launch
        for launch in launches.launches
    ]
    return {"launches": replace(launches, launches=tuple(changed))}


def exceed(world: World):
    world.registry.accept(manifest(slots=3))
    for i in GROUPS:
        for name in (f"gate_up.{i}", f"down.{i}"):
            world.place(name, world.oracle.arrays[name][:3], "arena")
        world.write(f"slot_of.{i}", np.arange(EXPERTS, dtype=np.int32) % 3)
    return {"launches": slotted()}


def slotted():
    """The step over banks of three slots."""
    launches = step_launches(ROWS)
    narrow = {b.name: replace(b, shape=(3, *b.shape[1:])) for b in launches.buffers if b.name.split(".")[0] in BANKS}

    def narrowed(launch):
        if not getattr(launch, "expert", False):
            return launch
        arguments = tuple(replace(a, shape=(3, *a.shape[1:])) if a.name in BANKS else a for a in launch.spec.arguments)
        constants = tuple((name, 3 if name == "SLOTS" else value) for name, value in launch.spec.constexprs)
        return replace(launch, spec=replace(launch.spec, arguments=arguments, constexprs=constants))

    return replace(
        launches,
        buffers=tuple(narrow.get(b.name, b) for b in launches.buffers),
        launches=tuple(narrowed(launch) for launch in launches.launches),
    )


BANKS = ("gate_up", "down")


def other_manifest_owner(world: World):
    world.registry.advance_owner("main")


def moved(world: World):
    for name in ("gate_up.0", "router.1"):
        world.place(name, weights(7)[name], "weights")


def rewritten(world: World):
    for name in ("gate_up.0", "down.1", "out_weights"):
        world.write(name, weights(9)[name])


def other_rows(world: World):
    return {"rows": 4}


# What happens to a warm key of two rows; what it returns changes the steps after it. And the modes it is seen in.
HAPPENINGS = {
    Event.ROUTED: rerouted,
    Event.REBUILT: lambda world: {"launches": step_launches(ROWS)},
    Event.ADAPTERS_CHANGED: other_manifest_owner,
    Event.ADAPTER_REASSIGNED: lambda world: {"adapter": np.arange(ROWS)[::-1]},
    Event.MANIFEST_REPLACED: lambda world: world.registry.accept(manifest()) and None,
    Event.WEIGHTS_REWRITTEN: rewritten,
    Event.WEIGHTS_MOVED: moved,
    Event.OWNER_CHANGED: other_manifest_owner,
    Event.ADMISSION_FAILED: lambda world: world.registry.close_admission("main", "slots are being filled"),
    Event.PROMPT_BETWEEN: lambda world: world.step(ROWS, phase="prompt", semantics="sequential", sequences=1) and None,
    Event.ROWS_CHANGED: other_rows,
    Event.PROPERTIES_CHANGED: lambda world: {"launches": step_launches(ROWS, extent=64)},
    Event.PROPERTIES_UPDATED: lambda world: {"launches": step_launches(ROWS, extent=64)},
    Event.INCOMPATIBLE: other_consumer,
    Event.EXCEEDS_SLOTS: exceed,
    Event.REALLOCATED: lambda world: world.grow("kv.1"),
    Event.CUDA_FAILED: lambda world: world.runtime.fail("launch_graph"),
}


def after(world_for: Callable[..., World], event: Event) -> tuple[World, dict, object]:
    """A warm world in which the event has happened, what changes for the steps, and the old executable."""
    world = world_for(decode_boundary_overlap=event is Event.PROPERTIES_UPDATED)
    world.warm(ROWS)
    handle = world.step(ROWS).handle
    changes = HAPPENINGS[event](world) or {}
    return world, {"rows": ROWS, **changes}, handle


def test_the_table_is_whole():
    assert set(EFFECTS) == set(HAPPENINGS) == set(Event)


@pytest.mark.parametrize("event", Event, ids=lambda event: event.name)
def test_ordinary_steps(world_for, event):
    world, changes, handle = after(world_for, event)
    effect = EFFECTS[event]
    outcomes = [world.step(**changes) for _ in effect.calls]
    assert tuple(outcome.kind for outcome in outcomes) == effect.calls
    world.nothing_leaked()
    alive = handle in world.runtime.executables
    assert alive == (effect.fate in ("kept", "retained", "updated", "other key", "not bound"))
    if effect.fate in ("kept", "retained", "updated"):
        assert all(outcome.handle is handle for outcome in outcomes)
    if effect.fate == "swept":
        assert world.graphs.stats()["swept"] == 1
    world.counts_add_up()


@pytest.mark.parametrize("event", Event, ids=lambda event: event.name)
def test_required_steps(world_for, event):
    """As ordinary ones; or they fail closed: an error, nothing launched, no memory changed, counted."""
    world, changes, _ = after(world_for, event)
    effect = EFFECTS[event]
    failures = {"same": 0, "fails once": 1, "fails": 2}[effect.required]
    launches = changes.get("launches") or equal_list(changes["rows"])
    world.add_bucket(changes["rows"])
    for number in range(failures):
        world.inputs(changes["rows"], changes["rows"])
        before = {name: world.read(name).tobytes() for name in world.oracle.arrays}
        ran = dict(world.runtime.executed)
        certificate = world.certificate(changes["rows"], changes["rows"], required=True)
        with pytest.raises(RequiredStepFailed):
            world.graphs.step(launches, certificate, world.table)
        assert {name: world.read(name).tobytes() for name in world.oracle.arrays} == before
        assert dict(world.runtime.executed) == ran
        assert world.counts_add_up()["required_unsupported"] == number + 1
    if effect.required == "fails":
        return
    # What an ordinary step does first in the failing call is not done for a required one.
    calls = effect.calls[1:] if event is Event.CUDA_FAILED else effect.calls
    assert world.kinds(len(calls), **changes, required=True) == calls
    world.nothing_leaked()


def test_admission_reopened_is_a_new_start(world_for):
    world, changes, _ = after(world_for, Event.ADMISSION_FAILED)
    outcome = world.step(**changes)
    assert outcome.reason is Reason.ADMISSION_CLOSED and outcome.detail == "slots are being filled"
    assert world.graphs.stats()["fallback"] == 1
    world.registry.open_admission("main")
    world.warm(ROWS, required=True)


def test_an_old_owners_certificate_does_not_bind(world_for):
    world = world_for()
    world.warm(ROWS)
    world.registry.advance_owner("main")
    assert world.step(ROWS, owner_generation=1).reason is Reason.STALE_OWNER
    with pytest.raises(RequiredStepFailed, match="owner generation 1, now 2"):
        world.graphs.step(
            equal_list(ROWS), world.certificate(ROWS, ROWS, owner_generation=1, required=True), world.table
        )
    world.warm(ROWS)


def test_namespaces_do_not_meet(world_for):
    world = world_for()
    world.registry.accept(manifest(namespace="draft"))
    world.warm(ROWS)
    world.warm(ROWS, namespace="draft", owner_generation=1)
    handles = {world.step(ROWS).handle, world.step(ROWS, namespace="draft", owner_generation=1).handle}
    assert len(handles) == 2
    world.registry.retire("draft")
    assert world.step(ROWS).kind == "replay" and world.graphs.stats()["graphs"] == 1
    assert world.step(ROWS, namespace="draft", owner_generation=1).reason is Reason.NO_CONTEXT


@pytest.mark.parametrize("change", [{"sequences": 0}, {"semantics": "none"}, {"owner_generation": "1"}])
def test_a_malformed_certificate_fails_a_required_step_and_no_other(world_for, change):
    world = world_for()
    world.warm(ROWS)
    before = world.graphs.stats()
    outcome = world.step(ROWS, **change)
    assert outcome.reason is Reason.MALFORMED
    with pytest.raises(RequiredStepFailed, match="malformed certificate"):
        world.graphs.step(equal_list(ROWS), world.certificate(ROWS, ROWS, required=True, **change), world.table)
    stats = world.counts_add_up()
    assert (stats["plan_calls"], stats["required_unsupported"]) == (before["plan_calls"], 1)
    assert world.step(ROWS).kind == "replay"


def test_without_a_manifest_ordinary_steps_run_and_required_ones_fail(world_for):
    world = world_for(accept=False)
    assert world.step(ROWS).reason is Reason.NO_CONTEXT
    with pytest.raises(RequiredStepFailed, match="no manifest of namespace 'main'"):
        world.graphs.step(equal_list(ROWS), world.certificate(ROWS, ROWS, required=True), world.table)
    world.registry.accept(manifest())
    world.warm(ROWS, required=True)


def test_a_group_that_is_host_staged_is_never_captured(world_for):
    world = world_for(accept=False)
    world.registry.accept(manifest(staged=True))
    for required in (False, True):
        outcomes = [world.step(ROWS, required=required) for _ in range(3)]
        assert {outcome.reason for outcome in outcomes} == {Reason.HOST_STAGED}
    with pytest.raises(InvalidArgument, match=r"staged: got None \(group of layer 0 is host-staged\)"):
        world.graphs.step(equal_list(ROWS), world.certificate(ROWS, ROWS), world.table)


def test_a_wider_bucket_may_exceed_the_slots_and_a_narrower_one_not(world_for):
    """2 × 2 of 6 experts fit 5 slots, 4 × 2 do not."""
    for slots, rows, kind in ((3, 1, "replay"), (3, 2, "direct"), (EXPERTS, 8, "replay")):
        assert (min(rows * 2, EXPERTS) > slots) == (kind == "direct")
    world = world_for()
    changes = exceed(world)
    detail = world.step(ROWS, **changes).detail
    assert detail == "4 distinct experts possible in layer 0, 3 slots"


def test_restrided_weights_do_not_bind_until_a_manifest_declares_them(world_for):
    world = world_for()
    world.warm(ROWS)
    changes = restrided(world)
    outcome = world.step(ROWS, **changes)
    assert outcome.reason is Reason.NOT_COVERED
    assert outcome.detail == (
        "group of layer 0: down.0 is declared as float32[6, 4, 4] with strides [16, 4, 1]"
        " and used as float32[6, 4, 4] with strides [32, 4, 1]"
    )
    with pytest.raises(RequiredStepFailed, match="not covered"):
        world.graphs.step(changes["launches"], world.certificate(ROWS, ROWS, required=True), world.table)
    whole = manifest()
    up, down = whole.groups[0].banks
    declared = replace(down, buffer=replace(down.buffer, strides=(32, 4, 1)))
    world.registry.accept(replace(whole, groups=(replace(whole.groups[0], banks=(up, declared)), *whole.groups[1:])))
    world.warm(ROWS, required=True, **changes)
    world.step(ROWS, required=True, **changes)
    assert np.isfinite(world.read(f"logits/{ROWS}")).all()


def test_restrided_weights_have_the_results_of_those_without_gaps(world_for):
    one, other = world_for(), world_for()
    changes = restrided(other)
    for seed in range(3):
        one.step(ROWS, seed=seed)
        other.step(ROWS, seed=seed, **changes)
        assert one.read(f"logits/{ROWS}").tobytes() == other.read(f"logits/{ROWS}").tobytes()


def test_a_kernel_that_knows_no_gaps_is_never_given_restrided_weights(world_for):
    """Whatever a manifest declares: there is no such list."""
    world = world_for()
    changes = restrided(world)
    strides = r"strides of down\.0: got \[32, 4, 1\], wanted \[16, 4, 1\]"
    with pytest.raises(InvalidArgument, match=rf"\(experts\): down: {strides}"):
        replace(equal_list(ROWS), buffers=changes["launches"].buffers)
    with pytest.raises(InvalidArgument, match=r"layout of 'down\.0'"):
        world.step(ROWS)


def test_an_expert_launch_of_no_group_is_not_covered(world_for):
    world = world_for(accept=False)
    whole = manifest()
    world.registry.accept(replace(whole, groups=whole.groups[:1]))
    outcome = world.step(ROWS)
    assert outcome.reason is Reason.NOT_COVERED
    assert outcome.detail == "launch 6 (experts) reads experts of no registered group"
    assert world.kinds(2) == ("direct", "direct")


def taken_again(world: World, old: Resource, values: np.ndarray) -> Resource:
    """New memory where freed memory was, of the smallest pieces that there are: in the end they come from anywhere."""
    wanted, found, others = range(old.address, old.address + old.bytes, 256), {}, []
    for _ in range(4000):
        address, capsule = world.runtime.allocate(256)
        if address in wanted:
            found[address] = capsule
        else:
            others.append(capsule)
        if len(found) == len(wanted):
            world.runtime.write(old.address, values, world.graphs.stream)
            return replace(old, serial=next_serial(), capsule=found)
    raise AssertionError(f"{old} was not free, or is given to nobody")


@pytest.mark.parametrize("same_address", [True, False])
def test_an_address_used_again_by_another_owner_is_no_witness(world_for, same_address):
    """Memory that nobody's capsule holds: freed, and given to another array."""
    world = world_for()
    values = world.oracle.arrays["down.0"]
    resource = world.resource(values, "weights")
    world.table.replace("down.0", replace(resource, capsule=None))
    keep = [resource.capsule]
    world.warm(ROWS)
    del resource
    keep.clear()
    second = taken_again(world, world.table.get("down.0"), weights(4)["down.0"])
    if same_address:
        world.table.replace("down.0", second)
        world.oracle.arrays["down.0"] = weights(4)["down.0"].copy()
    else:
        world.place("down.0", values, "weights")
    outcome = world.step(ROWS)
    assert outcome.reason is Reason.WEIGHTS_MOVED
    assert outcome.mismatch.path == ("down.0.serial" if same_address else "down.0.address")
    assert world.kinds(2) == ("capture", "replay")


class SimulatedArray:
    """A user's array: deleting or donating it lets go of its own hold on the memory."""

    def __init__(self, world: World, values: np.ndarray):
        resource = world.resource(values, "weights")
        self.resource, self.exported = replace(resource, capsule=None), 0
        self._owner = resource.capsule

    def capsule(self):
        self.exported += 1
        return self._owner

    def donate(self) -> bool:
        """Whether the memory went to the result."""
        if not self.exported:
            self.delete()
        return not self.exported

    def delete(self) -> None:
        self._owner = None


class DeviceArray:
    """The same of JAX."""

    def __init__(self, world: World, values: np.ndarray):
        self.runtime, self.array = world.runtime, jax.device_put(values, world.runtime.device)
        self.array.block_until_ready()
        address, layout = self.array.unsafe_buffer_pointer(), dense("", values.dtype.name, values.shape).layout
        self.resource = Resource(
            address=address, bytes=values.nbytes, layout=layout, serial=next_serial(), use="weights"
        )

    def capsule(self):
        return self.runtime.hold(self.array)[1]

    def donate(self) -> bool:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = jax.jit(lambda x: x + x, donate_argnums=0)(self.array).block_until_ready()
        except (RuntimeError, ValueError):
            return False
        return result.unsafe_buffer_pointer() == self.resource.address

    def delete(self) -> None:
        if not self.array.is_deleted():
            self.array.delete()


@pytest.mark.parametrize("donated", [True, False])
@pytest.mark.parametrize("held", [True, False])
def test_a_user_donating_or_deleting_a_weight_under_a_live_graph(world_for, held, donated):
    """With our capsule the memory stays. Without (what the capsule is for) the next array overwrites it."""
    world = world_for()
    kind = SimulatedArray if world.runtime.simulated else DeviceArray
    array = kind(world, world.oracle.arrays["down.0"].copy())
    capsule = array.capsule() if held else None
    world.table.replace("down.0", replace(array.resource, capsule=capsule))
    world.warm(ROWS)
    del capsule
    if donated:
        assert array.donate() is not held
    array.delete()
    if held:
        with pytest.raises(AssertionError, match="given to nobody"):
            taken_again(world, array.resource, weights(5)["down.0"])
        assert world.step(ROWS).kind == "replay"
    else:
        _thief = taken_again(world, array.resource, weights(5)["down.0"])
        with pytest.raises(AssertionError, match="in place of"):
            world.step(ROWS)


def test_transitions_between_prompt_and_decode_are_counted(world_for):
    world = world_for()
    world.warm(ROWS)
    for _ in range(3):
        world.step(ROWS, phase="prompt", semantics="sequential", sequences=1)
        world.step(ROWS)
    stats = world.graphs.stats()
    assert stats["transitions"] == 6 and stats["declines"]["prompt"] == 3 and stats["fallback"] == 0


def test_the_documented_table_is_the_one_the_code_acts_on():
    text = (Path(__file__).parents[2] / "docs/graph-reuse.md").read_text()
    assert markdown() in text
