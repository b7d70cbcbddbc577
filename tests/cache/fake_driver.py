"""A CUDA driver and device on the host, under `CudaRuntime` and the real launcher, for tests of calls and errors.

Memory is that of JAX arrays on the CPU. Queued work runs when it is waited for; a kernel runs its spec's reference, or
a stand-in whose results depend on all it is given and take no time.
What a CUDA device would punish fails the test: a call outside the device's context, an executable destroyed in flight
or used after it, the collector on while a stream is capturing.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import threading
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from cuda.bindings import driver as real
from toy_step import kernel

from moe_jax.cache import cuda_runtime
from moe_jax.cache.cuda_runtime import CudaGraph, CudaRuntime, CudaStream
from moe_jax.cache.runtime import no_collection
from moe_jax.pallas_kernels import compiled, launcher
from moe_jax.pallas_kernels.compiled import CompiledKernel
from moe_jax.pallas_kernels.spec import GIVEN, KernelSpec

CONTEXT = 77
Result = real.CUresult


def memory(address: int, size: int) -> np.ndarray:
    """Bytes at an address of this process."""
    return np.frombuffer((ctypes.c_ubyte * size).from_address(address), np.uint8)


def stand_in(given: list[np.ndarray], targets: list[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Arrays like the targets, filled with a number made of all bytes given."""
    number = functools.reduce(lambda seen, array: zlib.crc32(array.tobytes(), seen), given, 0) % 509
    return tuple(np.full(target.shape, number + i, target.dtype) for i, target in enumerate(targets))


