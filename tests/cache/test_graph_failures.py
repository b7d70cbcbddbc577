"""A call of CUDA that fails: nothing half-built stays, ordinary steps go on, required ones fail closed.

A call that fails on a GPU does not reach the driver: see `cuda_device`.
"""

from __future__ import annotations

import pytest
from toy_step import World, equal_list, step_launches, weights

from moe_jax.cache.outcome import Reason, RequiredStepFailed, StoreUnusable
from moe_jax.cache.runtime import StickyError
from moe_jax.pallas_kernels.errors import CudaError

ROWS = 2
CALLS = ("begin_capture", "launch", "copy", "end_capture", "instantiate", "upload", "launch_graph")
NAMES = {"begin_capture": "begin", "launch": "record", "copy": "record", "end_capture": "end", "launch_graph": "launch"}
ERRORS = ("CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY")


def seen(world: World) -> World:
    """One whose next step captures."""
    assert world.step(ROWS).kind == "direct"
    return world


def fails_closed(world: World, launches=None) -> None:
    world.inputs(ROWS, ROWS)
    before = {name: world.read(name).tobytes() for name in world.oracle.arrays}
    failed = world.graphs.stats()["required_unsupported"]
    with pytest.raises(RequiredStepFailed):
        world.graphs.step(launches or equal_list(ROWS), world.certificate(ROWS, ROWS, required=True), world.table)
    assert {name: world.read(name).tobytes() for name in world.oracle.arrays} == before
    assert world.counts_add_up()["required_unsupported"] == failed + 1


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("call", CALLS)
def test_C56_a_capture_that_fails_leaves_nothing_behind(world_for, call, name):
    world = seen(world_for())
    world.runtime.fail(call, name=name)
    outcome = world.step(ROWS)
    assert outcome.kind == "direct" and outcome.reason is Reason.GRAPH_FAILED
    assert outcome.detail.startswith(NAMES.get(call, call)) and name in outcome.detail
    world.nothing_leaked()
    stats = world.counts_add_up()
    assert stats["graph_error"] == {NAMES.get(call, call): 1} and stats["graphs"] == 0 and stats["fallback"] == 1
    world.warm(ROWS)
    world.nothing_leaked()


@pytest.mark.parametrize("call", CALLS)
def test_C56_a_required_capture_that_fails_fails_closed(world_for, call):
    world = seen(world_for())
    world.runtime.fail(call)
    fails_closed(world)
    world.nothing_leaked()
    world.warm(ROWS, required=True)


@pytest.mark.parametrize("required", [False, True])
def test_C56_a_replay_that_fails_is_run_direct_or_fails_closed(world_for, required):
    world = world_for()
    world.warm(ROWS)
    world.runtime.fail("launch_graph")
    if required:
        fails_closed(world)
    else:
        assert world.step(ROWS).reason is Reason.GRAPH_FAILED
    world.nothing_leaked()
    world.warm(ROWS, required=required)


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("call", ["begin_capture", "launch", "end_capture", "update", "upload", "launch_graph"])
def test_C56_an_update_that_fails_drops_the_executable(world_for, call, required):
    world = world_for(decode_boundary_overlap=True)
    world.warm(ROWS)
    small = step_launches(ROWS, extent=64)
    world.runtime.fail(call)
    if required:
        fails_closed(world, small)
    else:
        assert world.step(ROWS, launches=small).reason is Reason.GRAPH_FAILED
    assert world.graphs.stats()["graphs"] == 0
    world.nothing_leaked()
    world.warm(ROWS, launches=small)


def test_C56_an_executable_made_anew_that_fails_takes_the_old_one_along(world_for, monkeypatch):
    world = world_for(decode_boundary_overlap=True)
    world.warm(ROWS)
    monkeypatch.setattr(world.runtime, "update", lambda executable, captured: False)
    for call in ("instantiate", "upload", "launch_graph"):
        small = step_launches(ROWS, extent=64)
        world.runtime.fail(call)
        assert world.step(ROWS, launches=small).reason is Reason.GRAPH_FAILED
        world.nothing_leaked()
        world.warm(ROWS)


