"""The simulated device makes mistakes visible."""

from __future__ import annotations

import gc
import inspect
import itertools
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_step import kernel

from moe_jax.cache.address_space import BASE, GRAIN, AddressSpace
from moe_jax.cache.runtime import Runtime, StickyError
from moe_jax.cache.simulated import SimulatedRuntime
from moe_jax.errors import InvalidArgument
from moe_jax.pallas_kernels.errors import CudaError


def double(x):
    return x * 2


def spec():
    return kernel(double, {"y": ("float32", 4)}, x=("float32", 4))


def arrays(runtime, stream, count=2):
    memory = [runtime.allocate(16) for _ in range(count)]
    runtime.write(memory[0][0], np.arange(4, dtype=np.float32), stream)
    return memory


def served(kind: type) -> bool:
    """Whether a runtime has all methods of the protocol, of its own, and each a description to be read."""
    methods = {name for name, value in vars(Runtime).items() if inspect.isfunction(value) and name[0] != "_"}
    return len(methods) > 20 and methods <= vars(kind).keys() and all(inspect.getdoc(getattr(kind, m)) for m in methods)


def test_every_method_of_a_runtime_is_there_and_described():
    assert served(SimulatedRuntime)


@settings(max_examples=40, deadline=None, database=None)
@given(st.lists(st.tuples(st.integers(1, 3000), st.booleans()), min_size=1, max_size=60))
def test_blocks_never_overlap_and_all_memory_comes_back(requests):
    space, live = AddressSpace(1 << 15), []
    for size, free_one in requests:
        address = space.allocate(size)
        if address is not None:
            live.append((address, size))
        if free_one and live:
            space.free(live.pop(len(live) // 2)[0])
        ends = sorted((a, a + -(-s // GRAIN) * GRAIN) for a, s in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
        assert space.bytes == sum(end - start for start, end in ends)
    for address, _ in live:
        space.free(address)
    assert space.allocate(1 << 15) == BASE and space.allocate(1) is None


def code_lines(cls: type) -> list[tuple[str, int]]:
    """Every line of every method that runs, by its number there."""
    codes = [inspect.unwrap(value).__code__ for value in vars(cls).values() if inspect.isfunction(value)]
    return [
        (code.co_name, line)
        for code in codes
        if code.co_name not in ("__init__", "view")
        for line in sorted({number - code.co_firstlineno for *_, number in code.co_lines() if number} - {0})
    ]


@pytest.mark.parametrize("act", ["free", "allocate", "no room"])
@pytest.mark.parametrize(("method", "line"), code_lines(AddressSpace))
def test_memory_that_the_collector_frees_meanwhile_is_freed_once(act, method, line):
    """Its finalizers run between any two lines."""
    space = AddressSpace(GRAIN * 16)
    blocks = [space.allocate(GRAIN) for _ in range(12)]
    for index in (0, 2, 4):
        space.free(blocks[index])
    code, found = inspect.unwrap(getattr(AddressSpace, method)).__code__, False

    def trace(frame, event, _):
        nonlocal found
        if frame.f_code is not code:
            return None
        if event == "line" and frame.f_lineno == code.co_firstlineno + line and not found:
            found = True
            sys.settrace(None)
            space.free(blocks[1])
            sys.settrace(trace)
        return trace

    acts = {
        "free": lambda: space.free(blocks[5]),
        "allocate": lambda: space.allocate(2 * GRAIN),
        "no room": lambda: space.allocate(5 * GRAIN),
    }
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        acts[act]()
    finally:
        sys.settrace(before)
    assert (blocks[1] not in space.sizes) == found
    pieces = sorted([*((start + BASE, size) for start, size in space._free), *space.sizes.items()])
    assert space._free == sorted(space._free) and pieces[0][0] == BASE
    assert all(start + size == after for (start, size), (after, _) in itertools.pairwise(pieces))
    assert sum(pieces[-1]) == BASE + space.capacity
    for address in list(space.sizes):
        space.free(address)
    assert space._free == [(0, space.capacity)]


def test_freed_memory_is_poisoned_and_handed_out_again():
    runtime = SimulatedRuntime(1 << 12)
    stream = runtime.new_stream()
    (address, capsule), _ = arrays(runtime, stream)
    assert runtime.read(address, "float32", (4,), stream).tolist() == [0, 1, 2, 3]
    del capsule, _
    gc.collect()
    assert np.isnan(runtime.read(address, "float32", (4,), stream)).all()
    assert (runtime.read(address, "int32", (4,), stream) == -1).all()
    assert runtime.allocate(1)[0] == address
    with pytest.raises(CudaError, match=r"CUDA_ERROR_OUT_OF_MEMORY.*8192 bytes of 4096, 256 in use"):
        # The capsule of the block before is gone with its tuple; one block is held here.
        held = runtime.allocate(1)
        runtime.allocate(8192)
    del held


def test_an_address_outside_the_device_is_sticky():
    runtime = SimulatedRuntime(1 << 12)
    stream = runtime.new_stream()
    runtime.launch(runtime.load(spec()), (16, BASE), stream)
    with pytest.raises(StickyError, match="0x10"):
        runtime.synchronize(stream)
    with pytest.raises(StickyError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        runtime.new_stream()


def test_work_runs_when_it_is_waited_for_and_finds_what_is_there_then():
    runtime = SimulatedRuntime(1 << 12)
    stream, other = runtime.new_stream(), runtime.new_stream()
    (x, hold_x), (y, hold_y) = arrays(runtime, stream)
    runtime.launch(runtime.load(spec()), (x, y), stream)
    event = runtime.record_event(stream)
    assert not runtime.event_done(event) and np.isnan(runtime.read(y, "float32", (4,), other)).all()
    runtime.progress(stream, 1)
    assert not runtime.event_done(event) and runtime.executed.total() == 0
    runtime.wait(event)
    assert runtime.event_done(event) and runtime.read(y, "float32", (4,), other).tolist() == [0, 2, 4, 6]
    runtime.launch(runtime.load(spec()), (x, y), stream)
    del hold_x
    gc.collect()
    assert np.isnan(runtime.read(y, "float32", (4,), stream)).all(), "freed before it ran"
    del hold_y


def test_a_queued_read_gives_what_was_there_at_its_place_in_the_stream():
    runtime = SimulatedRuntime(1 << 12)
    stream = runtime.new_stream()
    (x, _x), (y, _y) = arrays(runtime, stream)
    runtime.launch(runtime.load(spec()), (x, y), stream)
    first = runtime.queue_read(y, "float32", (3,), stream)
    runtime.launch(runtime.load(spec()), (y, y), stream)
    second = runtime.queue_read(y, "float32", (4,), stream)
    runtime.launch(runtime.load(spec()), (y, y), stream)
    assert runtime.executed.total() == 0
    values = runtime.finish_read(first)
    assert values.tolist() == [0, 2, 4] and runtime.executed["double"] == 1, "what is behind it has not run"
    values[:] = 9
    assert runtime.finish_read(first).tolist() == [0, 2, 4]
    assert runtime.finish_read(second).tolist() == [0, 4, 8, 12] and runtime.executed["double"] == 2
    third = runtime.queue_read(y, "float32", (1, 4), stream, second)
    assert second.values is None, "its memory is used again"
    assert runtime.finish_read(third).tolist() == [[0, 8, 16, 24]]
    with pytest.raises(InvalidArgument, match="queue_read: size: got 0, wanted 1 to 65536 bytes"):
        runtime.queue_read(y, "float32", (0,), stream)


def test_a_replay_reads_through_the_recorded_addresses():
    runtime = SimulatedRuntime(1 << 12)
    stream = runtime.new_stream()
    (x, _x), (y, _y) = arrays(runtime, stream)
    loaded = runtime.load(spec())
    capture = runtime.begin_capture(stream)
    runtime.launch(loaded, (x, y), capture)
    runtime.copy(x, y, 8, capture)
    graph = runtime.end_capture(capture)
    executable = runtime.instantiate(graph)
    runtime.destroy(graph)
    assert runtime.executed.total() == 0
    for wanted in ([0, 2, 4, 6], [0, 4, 4, 6], [0, 8, 4, 6]):
        runtime.launch_graph(executable, stream)
        assert runtime.read(y, "float32", (4,), stream).tolist() == wanted
    runtime.destroy(executable)
    with pytest.raises(CudaError, match="INVALID_HANDLE"):
        runtime.launch_graph(executable, stream)


def test_an_update_needs_the_same_kernels():
    runtime = SimulatedRuntime(1 << 12)
    stream, loaded = runtime.new_stream(), runtime.load(spec())
    other = runtime.load(kernel(lambda x: x, {"y": ("float32", 4)}, x=("float32", 4)))

    def record(*launches):
        capture = runtime.begin_capture(stream)
        for each in launches:
            runtime.launch(each, (BASE, BASE + 256), capture)
        return runtime.end_capture(capture)

    executable = runtime.instantiate(record(loaded))
    assert runtime.update(executable, record(loaded))
    assert not runtime.update(executable, record(loaded, loaded))
    assert not runtime.update(executable, record(other))


@pytest.mark.parametrize(
    "call",
    [
        "load",
        "synchronize",
        "wait",
        "allocate",
        "destroy",
        "read",
        "write",
        "launch",
        "upload",
        "queue_read",
        "finish_read",
    ],
)
def test_what_may_not_happen_in_a_capturing_thread_spoils_the_capture(call):
    runtime = SimulatedRuntime(1 << 12)
    stream = runtime.new_stream()
    (x, _x), (y, _y) = arrays(runtime, stream)
    loaded, event = runtime.load(spec()), runtime.record_event(stream)
    reading = runtime.queue_read(x, "float32", (4,), stream)
    executable = runtime.instantiate(runtime.end_capture(runtime.begin_capture(stream)))
    capture = runtime.begin_capture(stream)
    forbidden = {
        "load": lambda: runtime.load(spec()),
        "synchronize": lambda: runtime.synchronize(stream),
        "wait": lambda: runtime.wait(event),
        "allocate": lambda: runtime.allocate(1),
        "destroy": lambda: runtime.destroy(executable),
        "read": lambda: runtime.read(x, "float32", (4,), stream),
        "write": lambda: runtime.write(x, np.zeros(4), stream),
        "queue_read": lambda: runtime.queue_read(x, "float32", (4,), stream),
        "finish_read": lambda: runtime.finish_read(reading),
        "launch": lambda: runtime.launch(loaded, (x, y), stream),
        "upload": lambda: runtime.upload(executable, stream),
    }
    with pytest.raises(CudaError, match="CAPTURE"):
        forbidden[call]()
    with pytest.raises(CudaError, match="INVALIDATED"):
        runtime.end_capture(capture)
    forbidden[call]()


@pytest.mark.parametrize("call", ["launch", "copy"])
def test_what_is_refused_on_a_capturing_stream_is_called_by_its_name(call):
    runtime = SimulatedRuntime(1 << 12)
    stream = runtime.new_stream()
    (x, _x), (y, _y) = arrays(runtime, stream)
    loaded = runtime.load(spec())
    runtime.begin_capture(stream)
    calls = {
        "launch": lambda: runtime.launch(loaded, (x, y), stream),
        "copy": lambda: runtime.copy(y, x, 16, stream),
    }
    with pytest.raises(CudaError, match=rf"^SimulatedRuntime\.{call}: .*CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"):
        calls[call]()


def test_other_threads_are_not_restricted():
    runtime = SimulatedRuntime(1 << 12)
    stream, other = runtime.new_stream(), runtime.new_stream()
    capture = runtime.begin_capture(stream)
    done = []
    thread = threading.Thread(
        target=lambda: done.append((runtime.load(spec()), runtime.allocate(1), runtime.synchronize(other)))
    )
    thread.start()
    thread.join()
    assert done
    runtime.end_capture(capture)


def test_failures_come_when_asked_for():
    runtime = SimulatedRuntime(1 << 12)
    runtime.fail("allocate", after=1, times=2, name="CUDA_ERROR_OUT_OF_MEMORY")
    kept = [runtime.allocate(1)]
    for _ in range(2):
        with pytest.raises(CudaError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            runtime.allocate(1)
    kept.append(runtime.allocate(1))
    runtime.fail("load", times=None)
    for _ in range(3):
        with pytest.raises(CudaError):
            runtime.load(spec())
    runtime.heal()
    runtime.load(spec())
    assert runtime.calls["load"] == 4 and len(kept) == 2


@pytest.mark.parametrize("result", [np.zeros(4), np.zeros(5, np.float32)])
def test_a_reference_that_returns_something_else_is_refused(result):
    runtime = SimulatedRuntime(1 << 12)
    stream = runtime.new_stream()
    (x, _x), (y, _y) = arrays(runtime, stream)
    runtime.launch(runtime.load(kernel(lambda x: result, {"y": ("float32", 4)}, x=("float32", 4))), (x, y), stream)
    with pytest.raises(InvalidArgument, match=r"y: result of the reference: got .*wanted float32\[4\]"):
        runtime.synchronize(stream)


def test_scratch_is_poisoned_and_bfloat16_passes():
    runtime = SimulatedRuntime(1 << 12)
    stream = runtime.new_stream()
    (x, _x), (y, _y), (s, _s) = arrays(runtime, stream, 3)
    runtime.write(s, np.zeros(4, np.float32), stream)
    half = kernel(lambda x: x + x, {"y": ("bfloat16", 4)}, scratch={"s": ("float32", 4)}, x=("bfloat16", 4))
    runtime.write(x, np.arange(4).astype("bfloat16"), stream)
    runtime.launch(runtime.load(half), (x, y, s), stream)
    assert runtime.read(y, "bfloat16", (4,), stream).tolist() == [0, 2, 4, 6]
    assert np.isnan(runtime.read(s, "float32", (4,), stream)).all()