class Stream:
    """Queued work, and what is recorded instead while it captures."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.queued = self.run = 0
        self.nodes: list[tuple[Any, ...]] | None = None


class Owner:
    """A stream or an event of ``cuda.core``."""

    def __init__(self, handle: Any):
        self.handle = handle


class FakeDriver:
    """Stands where `cuda.bindings.driver` does.

    Attributes:
        calls: names of the functions called, but for those that only look at the context.
        graphs, executables: nodes by handle, of those that exist.
        launched: configurations of kernel launches.
        stand_in: in place of references.
    """

    capability = (9, 0)
    stand_in = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current: dict[int, int] = {}
        self.streams: dict[int, Stream] = {}
        self.graphs: dict[int, list[tuple[Any, ...]]] = {}
        self.executables: dict[int, list[tuple[Any, ...]]] = {}
        self.launched: list[Any] = []
        self.specs: dict[bytes, KernelSpec] = {}
        self.functions: dict[int, KernelSpec] = {}
        self.events: dict[int, tuple[Stream, int]] = {}
        self.pinned: dict[int, np.ndarray] = {}
        self.pushed: list[Any] = []
        self._flights: dict[int, list[tuple[Stream, int]]] = {}
        self._faults: list[list[Any]] = []
        self._interrupt: tuple[str, int, bool] | None = None
        self._lost: Any = None
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

    def fail(self, call: str, error: str = "CUDA_ERROR_UNKNOWN", *, after: int = 0, times: int = 1) -> None:
        """Make calls of a function fail; ``"execute"``: the next queued piece of work, and with it the context."""
        self._faults.append([call, getattr(Result, error), after, times])

    def heal(self) -> None:
        """Forget the failures asked for."""
        self._faults.clear()

    def interrupt(self, call: str, after: int = 0, *, before: bool = False) -> None:
        """Raise what Ctrl-C during a call of a function makes Python raise when it returns; or raise it before."""
        self._interrupt = call, after, before

    @property
    def interrupted(self) -> bool:
        """Whether that has come."""
        return self._interrupt is None

    def compile(self, spec: KernelSpec, capability: int, scratch: int = 0) -> CompiledKernel:
        """Stands where `compile_spec` does."""
        self.specs[spec.key.encode()] = spec
        return CompiledKernel(
            key=spec.key, source_hash="", capability=capability, builder="fake", symbol=spec.name, threads=128,
            shared=1024, global_scratch=scratch, profile_scratch=0, cubin=spec.key.encode(),
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(real, name)
        return functools.partial(self._call, name, object.__getattribute__(self, f"_{name}"))

    def _call(self, name: str, function: Callable[..., tuple[Any, ...]], *arguments: Any) -> tuple[Any, ...]:
        self._interrupted(name, True)
        result = self._done(name, function, *arguments)
        self._interrupted(name, False)
        return result

    def _interrupted(self, name: str, before: bool) -> None:
        if self._interrupt is not None and (name, before) == self._interrupt[::2]:
            left = self._interrupt[1]
            self._interrupt = (name, left - 1, before) if left else None
            if not left:
                raise KeyboardInterrupt

    def _done(self, name: str, function: Callable[..., tuple[Any, ...]], *arguments: Any) -> tuple[Any, ...]:
        with self._lock:
            if name.startswith("cuCtx") or name == "cuGetErrorName":
                return function(*arguments)
            self.calls.append(name)
            assert self.current.get(threading.get_ident()) == CONTEXT, f"{name} outside the device's context"
            assert not (gc.isenabled() and any(s.nodes is not None for s in self.streams.values())), name
            error = self._lost or self._fault(name)
            if error is not None and name == "cuStreamEndCapture":
                self.stream(arguments[0]).nodes = None  # it is over, whatever came of it
            return (error,) if error is not None else function(*arguments)

    def _fault(self, name: str) -> Any:
        for fault in self._faults:
            if fault[0] == name:
                fault[2] -= 1
                if fault[2] < 0:
                    fault[3] -= 1
                    if not fault[3]:
                        self._faults.remove(fault)
                    return fault[1]
        return None

    def number(self) -> int:
        return next(self._numbers)

    def stream(self, handle: Any) -> Stream:
        return self.streams[int(handle)]

    # The functions.

    def _cuGetErrorName(self, error: Any) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, error.name.encode()

    def _cuCtxSetCurrent(self, context: int) -> tuple[Any, ...]:
        self.current[threading.get_ident()] = context
        return (Result.CUDA_SUCCESS,)

    def _cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:
        self.pushed.append(self.current.get(threading.get_ident()))
        return self._cuCtxSetCurrent(context)

    def _cuCtxPopCurrent(self) -> tuple[Any, ...]:
        popped, before = self.current[threading.get_ident()], self.pushed.pop()
        self.current[threading.get_ident()] = before
        return Result.CUDA_SUCCESS, popped

    def _cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self.current[threading.get_ident()]

    def _cuKernelGetFunction(self, kernel: Any) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self.functions[int(kernel)]

    def _cuFuncSetAttribute(self, *_: Any) -> tuple[Any, ...]:
        return (Result.CUDA_SUCCESS,)

    def _cuLaunchKernelEx(self, config: Any, function: KernelSpec, parameters: Any, _: Any) -> tuple[Any, ...]:
        values, types = parameters
        assert len(values) == len(types) == len(function.arguments) + 2 and values[-2:] == (0, 0)
        self.launched.append(config)
        return self._put(config.hStream, (function, values[:-2]))

    def _cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: Any) -> tuple[Any, ...]:
        return self._put(stream, (None, (target, source), size))

    def _cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: Any) -> tuple[Any, ...]:
        staged = memory(source, size).copy()
        return self._queue(stream, lambda: memory(target, size).__setitem__(slice(None), staged))

    def _cuMemcpyDtoHAsync(self, target: int, source: int, size: int, stream: Any) -> tuple[Any, ...]:
        if target in self.pinned:
            return self._queue(stream, lambda: memory(target, size).__setitem__(slice(None), memory(source, size)))
        error = self._advance(self.stream(stream), self.stream(stream).queued)
        if error is None:
            memory(target, size)[:] = memory(source, size)
        return (error or Result.CUDA_SUCCESS,)

    def _cuMemAllocHost(self, size: int) -> tuple[Any, ...]:
        array = np.zeros(size, np.uint8)
        self.pinned[array.ctypes.data] = array
        return Result.CUDA_SUCCESS, array.ctypes.data

    def _cuMemFreeHost(self, address: int) -> tuple[Any, ...]:
        del self.pinned[address]
        return (Result.CUDA_SUCCESS,)

    def _cuStreamSynchronize(self, stream: Any) -> tuple[Any, ...]:
        assert self.stream(stream).nodes is None
        return (self._advance(self.stream(stream), self.stream(stream).queued) or Result.CUDA_SUCCESS,)

    def _cuStreamBeginCapture(self, stream: Any, mode: Any) -> tuple[Any, ...]:
        assert mode == real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        assert self.stream(stream).nodes is None and not gc.isenabled()
        self.stream(stream).nodes = []
        return (Result.CUDA_SUCCESS,)

    def _cuStreamEndCapture(self, stream: Any) -> tuple[Any, ...]:
        nodes, self.stream(stream).nodes = self.stream(stream).nodes, None
        if nodes is None:
            return (Result.CUDA_ERROR_ILLEGAL_STATE,)
        return Result.CUDA_SUCCESS, self._made(self.graphs, nodes)

    def _cuGraphInstantiate(self, graph: int, flags: int) -> tuple[Any, ...]:
        assert flags == 0
        return Result.CUDA_SUCCESS, self._made(self.executables, list(self.graphs[graph]))

    def _cuGraphExecUpdate(self, executable: int, graph: int) -> tuple[Any, ...]:
        old, new = self.executables[executable], self.graphs[graph]
        if [n[0] and n[0].key for n in old] != [n[0] and n[0].key for n in new]:
            return (Result.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE,)
        self.executables[executable] = list(new)
        return Result.CUDA_SUCCESS, None

    def _cuGraphUpload(self, executable: int, stream: Any) -> tuple[Any, ...]:
        assert executable in self.executables and self.stream(stream).nodes is None
        return (Result.CUDA_SUCCESS,)

    def _cuGraphLaunch(self, executable: int, handle: Any) -> tuple[Any, ...]:
        for node in self.executables[executable]:
            self._queue(handle, functools.partial(self._run, node))
        stream = self.stream(handle)
        self._flights.setdefault(executable, []).append((stream, stream.queued))
        return (Result.CUDA_SUCCESS,)

    def _cuGraphDestroy(self, graph: int) -> tuple[Any, ...]:
        del self.graphs[graph]
        return (Result.CUDA_SUCCESS,)

    def _cuGraphExecDestroy(self, executable: int) -> tuple[Any, ...]:
        assert all(stream.run >= until for stream, until in self._flights.get(executable, [])), "in flight"
        del self.executables[executable]
        return (Result.CUDA_SUCCESS,)

    def _cuEventRecord(self, event: int, stream: Any) -> tuple[Any, ...]:
        assert self.stream(stream).nodes is None
        self.events[event] = self.stream(stream), self.stream(stream).queued
        return (Result.CUDA_SUCCESS,)

    def _cuEventQuery(self, event: int) -> tuple[Any, ...]:
        stream, at = self.events[event]
        return (Result.CUDA_SUCCESS if stream.run >= at else Result.CUDA_ERROR_NOT_READY,)

    def _cuEventSynchronize(self, event: int) -> tuple[Any, ...]:
        return (self._advance(*self.events[event]) or Result.CUDA_SUCCESS,)

    # Inside.

    def _made(self, where: dict[int, Any], nodes: Any) -> int:
        where[number := self.number()] = nodes
        return number

    def _put(self, handle: Any, node: tuple[Any, ...]) -> tuple[Any, ...]:
        if (nodes := self.stream(handle).nodes) is not None:
            nodes.append(node)
            return (Result.CUDA_SUCCESS,)
        return self._queue(handle, functools.partial(self._run, node))

    def _queue(self, handle: Any, work: Callable[[], None]) -> tuple[Any, ...]:
        stream = self.stream(handle)
        assert stream.nodes is None, "recorded by mistake"
        stream.waiting.append(work)
        stream.queued += 1
        return (Result.CUDA_SUCCESS,)

    def _advance(self, stream: Stream, until: int) -> Any:
        while stream.run < until:
            self._lost = self._fault("execute")
            if self._lost is not None:
                return self._lost
            stream.waiting.pop(0)()
            stream.run += 1
        return None

    def _run(self, node: tuple[Any, ...]) -> None:
        spec, addresses, *size = node
        if spec is None:
            memory(addresses[0], size[0])[:] = memory(addresses[1], size[0])
            return
        given, targets = [], []
        for argument, address in zip(spec.arguments, addresses, strict=True):
            size = int(np.prod(argument.shape)) * np.dtype(argument.dtype).itemsize
            array = memory(address, size).view(argument.dtype).reshape(argument.shape)
            if argument.role in GIVEN:
                given.append(array.copy())
            if argument.role in ("inout", "out"):
                targets.append(array)
        results = stand_in(given, targets) if self.stand_in else spec.reference(*given)
        for target, result in zip(targets, results if isinstance(results, tuple) else (results,), strict=True):
            target[...] = np.asarray(result)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Put a fake driver and device under the runtime and the launcher."""
    fake = FakeDriver()

    class Device:
        compute_capability = fake.capability
        properties = type("Properties", (), {"max_shared_memory_per_block_optin": 227 << 10})

        def __init__(self, ordinal: int | None = None):
            assert ordinal == 0 or fake.current[threading.get_ident()] == CONTEXT

        def set_current(self) -> None:
            fake.current[threading.get_ident()] = CONTEXT

        def create_stream(self, *, options: Any) -> Owner:
            assert options.nonblocking
            handle = real.CUstream(fake.number())
            fake.streams[int(handle)] = Stream()
            return Owner(handle)

        def create_event(self) -> Owner:
            return Owner(fake.number())

    class Module:
        def __init__(self, cubin: bytes):
            self.spec = fake.specs[cubin]

        @staticmethod
        def from_cubin(cubin: bytes) -> Module:
            return Module(cubin)

        def get_kernel(self, symbol: str) -> Owner:
            assert symbol == self.spec.name
            handle = fake.number()
            fake.functions[handle] = self.spec
            return Owner(handle)

    for module in (cuda_runtime, launcher):
        monkeypatch.setattr(module, "driver", fake)
        monkeypatch.setattr(module, "Device", Device)
    monkeypatch.setattr(launcher, "ObjectCode", Module)
    monkeypatch.setattr(compiled, "compile_spec", fake.compile)
    monkeypatch.setattr(cuda_runtime, "_cuda_device", lambda device: device or jax.devices()[0])
    return fake


def fake_runtime(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[CudaRuntime, FakeDriver]:
    """A `CudaRuntime` on a new fake driver."""
    fake = install(monkeypatch)
    return CudaRuntime(**options), fake


# -- What tests of the runtime do with it ------------------------------------------------------------------------------


def doubling() -> KernelSpec:
    """A kernel, made anew."""
    return kernel(_double, {"y": ("float32", 4)}, x=("float32", 4))


def _double(x: np.ndarray) -> np.ndarray:
    return x * 2


def placed(runtime: CudaRuntime, stream: CudaStream, *arrays: np.ndarray) -> list[tuple[int, Any]]:
    """Addresses of arrays on the device, and what keeps them."""
    found = []
    for array in arrays:
        found.append(runtime.allocate(array.nbytes))
        runtime.write(found[-1][0], array, stream)
    return found


def recorded(runtime: CudaRuntime, stream: CudaStream, *launches: tuple[Any, Any]) -> CudaGraph:
    """A graph of some kernels with their addresses."""
    with no_collection():
        capture = runtime.begin_capture(stream)
        for loaded, addresses in launches:
            runtime.launch(loaded, addresses, capture)
        return runtime.end_capture(capture)
