"""The CUDA runtime over a fake driver: the calls of each step, and errors. On a GPU: test_cuda_runtime_gpu.py."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading

import jax
import numpy as np
import pytest

pytest.importorskip("cuda.core")

from cuda.bindings import driver as real_driver
from device_step import DeviceWorld, same_at_every_step
from fake_driver import FakeDriver, doubling, fake_runtime, placed, recorded
from toy_step import World, equal_list, kernel, step_launches

from moe_jax.cache.cuda_runtime import STICKY, CudaGraph, CudaRuntime, CudaStream
from moe_jax.cache.outcome import Reason, StoreUnusable
from moe_jax.cache.runtime import StickyError
from moe_jax.pallas_kernels.errors import CudaError, InvalidArgument

ROWS = 2
# Function of the driver, and what the store calls the step that fails.
CALLS = {
    "cuStreamBeginCapture": "begin",
    "cuLaunchKernelEx": "record",
    "cuMemcpyDtoDAsync": "record",
    "cuStreamEndCapture": "end",
    "cuGraphInstantiate": "instantiate",
    "cuGraphUpload": "upload",
    "cuGraphLaunch": "launch",
}


@pytest.fixture
def made(monkeypatch):
    return fake_runtime(monkeypatch)


def nothing_leaked(world: World, fake: FakeDriver) -> None:
    assert len(fake.executables) == world.graphs.stats()["graphs"] and not fake.graphs
    assert all(stream.nodes is None for stream in fake.streams.values())


# -- Calls ------------------------------------------------------------------------------------------------------------


def test_the_calls_of_each_kind_of_step(made):
    runtime, fake = made
    world = World(runtime=runtime, mode="on")
    launches = ["cuLaunchKernelEx"] * (len(equal_list(ROWS).launches) - 1) + ["cuMemcpyDtoDAsync"]
    wanted = [
        [*launches, "cuEventRecord"],
        [
            *("cuEventQuery", "cuStreamBeginCapture", *launches, "cuStreamEndCapture", "cuGraphInstantiate"),
            *("cuGraphDestroy", "cuGraphUpload", "cuGraphLaunch", "cuEventRecord"),
        ],
        ["cuGraphLaunch", "cuEventRecord"],
        ["cuGraphLaunch", "cuEventRecord"],
    ]
    for number, calls in enumerate(wanted):
        world.inputs(ROWS, ROWS)
        runtime.synchronize(world.graphs.stream)
        fake.calls.clear()
        world.graphs.step(equal_list(ROWS), world.certificate(ROWS, ROWS), world.table)
        # The first one loads every kernel before its first launch.
        assert [c for c in fake.calls if c not in ("cuKernelGetFunction", "cuFuncSetAttribute")] == calls, number
        assert number == 0 or len(fake.calls) == len(calls)
    fake.calls.clear()
    world.graphs.close()
    assert fake.calls == ["cuEventQuery", "cuEventSynchronize", "cuGraphExecDestroy", "cuStreamSynchronize"]
    nothing_leaked(world, fake)


def test_close_waits_for_what_was_written_since_the_last_step(made):
    """Its memory is given to other arrays afterwards."""
    runtime, fake = made
    world = World(runtime=runtime, mode="on")
    world.step(ROWS)
    world.inputs(ROWS, ROWS)
    stream = fake.stream(world.graphs.stream.handle)
    assert stream.waiting
    world.graphs.close()
    assert not stream.waiting


def test_steps_of_every_kind_have_the_bits_of_the_oracle(made):
    runtime, fake = made
    world = World(runtime=runtime, mode="on", decode_boundary_overlap=True, max_entries=1)
    world.warm(ROWS)
    executable = world.graphs.last.handle
    assert world.step(ROWS, launches=step_launches(ROWS, extent=64)).kind == "update"
    assert world.graphs.last.handle is executable and world.step(ROWS, launches=step_launches(ROWS, extent=64)).kind
    world.warm(4)
    assert world.graphs.stats()["evictions"] == 1
    nothing_leaked(world, fake)


def test_a_queued_read_gives_what_was_there_at_its_place_in_the_stream(made):
    """The next one uses its memory and its event again, and what is queued behind one is not waited for."""
    runtime, fake = made
    stream = runtime.new_stream()
    (x, _x), (y, _y) = placed(runtime, stream, np.arange(4, dtype=np.float32), np.zeros(4, np.float32))
    loaded = runtime.load(doubling())
    fake.calls.clear()
    reading, seen = None, []
    for turn in range(3):
        runtime.launch(loaded, (x, y), stream)
        reading = runtime.queue_read(y, "float32", (2, 2), stream, reading)
        runtime.launch(loaded, (y, x), stream)
        values = runtime.finish_read(reading)
        assert values.tolist() == [[0, 2 * 4**turn], [4 * 4**turn, 6 * 4**turn]]
        assert len(fake.stream(stream.handle).waiting) == 1
        seen.append((reading.pinned, reading.event, values))
    assert len({id(pinned) for pinned, _, _ in seen}) == len({id(event) for _, event, _ in seen}) == 1
    assert seen[0][2].tolist() == [[0, 2], [4, 6]], "a copy"
    # One event is recorded when it is made.
    again = ["cuLaunchKernelEx", "cuMemcpyDtoHAsync", "cuEventRecord", "cuLaunchKernelEx", "cuEventSynchronize"]
    assert fake.calls == [again[0], "cuMemAllocHost", "cuEventRecord", *again[1:], *again * 2]
    assert len(fake.pinned) == 2
    del reading, seen
    gc.collect()
    assert len(fake.pinned) == 1, "the stream's own"


@pytest.mark.parametrize("size", [0, (1 << 16) + 1])
def test_a_queued_read_is_of_a_few_values(made, size):
    runtime, fake = made
    stream = runtime.new_stream()
    fake.calls.clear()
    with pytest.raises(InvalidArgument, match=f"queue_read: size: got {size}, wanted 1 to 65536 bytes"):
        runtime.queue_read(4096, "uint8", (size,), stream)
    assert fake.calls == []


@pytest.mark.parametrize(
    ("call", "again"),
    [
        ("cuMemAllocHost", False),
        *((call, again) for call in ("cuMemcpyDtoHAsync", "cuEventRecord") for again in (0, 1)),
    ],
)
def test_a_queued_read_that_fails_leaves_no_copy_under_way(made, call, again):
    """Its memory goes: the stream is waited for."""
    runtime, fake = made
    stream = runtime.new_stream()
    ((x, _x),) = placed(runtime, stream, np.arange(4, dtype=np.float32))
    reading = runtime.queue_read(x, "float32", (4,), stream) if again else None
    fake.fail(call, after=int(call == "cuEventRecord" and not again))
    with pytest.raises(CudaError, match="CUDA_ERROR_UNKNOWN"):
        runtime.queue_read(x, "float32", (4,), stream, reading)
    assert not fake.stream(stream.handle).waiting or call == "cuMemAllocHost"
    gc.collect()
    assert len(fake.pinned) == 1 + again
    runtime.synchronize(stream)
    assert runtime.finish_read(runtime.queue_read(x, "float32", (4,), stream, reading)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_step_of_real_kernels_direct_and_replayed(made, rows, pdl):
    """Kernels are stand-ins whose results depend on all that they read; the GPU runs them."""
    runtime, fake = made
    fake.stand_in = True
    worlds = [DeviceWorld(runtime, rows, draws=False, pdl=pdl, mode=mode) for mode in ("off", "on")]
    assert same_at_every_step(*worlds, 6) == ["direct", "capture", *["replay"] * 4]
    assert {config.numAttrs for config in fake.launched} == {int(pdl)}
    if pdl:
        (attribute,) = fake.launched[0].attrs
        assert attribute.id == real_driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert attribute.value.programmaticStreamSerializationAllowed == 1


def test_a_stale_replay_of_stand_ins_would_be_seen(made):
    runtime, fake = made
    fake.stand_in = True
    worlds = [DeviceWorld(runtime, 2, draws=False, pdl=False, mode=mode) for mode in ("off", "on")]
    same_at_every_step(*worlds, 3)
    (nodes,) = fake.executables.values()
    spec_, addresses, *_ = nodes[0]
    nodes[0] = (spec_, (addresses[0], addresses[1], worlds[1].table.get("y.0").address))
    with pytest.raises(AssertionError, match="step 0"):
        same_at_every_step(*worlds, 1)


# -- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY"])
@pytest.mark.parametrize("call", CALLS)
def test_a_capture_that_fails_in_the_driver_leaves_nothing_behind(made, call, error):
    runtime, fake = made
    world = World(runtime=runtime, mode="on")
    assert world.step(ROWS).kind == "direct"
    fake.fail(call, error)
    outcome = world.step(ROWS)
    assert outcome.kind == "direct" and outcome.reason is Reason.GRAPH_FAILED
    assert outcome.detail.startswith(CALLS[call]) and error in outcome.detail
    nothing_leaked(world, fake)
    world.warm(ROWS)
    nothing_leaked(world, fake)


def test_an_update_that_cuda_refuses_is_false_and_any_other_error_is_raised(made):
    runtime, fake = made
    stream = runtime.new_stream()
    (x, _x), (y, _y) = placed(runtime, stream, np.ones(4, np.float32), np.zeros(4, np.float32))
    loaded = runtime.load(doubling())
    other = runtime.load(kernel(lambda x: x, {"y": ("float32", 4)}, x=("float32", 4)))
    executable = runtime.instantiate(recorded(runtime, stream, (loaded, (x, y))))
    serial = executable.serial
    assert runtime.update(executable, recorded(runtime, stream, (loaded, (y, y)))) is True
    assert runtime.update(executable, recorded(runtime, stream, (other, (x, y)))) is False
    assert runtime.update(executable, recorded(runtime, stream, (loaded, (x, y)), (loaded, (x, y)))) is False
    for error in ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_NOT_SUPPORTED"):
        fake.fail("cuGraphExecUpdate", error)
        with pytest.raises(CudaError, match=rf"CudaRuntime.update: .*{error}"):
            runtime.update(executable, recorded(runtime, stream, (loaded, (x, y))))
    assert executable.serial == serial
    runtime.launch_graph(executable, stream)
    assert runtime.read(y, "float32", (4,), stream).tolist() == [0, 0, 0, 0], "updated to read y"


def test_a_refused_update_makes_the_executable_anew(made):
    runtime, fake = made
    world = World(runtime=runtime, mode="on", decode_boundary_overlap=True)
    world.warm(ROWS)
    fake.fail("cuGraphExecUpdate", "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE")
    assert world.step(ROWS, launches=step_launches(ROWS, extent=64)).kind == "update"
    assert world.graphs.stats()["reinstantiations"] == 1
    nothing_leaked(world, fake)


def test_a_graph_that_cannot_be_destroyed_is_still_there(made):
    runtime, fake = made
    world = World(runtime=runtime, mode="on", max_entries=1)
    world.warm(2)
    fake.fail("cuGraphExecDestroy")
    assert world.kinds(2, 4) == ("direct", "capture")
    assert world.graphs.stats()["destroy_errors"] == 1
    world.step(4)
    nothing_leaked(world, fake)


@pytest.mark.parametrize("error", sorted(STICKY))
def test_a_sticky_error_ends_the_store_and_the_driver_is_asked_no_more(made, error):
    runtime, fake = made
    if error not in real_driver.CUresult.__members__:
        pytest.skip(f"these bindings have no {error}")
    world = World(runtime=runtime, mode="on")
    world.warm(ROWS)
    fake.fail("cuGraphLaunch", error)
    with pytest.raises(StickyError, match=f"launch_graph: .*{error}"):
        world.graphs.step(equal_list(ROWS), world.certificate(ROWS, ROWS), world.table)
    fake.calls.clear()
    with pytest.raises(StoreUnusable, match=f"dead, .*{error}"):
        world.graphs.step(equal_list(ROWS), world.certificate(ROWS, ROWS), world.table)
    world.graphs.close()
    for call in (runtime.new_stream, lambda: runtime.allocate(16), lambda: runtime.load(doubling())):
        with pytest.raises(StickyError, match=error):
            call()
    assert fake.calls == []


@pytest.mark.parametrize("where", ["wait", "event_done", "synchronize", "read", "finish_read"])
def test_work_that_faults_is_seen_where_it_is_waited_for(made, where):
    runtime, fake = made
    stream = runtime.new_stream()
    ((x, _x),) = placed(runtime, stream, np.ones(4, np.float32))
    event, reading = runtime.record_event(stream), runtime.queue_read(x, "float32", (4,), stream)
    assert runtime.event_done(event) is False
    fake.fail("execute", "CUDA_ERROR_ILLEGAL_ADDRESS")
    if where == "event_done":
        fake.fail("cuEventQuery", "CUDA_ERROR_ILLEGAL_ADDRESS")
    calls = {
        "wait": lambda: runtime.wait(event),
        "event_done": lambda: runtime.event_done(event),
        "synchronize": lambda: runtime.synchronize(stream),
        "read": lambda: runtime.read(x, "float32", (4,), stream),
        "finish_read": lambda: runtime.finish_read(reading),
    }
    with pytest.raises(StickyError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        calls[where]()


def test_an_ordinary_error_is_not_sticky(made):
    runtime, fake = made
    fake.fail("cuStreamSynchronize", "CUDA_ERROR_UNKNOWN")
    stream = runtime.new_stream()
    with pytest.raises(CudaError, match=r"CudaRuntime.synchronize: call failed: got CUDA_ERROR_UNKNOWN") as caught:
        runtime.synchronize(stream)
    assert not isinstance(caught.value, StickyError)
    runtime.synchronize(stream)


def test_errors_that_cuda_core_and_jax_raise_have_the_drivers_names(made, monkeypatch):
    runtime, _ = made

    def raising(error):
        def call(*_, **__):
            raise error

        return call

    monkeypatch.setattr(runtime._core, "create_stream", raising(Exception("CUDA_ERROR_NOT_PERMITTED: says why")))
    with pytest.raises(CudaError, match=r"new_stream: .*CUDA_ERROR_NOT_PERMITTED,"):
        runtime.new_stream()
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes")
    monkeypatch.setattr(jax, "device_put", raising(full))
    with pytest.raises(CudaError, match=r"allocate: .*CUDA_ERROR_OUT_OF_MEMORY"):
        runtime.allocate(16)
    monkeypatch.setattr(jax, "device_put", raising(TypeError("no array")))
    with pytest.raises(TypeError, match="no array"):
        runtime.allocate(16)
    lost = jax.errors.JaxRuntimeError("INTERNAL: failed: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure")
    monkeypatch.setattr(jax, "device_put", raising(lost))
    with pytest.raises(StickyError, match=r"allocate: .*CUDA_ERROR_LAUNCH_FAILED"):
        runtime.allocate(16)


@pytest.mark.parametrize("kind", ["executable", "recorded graph"])
def test_what_is_destroyed_is_destroyed_once(made, kind):
    """Also if an interrupt comes meanwhile: the driver may have given its handle to another graph."""
    runtime, fake = made
    graph = recorded(runtime, runtime.new_stream())
    graph = runtime.instantiate(graph) if kind == "executable" else graph
    function = "cuGraphExecDestroy" if kind == "executable" else "cuGraphDestroy"
    fake.calls.clear()
    fake.fail(function)
    with pytest.raises(CudaError, match=r"destroy: .*CUDA_ERROR_UNKNOWN"):
        runtime.destroy(graph)
    assert graph.handle in (fake.executables if kind == "executable" else fake.graphs), "refused: still there"
    fake.interrupt(function)
    with pytest.raises(KeyboardInterrupt):
        runtime.destroy(graph)
    runtime.destroy(graph)
    assert fake.calls == [function, function]


# Functions that a store calls. What these make and do not return is lost with the interrupt, and nothing else is.
MAKE = ("cuStreamEndCapture", "cuGraphInstantiate")
INTERRUPTED = (
    *("cuKernelGetFunction", "cuLaunchKernelEx", "cuMemcpyDtoDAsync", "cuStreamBeginCapture"),
    *("cuGraphExecUpdate", "cuGraphUpload", "cuGraphLaunch", "cuGraphDestroy", "cuGraphExecDestroy", "cuEventRecord"),
    *("cuEventQuery", "cuEventSynchronize", "cuStreamSynchronize"),
)


def every_kind_of_step(world: World) -> None:
    """Direct, captured, replayed, updated, again of another owner; and growth."""
    certificate = world.certificate(ROWS, ROWS)
    whole, part = (step_launches(ROWS, layers=1, extent=extent) for extent in (None, 64))
    for launches in (whole, whole, whole, part):
        world.graphs.step(launches, certificate, world.table)
    world.registry.advance_owner("main")
    for _ in range(3):
        world.graphs.step(whole, world.certificate(ROWS, ROWS), world.table)
    world.grow("kv.0")
    world.graphs.drain()


@pytest.mark.parametrize(
    ("call", "before"), [*((call, False) for call in (*INTERRUPTED, *MAKE)), *((call, True) for call in MAKE)]
)
def test_an_interrupt_during_any_call_of_the_driver_leaves_a_store_that_works(monkeypatch, call, before):
    for number in itertools.count():
        runtime, fake = fake_runtime(monkeypatch)
        world = World(runtime=runtime, mode="on", layers=1, decode_boundary_overlap=True)
        world.inputs(ROWS, ROWS)
        fake.interrupt(call, number, before=before)
        with contextlib.suppress(KeyboardInterrupt):
            every_kind_of_step(world)
            break
        assert fake.interrupted and gc.isenabled()
        # How much of the step has run is not known: the state begins anew.
        for name in world.oracle.arrays:
            world.oracle.arrays[name][...] = world.read(name)
        for extent in (None, None, 64, None):
            world.step(ROWS, launches=step_launches(ROWS, layers=1, extent=extent))
        world.graphs.drain()
        lost = int(call in MAKE and not before)
        assert len(fake.executables) + len(fake.graphs) == world.graphs.stats()["graphs"] + lost
        assert all(stream.nodes is None for stream in fake.streams.values())
        thread_may_use(runtime, world.graphs.stream)
        world.graphs.close()
        assert len(fake.executables) + len(fake.graphs) == lost and world.graphs.stats()["graph_error"] == {}
    assert number


def thread_may_use(runtime: CudaRuntime, stream: CudaStream) -> None:
    """No capture has kept it."""
    thread = threading.Thread(target=runtime.synchronize, args=(stream,), daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive(), "the stream is kept for ever"


def test_handles_that_are_gone_or_of_another_kind_never_reach_the_driver(made):
    runtime, fake = made
    stream = runtime.new_stream()
    graph = recorded(runtime, stream)
    executable = runtime.instantiate(graph)
    assert executable != graph and executable.serial != graph.serial
    runtime.destroy(graph)
    fake.calls.clear()
    runtime.destroy(graph)
    for call in (
        lambda: runtime.instantiate(graph),
        lambda: runtime.instantiate(executable),
        lambda: runtime.update(executable, graph),
        lambda: runtime.launch_graph(graph, stream),
        lambda: runtime.upload(CudaGraph(5, False), stream),
    ):
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_HANDLE"):
            call()
    assert fake.calls == []
    runtime.destroy(executable)
    assert not fake.executables and not fake.graphs


def test_dropping_a_stream_leaves_the_context_of_its_thread(made):
    runtime, fake = made
    stream = runtime.new_stream()
    assert len(fake.pinned) == 1
    fake.current[threading.get_ident()] = 99  # another device's
    del stream
    gc.collect()
    assert fake.current[threading.get_ident()] == 99 and not fake.pinned
