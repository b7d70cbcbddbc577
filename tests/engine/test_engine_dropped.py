"""An engine that is dropped, or never was whole, ends like a closed one: nothing runs on memory that went back."""

from __future__ import annotations

import _thread
import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import COUNT, MAIN, OPTIONS, PROMPTS, ending_with, expected

from interrupts import interrupted, named, places
from moe_jax.cache import Graphs, SimulatedRuntime, StickyError
from moe_jax.engine import Engine, ending
from moe_jax.engine import engine as engine_module
from moe_jax.engine import memory as memory_module
from moe_jax.engine.ending import Owned
from moe_jax.engine.memory import Memory
from moe_jax.engine.prompts import Prompts
from moe_jax.engine.stepping import Stepper
from moe_jax.pallas_kernels.errors import CudaError
from tiny_models import tiny_model

SECONDS = 30.0  # after which what is not done will never be
# Of one bucket: there is less to make where that is done for each line.
SMALL: dict[str, Any] = {"max_sequences": 1, "max_tokens": 16, "chunk": 1}
FOREIGN = 1 << 16  # bytes of each piece of memory of somebody else


class Device(SimulatedRuntime):
    """Remembers its streams, so that a test sees what still runs on them."""

    def __init__(self) -> None:
        super().__init__(1 << 25)
        self.streams: list[Any] = []

    def new_stream(self) -> Any:
        self.streams.append(super().new_stream())
        return self.streams[-1]

    @property
    def left(self) -> int:
        """Engines on it that are not closed."""
        return sum(owned._memory._runtime is self for owned in ending._open)

    def empty(self) -> bool:
        """Nothing is queued, held or captured."""
        queued = sum(stream.queued - stream.run for stream in self.streams)
        return not (self.left or queued or self.space.bytes or self.executables or self.graphs)

    def check_left_alone(self) -> None:
        """What an engine had is gone, and what was queued runs on no memory that somebody else has now."""
        addresses, capsules = zip(*(self.allocate(FOREIGN) for _ in range(32)), strict=True)
        for address in addresses:
            self.space.view(address, FOREIGN)[:] = 7
        for stream in self.streams:
            self.progress(stream)
        assert all((self.space.view(address, FOREIGN) == 7).all() for address in addresses)
        del capsules
        assert self.empty()


@pytest.fixture
def device(monkeypatch) -> Device:
    monkeypatch.setattr(ending, "SECONDS", SECONDS)  # on a busy machine too
    return Device()


def made(device: SimulatedRuntime, **options: Any) -> Engine:
    return Engine(tiny_model(MAIN), **OPTIONS | options, graphs="simulate", runtime=device)


# Dropped.


def after_an_end_token(device: Device) -> None:
    """A step ahead is under way for nothing."""
    engine = Engine(ending_with(expected()[0][3]), **OPTIONS, graphs="simulate", runtime=device)
    engine.warmup()
    assert engine.generate(PROMPTS[:1], max_new_tokens=20).tolist() == [expected()[0][:4]]
    assert device.streams[0].queued > device.streams[0].run


def in_a_stream(device: Device) -> None:
    stream = made(device).generate(PROMPTS[:2], max_new_tokens=COUNT, stream=True)
    for _ in range(4):
        next(stream)
    assert device.executables and device.streams[0].queued > device.streams[0].run


def with_live_sequences(device: Device) -> None:
    engine = made(device, weights="owned")
    engine.warmup()
    engine.prefill(PROMPTS[:3])
    engine.step()


def in_a_cycle(device: Device) -> None:
    cycle: list[Any] = [made(device)]
    cycle.append(cycle)
    cycle[0].warmup()
    cycle[0].prefill(PROMPTS[:1])


def with_another_store(device: Device) -> None:
    engine = made(device)
    engine.warmup()
    engine.graphs = Graphs(device, engine.registry, mode="simulate")
    engine.warmup()
    assert len(device.executables) == 6


def in_a_close_that_was_interrupted(device: Device) -> None:
    engine = made(device)
    engine.warmup()
    assert interrupted(Memory.release, Memory.release.__code__.co_firstlineno + 3, engine.close)
    assert device.space.bytes


DROPPED = (
    after_an_end_token, in_a_stream, with_live_sequences, in_a_cycle, with_another_store,
    in_a_close_that_was_interrupted,
)  # fmt: skip


