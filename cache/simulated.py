"""A device on the host, for tests and for ``graphs="simulate"``: it makes a stale replay wrong instead of lucky.

* Launches hold fake addresses, and running one really dereferences them: its operands are read from the address space,
  the spec's reference runs on what is found, results are written where the addresses say.
* Freed memory is filled with poison (NaN as a float, -1 as an integer) and handed out again, lowest address first.
* Nothing queued runs until it is waited for (or `SimulatedRuntime.progress` is called), so memory that goes too early
  is already garbage when the work that names it runs.
* An array that is held is copied into this memory, and the copy freed with its capsule: what happens to the array
  itself afterwards, donation included, is not seen here.
* `SimulatedRuntime.fail` makes any call fail, once or for ever, sticky or not.
* During capture the capturing thread may not load, destroy, wait or use the captured stream: the call fails and so
  does the capture.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Array

from moe_jax.pallas_kernels.device import MINIMUM_CAPABILITY
from moe_jax.pallas_kernels.errors import CudaError, InvalidArgument
from moe_jax.pallas_kernels.spec import GIVEN, KernelSpec

from .address_space import POISON, AddressSpace, Capsule
from .arrays import check_array
from .runtime import Runtime, StickyError, queued_bytes


@dataclass(frozen=True, eq=False)
class SimulatedKernel:
    """A loaded kernel."""

    spec: KernelSpec


@dataclass(frozen=True)
class Node:
    """A launch with its addresses, or (without a kernel) a copy of ``size`` bytes from the second to the first."""

    kernel: SimulatedKernel | None
    addresses: tuple[int, ...]
    size: int = 0


@dataclass(eq=False)
class SimulatedStream:
    """Work that waits, and how much has been queued and has run."""

    waiting: deque[Callable[[], None]] = field(default_factory=deque)
    queued: int = 0
    run: int = 0
    capture: SimulatedCapture | None = None


@dataclass(eq=False)
class SimulatedCapture:
    """A recording."""

    stream: SimulatedStream
    thread: int
    nodes: list[Node] = field(default_factory=list)
    invalid: bool = False


@dataclass(eq=False)
class SimulatedGraph:
    """What was recorded, or an executable of it. Handles are never given twice."""

    handle: int
    nodes: tuple[Node, ...] = field(repr=False)
    flights: dict[SimulatedStream, int] = field(default_factory=dict, repr=False)


@dataclass(eq=False)
class SimulatedEvent:
    """A point in a stream's work."""

    stream: SimulatedStream = field(repr=False)
    at: int


@dataclass(eq=False)
class SimulatedReading:
    """Values that come when the stream's work has been run up to a point."""

    stream: SimulatedStream = field(repr=False)
    at: int = 0
    values: np.ndarray | None = None


@dataclass
class _Fault:
    call: str
    after: int
    times: int | None
    sticky: bool
    name: str


