"""A CUDA runtime for tests that run on the simulated one too: it counts, knows what exists, and fails on request."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from cuda.bindings import driver

from moe_jax.cache import cuda_runtime
from moe_jax.cache.cuda_runtime import CudaCapture, CudaGraph, CudaRuntime
from moe_jax.pallas_kernels import launcher
from moe_jax.pallas_kernels.compiled import CompiledKernel

# Methods of a runtime by the driver's functions that do their work.
CALLS = {
    "cuStreamBeginCapture": "begin_capture",
    "cuLaunchKernelEx": "launch",
    "cuMemcpyDtoDAsync": "copy",
    "cuStreamEndCapture": "end_capture",
    "cuGraphInstantiate": "instantiate",
    "cuGraphExecUpdate": "update",
    "cuGraphUpload": "upload",
    "cuGraphLaunch": "launch_graph",
    "cuGraphDestroy": "destroy",
    "cuGraphExecDestroy": "destroy",
    "cuEventRecord": "record_event",
    "cuEventQuery": "event_done",
    "cuEventSynchronize": "wait",
    "cuStreamSynchronize": "synchronize",
    "cuMemcpyHtoDAsync": "write",
    "cuMemcpyDtoHAsync": "read",
    "cuKernelGetFunction": "load",
}


class Driver:
    """Stands where `cuda.bindings.driver` does, and passes on what is not to fail.

    Args:
        real: the driver.

    Attributes:
        calls: that reached the driver, by the method of a runtime.
    """

    def __init__(self, real: Any = driver) -> None:
        self.real = real
        self.calls: Counter[str] = Counter()
        self._faults: list[list[Any]] = []
        self._lock = threading.Lock()

    def fail(self, call: str, *, after: int = 0, times: int | None = 1, name: str = "CUDA_ERROR_UNKNOWN") -> None:
        """Make calls fail without reaching the driver; arguments as in `SimulatedRuntime.fail`."""
        assert call in CALLS.values(), call
        with self._lock:
            self._faults.append([call, after, times, getattr(driver.CUresult, name)])

    def heal(self) -> None:
        with self._lock:
            self._faults.clear()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.real, name)
        return functools.partial(self._call, CALLS[name], function) if name in CALLS else function

    def _call(self, call: str, function: Callable[..., tuple[Any, ...]], *arguments: Any) -> tuple[Any, ...]:
        error = self._fault(call)
        if error is None:
            with self._lock:
                self.calls[call] += 1
            return function(*arguments)
        if call == "end_capture":
            # A capture is over, whatever came of it.
            _, graph = function(*arguments)
            self.real.cuGraphDestroy(graph)
        return (error,)

    def _fault(self, call: str) -> Any:
        with self._lock:
            for fault in self._faults:
                if fault[0] != call:
                    continue
                if fault[1]:
                    fault[1] -= 1
                    continue
                if fault[2] is not None:
                    fault[2] -= 1
                    if not fault[2]:
                        self._faults.remove(fault)
                return fault[3]
        return None


class WatchedRuntime(CudaRuntime):
    """With what `SimulatedRuntime` offers to tests.

    Attributes:
        graphs, executables: those that exist.
    """

    # One for the process, so that no kernel is compiled for each test anew.
    built: ClassVar[dict[str, CompiledKernel]] = {}

    def __init__(self, watched: Driver):
        super().__init__()
        self._compiled = self.built
        self._watched = watched
        self.graphs: set[CudaGraph] = set()
        self.executables: set[CudaGraph] = set()
        self.fail, self.heal, self.calls = watched.fail, watched.heal, watched.calls

    @property
    def executed(self) -> Counter[str]:
        """Calls that run something on the device, or record it."""
        return Counter({call: self.calls[call] for call in ("launch", "launch_graph", "copy")})

    def end_capture(self, capture: CudaCapture) -> CudaGraph:
        graph = super().end_capture(capture)
        self.graphs.add(graph)
        return graph

    def instantiate(self, captured: CudaGraph) -> CudaGraph:
        executable = super().instantiate(captured)
        self.executables.add(executable)
        return executable

    def destroy(self, graph: CudaGraph) -> None:
        super().destroy(graph)
        (self.executables if graph.executable else self.graphs).discard(graph)


def watch(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Put a `Driver` under every CUDA runtime until the test is over."""
    watched = Driver()
    for module in (cuda_runtime, launcher):
        monkeypatch.setattr(module, "driver", watched)
    return watched


def free_bytes() -> int:
    """Of the device, whoever uses the rest."""
    error, free, _ = driver.cuMemGetInfo()
    assert error == driver.CUresult.CUDA_SUCCESS
    return free