@pytest.mark.parametrize("how", DROPPED, ids=named)
def test_a_dropped_engine_ends_like_a_closed_one(device, how):
    how(device)
    gc.collect()
    device.check_left_alone()


def test_what_a_dropped_engine_had_is_no_more(device):
    """Who has kept a part of it holds no memory with that, and is refused."""
    engine = made(device)
    engine.warmup()
    graphs, memory, gone = engine.graphs, engine.memory, weakref.ref(engine)
    del engine
    assert gone() is None and graphs.stats()["state"] == "closed" and not memory.table.snapshot()[1]
    device.check_left_alone()


def test_a_closed_engine_is_dropped_in_silence(device, monkeypatch):
    engine = made(device)
    engine.close()
    monkeypatch.setattr(_thread, "start_new_thread", None)
    del engine
    device.check_left_alone()


def test_a_dropped_engine_waits_for_nobody_who_waits_for_it(device, monkeypatch):
    """The collector finds it inside a step of another one, which has what closing takes: that is then done later."""
    monkeypatch.setattr(ending, "SECONDS", 0.01)
    other, real, inside = made(device), device._execute, []
    other.warmup()

    def execute(node: Any) -> None:
        if not inside:
            inside.append(device._lock)
            gc.collect()
            assert len(device.executables) == 2 * dropped
        real(node)

    (number,) = other.prefill(PROMPTS[:1])
    gc.disable()
    try:
        in_a_cycle(device)
        dropped = len(device.executables) // 2
        monkeypatch.setattr(device, "_execute", execute)
        found = [other.step()[number] for _ in range(3)]
    finally:
        gc.enable()
    assert inside and found == expected()[0][:3]
    wait_until(lambda: device.left == 1 and len(device.executables) == dropped)
    other.close()
    device.check_left_alone()


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_it_is_closed_outside_whatever_the_thread_is_at(device, monkeypatch):
    """Inside a trace of JAX, what a simulated device runs would become a part of the program."""
    import jax

    in_a_stream_kept = made(device)
    stream = in_a_stream_kept.generate(PROMPTS[:1], max_new_tokens=20, stream=True)
    for _ in range(4):
        next(stream)
    held: list[Any] = [in_a_stream_kept, stream]
    del in_a_stream_kept, stream

    def traced(x: Any) -> Any:
        held.clear()
        return x + 1

    assert str(jax.make_jaxpr(traced)(1)).count("add") == 1
    device.check_left_alone()


@pytest.mark.parametrize("times", [1, 2])
def test_what_the_device_does_not_take_back_is_tried_again(device, times):
    """When another engine is made, and may need its memory."""
    engine = made(device)
    engine.warmup()
    device.fail("synchronize", times=times)
    del engine
    assert device.space.bytes and device.left == 1
    for left in reversed(range(times)):
        made(Device()).close()
        assert device.left == (left > 0)
    device.check_left_alone()


def test_where_no_thread_can_be_made_the_next_engine_does_it(device, monkeypatch):
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    engine = made(device)
    engine.warmup()
    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    del engine
    assert device.space.bytes and device.left == 1
    made(Device()).close()
    device.check_left_alone()


def test_a_dropped_engine_whose_device_is_lost_lets_go_of_its_memory(device):
    engine = made(device)
    engine.warmup()
    engine.prefill(PROMPTS[:1])
    device.fail("execute")
    with pytest.raises(StickyError):
        engine.step()
    del engine
    gc.collect()
    assert not device.left and device.space.bytes == 0


def test_an_error_that_is_not_of_the_device_is_told_and_keeps_nothing_from_others(device, monkeypatch):
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    engine = made(device)
    real, fails = Memory.release, [True]

    def release(memory: Memory) -> None:
        if fails:
            raise OSError("full")
        real(memory)

    monkeypatch.setattr(Memory, "release", release)
    del engine
    assert [str(one.exc_value) for one in told] == ["full"]
    told.clear()
    (other := Device()).fail("new_stream")
    with pytest.raises(CudaError, match="new_stream"):
        made(other)  # for no other reason
    assert device.left == 1 and not told
    fails.clear()
    made(Device()).close()
    device.check_left_alone()


# The end of the process.