class SimulatedRuntime(Runtime):
    """See the module, and `Runtime` for the methods.

    Args:
        capacity: bytes of device memory.
        compiler: stands for compiler and device.

    Attributes:
        calls: how often each method was called.
        graphs, executables: those that exist.
        executed: how often each kernel ran, by name.
    """

    simulated = True
    device = None
    device_kind = "host"
    capability = MINIMUM_CAPABILITY

    def __init__(self, capacity: int = 1 << 28, compiler: str = "simulated"):
        self.compiler = compiler
        self.space = AddressSpace(capacity)
        self.calls: Counter[str] = Counter()
        self.graphs: set[SimulatedGraph] = set()
        self.executables: set[SimulatedGraph] = set()
        self.executed: Counter[str] = Counter()
        self._handles = itertools.count(1)
        self._faults: list[_Fault] = []
        self._captures: dict[int, SimulatedCapture] = {}
        self._lost: str | None = None
        self._lock = threading.RLock()

    # Control, for tests.

    def fail(
        self,
        call: str,
        *,
        after: int = 0,
        times: int | None = 1,
        sticky: bool = False,
        name: str = "CUDA_ERROR_UNKNOWN",
    ) -> None:
        """Make calls of a method fail, or (``"execute"``) the running of a queued launch.

        Args:
            after: calls that still work.
            times: calls that then fail; None: all.
            sticky: and with it every later call of any method; always so for ``"execute"``.
            name: of the error; ``"CUDA_ERROR_OUT_OF_MEMORY"`` stands for want of memory.
        """
        with self._lock:
            self._faults.append(_Fault(call, after, times, sticky or call == "execute", name))

    def heal(self) -> None:
        """Forget the failures asked for; a lost context stays lost."""
        with self._lock:
            self._faults.clear()

    def progress(self, stream: SimulatedStream, count: int | None = None) -> None:
        """Run the next ``count`` queued pieces of work of a stream; None: all.

        Raises:
            StickyError: one of them fails, or names memory outside the device.
        """
        with self._lock:
            self._advance(stream, stream.queued if count is None else min(stream.run + count, stream.queued))

    # Runtime.

    def new_stream(self) -> SimulatedStream:
        with self._call("new_stream"):
            return SimulatedStream()

    def load(self, spec: KernelSpec) -> SimulatedKernel:
        with self._call("load", forbidden_in_capture=True):
            if spec.reference is None:
                raise InvalidArgument("reference", where="SimulatedRuntime.load", got=spec.name, wanted="one")
            return SimulatedKernel(spec)

    def prepare(self, specs: Iterable[KernelSpec], progress: Callable[[int, int], object] | None = None) -> None:
        """Nothing is compiled here."""
        with self._call("prepare"):
            pass

    def launch(self, kernel: SimulatedKernel, addresses: Sequence[int], on: SimulatedStream | SimulatedCapture) -> None:
        with self._call("launch"):
            self._put("launch", Node(kernel, tuple(addresses)), on)

    def copy(self, target: int, source: int, size: int, on: SimulatedStream | SimulatedCapture) -> None:
        with self._call("copy"):
            self._put("copy", Node(None, (target, source), size), on)

    def begin_capture(self, stream: SimulatedStream) -> SimulatedCapture:
        with self._call("begin_capture"):
            if stream.capture is not None:
                raise _error("begin_capture", "CUDA_ERROR_ILLEGAL_STATE", "a stream that is not capturing")
            capture = SimulatedCapture(stream, threading.get_ident())
            stream.capture = self._captures[capture.thread] = capture
            return capture

    def end_capture(self, capture: SimulatedCapture) -> SimulatedGraph:
        self._close(capture)
        with self._call("end_capture"):
            if capture.invalid:
                raise _error("end_capture", "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "an undisturbed capture")
            graph = SimulatedGraph(next(self._handles), tuple(capture.nodes))
            self.graphs.add(graph)
            return graph

    def abandon_capture(self, stream: SimulatedStream) -> None:
        with self._lock:
            self.calls["abandon_capture"] += 1
            if stream.capture is not None:
                self._close(stream.capture)

    def instantiate(self, captured: SimulatedGraph) -> SimulatedGraph:
        with self._call("instantiate"):
            executable = SimulatedGraph(next(self._handles), captured.nodes)
            self.executables.add(executable)
            return executable

    def update(self, executable: SimulatedGraph, captured: SimulatedGraph) -> bool:
        with self._call("update"):
            if _topology(executable) != _topology(captured):
                return False
            executable.nodes = captured.nodes
            return True

    def upload(self, executable: SimulatedGraph, stream: SimulatedStream) -> None:
        with self._call("upload", using=stream):
            self._existing("upload", executable)

    def launch_graph(self, executable: SimulatedGraph, stream: SimulatedStream) -> None:
        with self._call("launch_graph", using=stream):
            self._existing("launch_graph", executable)
            for node in executable.nodes:
                self._queue(stream, functools.partial(self._execute, node))
            executable.flights[stream] = stream.queued

    def destroy(self, graph: SimulatedGraph) -> None:
        with self._call("destroy", forbidden_in_capture=True):
            there = self.executables if graph in self.executables else self.graphs
            if graph in there and any(stream.run < until for stream, until in graph.flights.items()):
                raise _error("destroy", "an executable in flight", "one whose launches are done")
            there.discard(graph)

    def record_event(self, stream: SimulatedStream, event: SimulatedEvent | None = None) -> SimulatedEvent:
        with self._call("record_event", using=stream):
            event = event or SimulatedEvent(stream, 0)
            event.stream, event.at = stream, stream.queued
            return event

    def event_done(self, event: SimulatedEvent) -> bool:
        with self._call("event_done"):
            return event.stream.run >= event.at

    def wait(self, event: SimulatedEvent) -> None:
        with self._call("wait", forbidden_in_capture=True):
            self._advance(event.stream, event.at)

    def synchronize(self, stream: SimulatedStream) -> None:
        with self._call("synchronize", using=stream, forbidden_in_capture=True):
            self._advance(stream, stream.queued)

    def allocate(self, size: int) -> tuple[int, Capsule]:
        with self._call("allocate", forbidden_in_capture=True):
            address = self.space.allocate(size)
            if address is None:
                wanted = f"{size} bytes of {self.space.capacity}, {self.space.bytes} in use"
                raise _error("allocate", "CUDA_ERROR_OUT_OF_MEMORY", wanted)
            return address, Capsule(self.space, address)

    def hold(self, array: Array, name: str = "the array") -> tuple[int, Capsule]:
        check_array("SimulatedRuntime.hold", array, name, None)
        with self._call("hold"):
            address, capsule = self.allocate(array.nbytes)
            self._store(address, np.frombuffer(np.asarray(array).tobytes(), np.uint8))
            return address, capsule

    def write(self, address: int, values: np.ndarray, stream: SimulatedStream) -> None:
        with self._call("write", using=stream):
            data = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
            self._queue(stream, functools.partial(self._store, address, data))

    def read(self, address: int, dtype: str, shape: tuple[int, ...], stream: SimulatedStream) -> np.ndarray:
        with self._call("read", using=stream, forbidden_in_capture=True):
            self._advance(stream, stream.queued)
            return self._array(address, dtype, shape).copy()

    def queue_read(
        self,
        address: int,
        dtype: str,
        shape: tuple[int, ...],
        stream: SimulatedStream,
        reading: SimulatedReading | None = None,
    ) -> SimulatedReading:
        queued_bytes("SimulatedRuntime.queue_read", dtype, shape)
        with self._call("queue_read", using=stream):
            found = reading or SimulatedReading(stream)

            def work() -> None:
                found.values = self._array(address, dtype, shape).copy()

            self._queue(stream, work)
            found.at, found.values = stream.queued, None
            return found

    def finish_read(self, reading: SimulatedReading) -> np.ndarray:
        with self._call("finish_read", forbidden_in_capture=True):
            self._advance(reading.stream, reading.at)
            assert reading.values is not None
            return reading.values.copy()

    def range(self, name: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    # Inside.

    @contextlib.contextmanager
    def _call(
        self, name: str, *, using: SimulatedStream | None = None, forbidden_in_capture: bool = False
    ) -> Generator[None]:
        with self._lock:
            self.calls[name] += 1
            if self._lost is not None:
                raise _error(name, self._lost, "a context that is not lost", StickyError)
            capture = self._captures.get(threading.get_ident()) if forbidden_in_capture else None
            capture = capture or (using and using.capture)
            if capture:
                capture.invalid = True
                raise _error(name, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "no capture in this thread or stream")
            self._inject(name)
            yield

    def _inject(self, name: str) -> None:
        for fault in self._faults:
            if fault.call != name:
                continue
            if fault.after > 0:
                fault.after -= 1
                continue
            if fault.times is not None:
                fault.times -= 1
                if fault.times == 0:
                    self._faults.remove(fault)
            if fault.sticky:
                self._lost = fault.name
                raise _error(name, fault.name, "success", StickyError)
            raise _error(name, fault.name, "success")

    def _existing(self, name: str, executable: SimulatedGraph) -> None:
        if executable not in self.executables:
            raise _error(name, "CUDA_ERROR_INVALID_HANDLE", "an executable that exists")

    def _close(self, capture: SimulatedCapture) -> None:
        with self._lock:
            capture.stream.capture = None
            self._captures.pop(capture.thread, None)

    def _put(self, name: str, node: Node, on: SimulatedStream | SimulatedCapture) -> None:
        if isinstance(on, SimulatedCapture):
            on.nodes.append(node)
        elif on.capture is not None:
            on.capture.invalid = True
            raise _error(name, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "a stream that is not capturing")
        else:
            self._queue(on, functools.partial(self._execute, node))

    def _queue(self, stream: SimulatedStream, work: Callable[[], None]) -> None:
        stream.waiting.append(work)
        stream.queued += 1

    def _advance(self, stream: SimulatedStream, until: int) -> None:
        while stream.run < until:
            work = stream.waiting.popleft()
            stream.run += 1
            try:
                work()
            except StickyError as error:
                self._lost = str(error.got)
                raise

    def _execute(self, node: Node) -> None:
        self._inject("execute")
        if node.kernel is None:
            target, source = node.addresses
            self._store(target, self.space.view(source, node.size))
            return
        spec, given, targets = node.kernel.spec, [], {}
        assert spec.reference is not None
        self.executed[spec.name] += 1
        for argument, address in zip(spec.arguments, node.addresses, strict=True):
            array = self._array(address, argument.dtype, argument.shape)
            if argument.role in GIVEN:
                given.append(array.copy())  # a reference may keep or return what it was given
            if argument.role in ("inout", "out"):
                targets[argument.name] = array
            elif argument.role == "scratch":
                self.space.view(address, array.nbytes)[:] = POISON
        results = spec.reference(*given)
        results = results if isinstance(results, tuple) else (results,)
        for (name, target), result in zip(targets.items(), results, strict=True):
            result = np.asarray(result)
            if (result.dtype, result.shape) != (target.dtype, target.shape):
                where, wanted = f"{spec.name}: {name}", f"{target.dtype}{list(target.shape)}"
                got = f"{result.dtype}{list(result.shape)}"
                raise InvalidArgument("result of the reference", where=where, got=got, wanted=wanted)
        for target, result in zip(targets.values(), results, strict=True):
            target[...] = np.asarray(result)

    def _store(self, address: int, data: np.ndarray) -> None:
        self.space.view(address, data.nbytes)[:] = data

    def _array(self, address: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return self.space.view(address, size).view(dtype).reshape(shape)


def _topology(graph: SimulatedGraph) -> tuple[object, ...]:
    return tuple(None if node.kernel is None else node.kernel.spec.key for node in graph.nodes)


def _error(call: str, got: str, wanted: str, kind: type[CudaError] = CudaError) -> CudaError:
    return kind("call failed", where=f"SimulatedRuntime.{call}", got=got, wanted=wanted)