def test_a_graph_that_cannot_be_destroyed_is_kept_for_the_next_try(world_for):
    world = world_for(max_entries=1)
    world.warm(2)
    world.runtime.fail("destroy", times=2)
    assert world.kinds(2, 4) == ("direct", "capture")
    assert world.graphs.stats()["destroy_errors"] == 2
    assert world.step(4).kind == "replay"
    world.nothing_leaked()
    world.runtime.fail("destroy", times=1)
    world.graphs.close()
    assert not world.runtime.executables


@pytest.mark.parametrize("error", [RuntimeError("not of CUDA"), KeyboardInterrupt("pressed")])
def test_an_error_that_is_not_of_cuda_keeps_no_other_graph_from_its_end(error, monkeypatch):
    """The first is raised at the end, an interrupt at once; the next try destroys what is left."""
    world = World()
    for rows in (1, 2, 4):
        world.warm(rows)
    real, tried = world.runtime.destroy, []

    def destroy(graph) -> None:
        tried.append(graph)
        if len(tried) in (1, 2):
            raise error if len(tried) == 1 else RuntimeError("second")
        real(graph)

    monkeypatch.setattr(world.runtime, "destroy", destroy)
    with pytest.raises(type(error), match=str(error)):
        world.graphs.close()
    assert len(tried) == (3 if isinstance(error, Exception) else 1)
    assert len(world.runtime.executables) == (2 if isinstance(error, Exception) else 3)
    if not isinstance(error, Exception):
        with pytest.raises(RuntimeError, match="second"):
            world.graphs.close()
    world.graphs.close()
    assert not world.runtime.executables and world.graphs.stats()["state"] == "closed"


def test_an_error_while_graphs_are_tried_again_loses_none_of_them(monkeypatch):
    world = World(max_entries=1)
    world.runtime.fail("destroy", times=None)
    for rows in (1, 2):
        world.warm(rows)
    world.runtime.heal()
    left, real = world.graphs.stats()["undestroyed"], world.runtime.destroy
    assert left == 3

    def destroy(graph) -> None:
        raise RuntimeError("not of CUDA")

    monkeypatch.setattr(world.runtime, "destroy", destroy)
    with pytest.raises(RuntimeError, match="not of CUDA"):
        world.step(2)
    assert world.graphs.stats()["undestroyed"] == left
    monkeypatch.setattr(world.runtime, "destroy", real)
    world.graphs.close()
    assert not world.runtime.executables


def test_a_wait_that_fails_does_not_destroy_a_graph_in_flight():
    world = World(max_entries=1)
    world.warm(2)
    world.inputs(4, 4)
    world.graphs.step(equal_list(4), world.certificate(4, 4), world.table)
    world.graphs.step(equal_list(2), world.certificate(2, 2), world.table)
    world.runtime.fail("wait")
    outcome = world.graphs.step(equal_list(4), world.certificate(4, 4), world.table)
    assert outcome.kind == "capture" and len(world.runtime.executables) == 2
    for rows in (4, 2, 4):
        world.oracle.run(equal_list(rows))
    world.check(2, 4)
    world.step(4)
    world.nothing_leaked()


@pytest.mark.parametrize("when", ["direct", "capture", "replay"])
@pytest.mark.parametrize("required", [False, True])
def test_a_step_whose_event_cannot_be_recorded_is_waited_for(world_for, when, required):
    world = world_for()
    world.kinds(["direct", "capture", "replay"].index(when))
    world.runtime.fail("record_event")
    outcome = world.step(ROWS, required=required)
    assert outcome.kind == when and outcome.event is None
    stats = world.counts_add_up()
    assert stats["finish_error"] == 1 and stats["graphs"] == 0
    world.nothing_leaked()
    if when != "direct":
        world.warm(ROWS, required=required)