AT_EXIT = """
import atexit
from moe_jax.cache import SimulatedRuntime
device = SimulatedRuntime(1 << 25)
atexit.register(lambda: print(len(ending._open), len(device.executables)))
import gc
import moe_jax
from moe_jax.engine import ending
from tiny_models import tiny_model
gc.disable()
def make():
    made = moe_jax.Engine(
        tiny_model("olmoe"), max_sequences=1, max_tokens=16, chunk=1, graphs="simulate", runtime=device
    )
    made.warmup()
    return made
def left():
    model = tiny_model("olmoe")
    stream = model.generate([[1]], max_new_tokens=4, graphs="simulate", stream=True)
    next(stream)
    model.close()
    return model, stream
"""
ENDS = {
    "in a cycle": "cycle = [make()]; cycle.append(cycle); del cycle",
    "dropped at exit": "kept = [make()]; atexit.register(kept.clear)",
    "not taken back": "device.fail('synchronize'); make()",
    "a stream": "model, stream = left()",
    "a stream in a cycle": "cycle = [left()]; cycle.append(cycle); del cycle",
    "used by a thread": """
import threading
kept = make()
locked = threading.Event()
def use():
    with kept._lock:
        locked.set()
        threading.Event().wait()
threading.Thread(target=use, daemon=True).start()
locked.wait()
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_process_closes_what_is_left(end):
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, (tests.parent, tests)))
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT + ENDS[end]],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=20 * SECONDS,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.strip() == ("1 1" if end == "used by a thread" else "0 0")


# Never whole.

CALLS = [
    ("new_stream", 0), ("hold", 0), ("hold", 3), ("allocate", 0), ("allocate", 20), ("write", 0), ("write", 4),
    ("prepare", 0), ("load", 0), ("load", 5), ("queue_read", 0), ("finish_read", 0),
]  # fmt: skip


@pytest.mark.parametrize("weights", ["held", "owned"])
@pytest.mark.parametrize(("call", "after"), CALLS)
def test_an_engine_that_cannot_be_made_leaves_nothing(device, call, after, weights):
    device.fail(call, after=after, name="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(CudaError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        made(device, weights=weights)
    device.check_left_alone()
    made(device).close()


MAKING = (
    memory_module.place_all, Memory.place, Memory.bind_weights, engine_module.load_kernels, Prompts.__init__,
    Stepper.__init__, Owned.end_with,
)  # fmt: skip


def making() -> list[tuple[Any, int]]:
    """Lines of what the constructor calls, and its own from where there is a stream."""
    own = places(Engine.__init__)
    source = Path(engine_module.__file__).read_text().splitlines()
    first = next(line for _, line in own if "store = Graphs(" in source[line - 1])
    return [*places(*MAKING), *((function, line) for function, line in own if line >= first)]


@pytest.mark.parametrize(("function", "line"), making(), ids=named)
def test_an_engine_that_was_interrupted_while_it_was_made_leaves_nothing(device, function, line):
    interrupted(function, line, lambda: made(device, **SMALL))
    gc.collect()
    device.check_left_alone()


def test_what_an_engine_that_could_not_be_made_cannot_give_back_is_tried_again(device):
    device.fail("load")
    device.fail("synchronize", times=2)
    with pytest.raises(CudaError, match="load"):
        made(device)
    gc.collect()  # what there is of the engine goes, and was tried once more
    assert device.space.bytes and device.left == 1
    made(Device()).close()
    device.check_left_alone()


# Closed.


@pytest.mark.parametrize(("function", "line"), places(Owned.close, Memory.release, Stepper.close), ids=named)
@pytest.mark.parametrize("again", ["closed", "dropped"])
def test_a_close_that_was_interrupted_can_be_made_again(device, function, line, again):
    engine = made(device, **SMALL)
    engine.warmup()
    engine.prefill(PROMPTS[:1])
    interrupted(function, line, engine.close)
    if again == "closed":
        engine.close()
        stats = engine.stats()
        assert engine.live == () and stats["state"] == "closed"
    del engine
    gc.collect()
    device.check_left_alone()


def test_a_closed_engine_counts_nothing(device):
    engine = made(device)
    engine.prefill(PROMPTS[:2])
    assert engine.live
    engine.close()
    stats = engine.stats()
    assert {name: stats[name] for name in ("sequences", "live", "free_sequences", "free_pages", "pages")} == {
        "sequences": 0, "live": 0, "free_sequences": 4, "free_pages": 32, "pages": 32,
    }  # fmt: skip


def test_an_engine_that_is_closed_at_exit_has_no_live_sequences(device):
    engine = made(device)
    engine.prefill(PROMPTS[:2])
    assert len(engine.live) == 2
    ending._close_all([engine._owned])
    assert engine.live == () and engine.stats()["live"] == 0
