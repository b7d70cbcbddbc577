"""Raw launches of compiled kernels into given addresses, and graphs of them, through the CUDA driver.

Nothing here keeps memory alive: whoever passes an address owns it until the last launch that names it is done.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cuda.bindings import driver
from cuda.core import Device, EventOptions, ObjectCode, Stream
from cuda.core.graph import Graph, GraphBuilder

from .compiled import CompiledKernel
from .errors import CannotServe, CudaError, InvalidArgument
from .spec import KernelSpec

MOST_CONFIGS = 8


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel on the current device. Holds its module: keep it as long as a graph that launches it.

    Attributes:
        configs: of launches, by the handle of their stream: making one takes longer than the launch.
    """

    spec: KernelSpec
    compiled: CompiledKernel
    module: ObjectCode
    function: Any
    configs: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def scratch_bytes(self) -> tuple[int, int]:
        """Bytes that must stand behind Triton's two trailing pointers."""
        x, y, z = self.spec.grid
        return self.compiled.global_scratch * x * y * z, self.compiled.profile_scratch * x * y * z

    def launch(
        self, stream: Stream | GraphBuilder, addresses: Sequence[int], scratch: tuple[int, int] = (0, 0)
    ) -> None:
        """Queue one launch.

        Args:
            stream: a stream, or a builder that is capturing.
            addresses: one for each argument of the spec, in order, each a multiple of 16. An absent optional
                argument may be any address.
            scratch: addresses for `scratch_bytes`; 0 where none is needed.

        Raises:
            InvalidArgument: another number of addresses, or one that is not aligned.
            RuntimeError: the driver refused; names the error.
        """
        where = f"launch({self.spec.name!r})"
        if len(addresses) != len(self.spec.arguments):
            raise InvalidArgument("addresses", where=where, got=len(addresses), wanted=len(self.spec.arguments))
        odd = [a for a in addresses if a % 16]
        if odd:
            raise InvalidArgument("alignment", where=where, got=[hex(a) for a in odd], wanted="multiples of 16")
        handle = int((stream.stream if isinstance(stream, GraphBuilder) else stream).handle)
        config = self.configs.get(handle)
        if config is None:
            if len(self.configs) >= MOST_CONFIGS:  # of streams that are gone
                self.configs.clear()
            config = self.configs[handle] = self._config(handle)
        values = (*addresses, *scratch)
        _checked(driver.cuLaunchKernelEx(config, self.function, (values, (ctypes.c_void_p,) * len(values)), 0))

    def _config(self, handle: int) -> Any:
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.spec.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.compiled.threads, 1, 1
        config.sharedMemBytes = self.compiled.shared
        config.hStream = handle
        if self.spec.pdl:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value = driver.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            attribute.value = value
            config.attrs, config.numAttrs = [attribute], 1
        return config


def load_kernel(spec: KernelSpec, compiled: CompiledKernel) -> LoadedKernel:
    """Load a cubin on the current device, ready to launch: nothing is left to the first launch.

    Raises:
        InvalidArgument: the kernel was compiled from another spec.
        CannotServe: the device cannot run it.
    """
    where, device = f"load_kernel({spec.name!r})", Device()
    if compiled.key != spec.key:
        raise InvalidArgument("compiled kernel", where=where, got=compiled.key, wanted=spec.key)
    major, minor = device.compute_capability
    if major != compiled.capability // 10 or 10 * major + minor < compiled.capability:
        raise CannotServe("device", where=where, got=f"sm_{major}{minor}", wanted=f"sm_{compiled.capability}")
    limit = device.properties.max_shared_memory_per_block_optin
    if compiled.shared > limit:
        raise CannotServe("shared memory", where=where, got=f"{compiled.shared} bytes", wanted=f"at most {limit}")
    module = ObjectCode.from_cubin(compiled.cubin)
    kernel = module.get_kernel(compiled.symbol)
    (function,) = _checked(driver.cuKernelGetFunction(driver.CUkernel(int(kernel.handle))))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, attribute, compiled.shared))
    return LoadedKernel(spec, compiled, module, function)


def capture(stream: Stream, record: Callable[[GraphBuilder], None]) -> Graph:
    """A graph of everything that ``record`` launches on the builder it is given."""
    builder = stream.create_graph_builder().begin_building("relaxed")
    try:
        record(builder)
    finally:
        builder.end_building()
    return builder.complete()


def replay_times(graph: Graph, stream: Stream, replays: int, warmup: int = 3) -> list[float]:
    """Microseconds of each replay, by events around it."""
    options = EventOptions(timing_enabled=True)
    for _ in range(warmup):
        graph.launch(stream)
    marks = [stream.record(options=options)]
    for _ in range(replays):
        graph.launch(stream)
        marks.append(stream.record(options=options))
    stream.sync()
    return [(end - start) * 1e3 for start, end in itertools.pairwise(marks)]


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(error)
        raise CudaError("call failed", where="CUDA driver", got=name.decode() if name else error, wanted="CUDA_SUCCESS")
    return tuple(values)