def test_a_kernel_that_does_not_load_stops_a_step_before_its_first_launch(world_for):
    world = world_for()
    world.inputs(ROWS, ROWS)
    for after in (0, 3):
        world.runtime.fail("load", after=after, name="CUDA_ERROR_OUT_OF_MEMORY")
        with pytest.raises(CudaError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            world.graphs.step(equal_list(ROWS), world.certificate(ROWS, ROWS), world.table)
    assert world.runtime.calls["launch"] == 0
    assert world.counts_add_up()["prepare_error"] == 2
    world.warm(ROWS)


@pytest.mark.parametrize("after", [0, 5])
def test_a_direct_launch_that_fails_reaches_the_caller(world_for, after):
    """Earlier launches of the step have run: the error says that the state is the step's no more."""
    world = world_for(mode="off")
    world.inputs(ROWS, ROWS)
    world.runtime.fail("launch", after=after)
    with pytest.raises(CudaError, match="CUDA_ERROR_UNKNOWN"):
        world.graphs.step(equal_list(ROWS), world.certificate(ROWS, ROWS), world.table)
    world.oracle.run(equal_list(ROWS), after)
    world.check(ROWS)
    assert world.counts_add_up()["launch_error"] == 1
    assert world.kinds(2) == ("direct", "direct")


def test_a_host_staged_step_that_fails_reaches_the_caller(world_for):
    world = world_for()
    world.registry.accept(
        type(m := world.registry.manifest("main")[0])(
            m.namespace, tuple(type(g)(**{**vars(g), "staged": True}) for g in m.groups)
        )
    )
    world.inputs(ROWS, ROWS)

    def staged(stream):
        raise CudaError("copy", where="staged", got="CUDA_ERROR_UNKNOWN", wanted="CUDA_SUCCESS")

    with pytest.raises(CudaError, match="staged: copy"):
        world.graphs.step(equal_list(ROWS), world.certificate(ROWS, ROWS), world.table, staged=staged)
    world.check(ROWS)
    assert world.step(ROWS).reason is Reason.HOST_STAGED


@pytest.mark.parametrize("call", [*CALLS, "record_event", "execute"])
def test_a_sticky_error_leaves_a_dead_store_that_says_so(call):
    world = seen(World())
    world.runtime.fail(call, sticky=True, name="CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(StickyError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        world.graphs.step(equal_list(ROWS), world.certificate(ROWS, ROWS), world.table)
        world.graphs.drain()
    for _ in range(2):
        with pytest.raises(StoreUnusable, match=r"dead, the device context is lost: .*CUDA_ERROR_ILLEGAL_ADDRESS.*new"):
            world.graphs.step(equal_list(ROWS), world.certificate(ROWS, ROWS), world.table)
    assert world.graphs.stats()["state"].startswith("dead")
    calls = dict(world.runtime.calls)
    world.graphs.close()
    assert dict(world.runtime.calls) == calls, "nothing is asked of a lost context"


def test_a_stream_that_neither_records_nor_synchronises_is_lost():
    world = seen(World())
    world.runtime.fail("record_event")
    world.runtime.fail("synchronize")
    with pytest.raises(StickyError, match="an end of the work in flight"):
        world.graphs.step(equal_list(ROWS), world.certificate(ROWS, ROWS), world.table)
    with pytest.raises(StoreUnusable, match="dead"):
        world.graphs.step(equal_list(ROWS), world.certificate(ROWS, ROWS), world.table)


def test_failures_that_last_are_served_direct_at_no_more_than_every_other_capture(world_for):
    world = world_for()
    world.runtime.fail("instantiate", times=None)
    kinds = [world.step(ROWS) for _ in range(9)]
    assert {outcome.kind for outcome in kinds} == {"direct"}
    assert world.graphs.stats()["graph_error"] == {"instantiate": 4}
    world.runtime.heal()
    world.place("down.0", weights(2)["down.0"], "weights")
    assert world.kinds(4)[-1] == "replay"
