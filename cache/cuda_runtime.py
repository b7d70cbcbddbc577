"""The CUDA device as the store of graphs sees it: `moe_jax.cache.runtime.Runtime`, whose methods it does not describe.

Streams and events are made by ``cuda.core``, which gives them back when nobody holds them any more. What is done with
them, and all that is done with graphs, goes to the driver itself: there each call has an error of its own, and a graph
goes when `CudaRuntime.destroy` says so, not when Python drops the last reference to it.

* **Memory** is JAX arrays, so that it lies in XLA's pool, held by their DLPack capsules: neither ``delete()`` nor
  donation by somebody else frees it under a graph. `CudaRuntime.hold` does the same for an array of the user.
* **Capture** is relaxed: it restricts no other stream and no other thread. Its stream says from begin to end what
  records on it, so what other threads do with that stream waits until the capture is over, and the capturing thread
  itself is refused everything on it but what it records. Begin and end are called by one thread.
* **Threads**: the device's context is made current in each call, whatever other libraries left there.
* **Sticky errors**: the names in `STICKY`. After one of them the driver is asked nothing more.

Importing this needs ``cuda-core``, making a `CudaRuntime` a CUDA device.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401 (teaches NumPy the names of its dtypes)
import numpy as np
from cuda.bindings import driver
from cuda.core import Device, StreamOptions
from jaxtyping import Array

from moe_jax.pallas_kernels import compiled
from moe_jax.pallas_kernels.device import MINIMUM_CAPABILITY
from moe_jax.pallas_kernels.errors import CannotServe, CudaError, InvalidArgument
from moe_jax.pallas_kernels.launcher import LoadedKernel, load_kernel
from moe_jax.pallas_kernels.spec import KernelSpec

from .arrays import check_array
from .cuda_handles import CudaCapture, CudaEvent, CudaGraph, CudaStream
from .launches import ALIGNMENT
from .pinned import CudaReading, PinnedMemory
from .runtime import READ_BYTES, Runtime, StickyError, queued_bytes

# After these a context serves no call any more (CUDA driver API, "CUresult").
STICKY = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        *("ILLEGAL_ADDRESS", "LAUNCH_FAILED", "LAUNCH_TIMEOUT", "ASSERT", "HARDWARE_STACK_ERROR"),
        *("ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "TENSOR_MEMORY_LEAK"),
        *("ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE", "CONTAINED", "EXTERNAL_DEVICE", "MPS_CLIENT_TERMINATED"),
        *("CONTEXT_IS_DESTROYED", "DEINITIALIZED"),
    )
)
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
# From here on an array of zeros is made on the device by a small program; below it is copied, which compiles nothing.
COMPILED_BYTES = 16 << 20
# From here on the host waits for a copy of its values instead of copying them once more.
WAITED_BYTES = 1 << 20

_SUCCESS = driver.CUresult.CUDA_SUCCESS
_RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


class CudaRuntime(Runtime):
    """See the module, and `Runtime` for the methods.

    Args:
        device: None: the first CUDA device that JAX sees.
        cubins: a folder that `moe_jax.pallas_kernels.compiled.save` wrote, from which alone kernels come; None: Triton
            compiles them.

    Attributes:
        device, device_kind: JAX's.
        capability: such as 90.

    Raises:
        CannotServe: no CUDA device, or one older than sm_80.
        CudaError: the device cannot be used.
    """

    simulated = False

    def __init__(self, device: jax.Device | None = None, *, cubins: Path | str | None = None):
        self._lost: str | None = None
        self._cubins = None if cubins is None else Path(cubins)
        self._compiled: dict[str, compiled.CompiledKernel] = {}
        # A kernel lives as long as a binding or a graph's owner holds it.
        self._loaded: weakref.WeakValueDictionary[str, LoadedKernel] = weakref.WeakValueDictionary()
        self._loading = threading.Lock()
        self._ranges: dict[str, AbstractContextManager[Any]] = {}
        self.device = _cuda_device(device)
        self.device_kind = self.device.device_kind
        with self._foreign("device"):
            self._core = Device(self.device.local_hardware_id or 0)
            self._core.set_current()
            major, minor = self._core.compute_capability
        self._context = self._checked("device", driver.cuCtxGetCurrent())
        self.capability = 10 * major + minor
        if self.capability < MINIMUM_CAPABILITY:
            wanted = f"sm_{MINIMUM_CAPABILITY} or newer"
            raise CannotServe("device", where="CudaRuntime", got=f"sm_{self.capability}", wanted=wanted)
        self.compiler = f"{_builder(self._cubins)}, sm_{self.capability}"
        self._annotate = _annotate()

    # Kernels.

    def load(self, spec: KernelSpec) -> LoadedKernel:
        self._enter("load")
        with self._loading:
            kernel = self._loaded.get(spec.key)
            if kernel is None:
                with self._foreign("load"):
                    kernel = load_kernel(spec, self._cubin(spec))
                if any(kernel.scratch_bytes):
                    where, got = f"CudaRuntime.load({spec.name!r})", f"{kernel.scratch_bytes} bytes of Triton's scratch"
                    raise CannotServe("kernel", where=where, got=got, wanted="one that takes none")
                self._loaded[spec.key] = kernel
            return kernel

    def prepare(self, specs: Iterable[KernelSpec], progress: Callable[[int, int], object] | None = None) -> None:
        """Compile what is not compiled yet, on as many threads as this process has CPUs, and keep it for `load`.

        Triton lets go of Python's lock in MLIR, in LLVM and while it waits for ``ptxas``.
        """
        self._enter("prepare")
        missing = {spec.key: spec for spec in specs if spec.key not in self._compiled}
        if not missing:
            return
        report = progress or (lambda done, total: None)
        report(0, len(missing))
        with ThreadPoolExecutor(min(len(missing), _cpus()), "moe_jax compile") as pool:
            compiling = [pool.submit(self._cubin, spec) for spec in missing.values()]
            try:
                for done, one in enumerate(as_completed(compiling), 1):
                    one.result()
                    report(done, len(missing))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _cubin(self, spec: KernelSpec) -> compiled.CompiledKernel:
        found = self._compiled.get(spec.key)
        if found is None:
            if self._cubins is None:
                found = compiled.compile_spec(spec, self.capability)
            else:
                found = compiled.load(self._cubins, spec, self.capability)
            self._compiled[spec.key] = found
        return found

    # Work on streams.

    def new_stream(self) -> CudaStream:
        self._enter("new_stream")
        with self._foreign("new_stream"):
            owner = self._core.create_stream(options=StreamOptions(nonblocking=True))
        return CudaStream(owner, owner.handle, self._pinned("new_stream"))

    def launch(self, kernel: LoadedKernel, addresses: Sequence[int], on: CudaStream | CudaCapture) -> None:
        stream = self._enter("launch", on)
        with stream.lock:
            self._usable("launch", stream, on)
            try:
                kernel.launch(stream, addresses)
            except CudaError as error:
                raise self._error("launch", str(error.got)) from error

    def copy(self, target: int, source: int, size: int, on: CudaStream | CudaCapture) -> None:
        if size:
            self._queue("copy", on, driver.cuMemcpyDtoDAsync, target, source, size)

    def write(self, address: int, values: np.ndarray, stream: CudaStream) -> None:
        waits = values.nbytes >= WAITED_BYTES
        # The driver stages pageable memory before it returns. The caller's may be pinned; a copy of it is not.
        data = np.ascontiguousarray(values) if waits else np.array(values, order="C")
        if data.nbytes:
            self._queue("write", stream, driver.cuMemcpyHtoDAsync, address, data.ctypes.data, data.nbytes)
            if waits:
                self.synchronize(stream)

    def read(self, address: int, dtype: str, shape: tuple[int, ...], stream: CudaStream) -> np.ndarray:
        values = np.empty(shape, dtype)
        if 0 < values.nbytes <= READ_BYTES:
            pinned = stream.pinned
            # Who captures is refused before it may wait for a reader, who waits for the capture.
            with stream.lock:
                self._usable("read", stream, stream)
            with pinned.lock:
                self._queue("read", stream, driver.cuMemcpyDtoHAsync, pinned.address, address, values.nbytes)
                self.synchronize(stream)
                return pinned.copied(dtype, shape)
        # Waited for first, without the stream's lock, which the copy holds until it is done.
        self.synchronize(stream)
        if values.nbytes:
            self._queue("read", stream, driver.cuMemcpyDtoHAsync, values.ctypes.data, address, values.nbytes)
            self.synchronize(stream)
        return values

    def queue_read(
        self, address: int, dtype: str, shape: tuple[int, ...], stream: CudaStream, reading: CudaReading | None = None
    ) -> CudaReading:
        size = queued_bytes("CudaRuntime.queue_read", dtype, shape)
        # Everything is made before something is queued that has to be waited for.
        pinned = self._pinned("queue_read") if reading is None else reading.pinned
        event = self.record_event(stream) if reading is None else reading.event
        try:
            self._queue("queue_read", stream, driver.cuMemcpyDtoHAsync, pinned.address, address, size)
            self.record_event(stream, event)
        except BaseException:
            self.synchronize(stream)  # the memory may go
            raise
        return CudaReading(pinned, event, dtype, shape)

    def finish_read(self, reading: CudaReading) -> np.ndarray:
        self.wait(reading.event)
        return reading.pinned.copied(reading.dtype, reading.shape)

    def _pinned(self, where: str) -> PinnedMemory:
        self._enter(where)
        return PinnedMemory(driver, self._context, int(self._checked(where, driver.cuMemAllocHost(READ_BYTES))))

    def record_event(self, stream: CudaStream, event: CudaEvent | None = None) -> CudaEvent:
        if event is None:
            self._enter("record_event")
            with self._foreign("record_event"):
                owner = self._core.create_event()
                event = CudaEvent(owner, owner.handle)
        self._queue("record_event", stream, driver.cuEventRecord, event.handle)
        return event

    def event_done(self, event: CudaEvent) -> bool:
        self._enter("event_done")
        result = driver.cuEventQuery(event.handle)
        if result[0] == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._checked("event_done", result)
        return True

    def wait(self, event: CudaEvent) -> None:
        self._enter("wait")
        self._checked("wait", driver.cuEventSynchronize(event.handle))

    def synchronize(self, stream: CudaStream) -> None:
        self._enter("synchronize")
        with stream.lock:
            self._usable("synchronize", stream, stream)
        self._checked("synchronize", driver.cuStreamSynchronize(stream.handle))

    # Graphs.

    def begin_capture(self, stream: CudaStream) -> CudaCapture:
        self._enter("begin_capture")
        capture = CudaCapture(stream)
        with stream.lock:
            self._usable("begin_capture", stream, stream)
            # Before the call, so that what it has begun can be abandoned if it is interrupted.
            stream.capture = capture
        try:
            self._checked("begin_capture", driver.cuStreamBeginCapture(stream.handle, _RELAXED))
        except CudaError:
            stream.end_recording()
            raise
        return capture

    def end_capture(self, capture: CudaCapture) -> CudaGraph:
        return CudaGraph(self._checked("end_capture", self._end("end_capture", capture)), False)

    def abandon_capture(self, stream: CudaStream) -> None:
        capture = stream.capture
        # Another thread's recording is that one's to end.
        if capture is None or capture.thread != threading.get_ident():
            return
        try:
            self.destroy(self.end_capture(capture))
        except StickyError:
            raise
        except CudaError:
            pass  # what went wrong before has spoiled the recording, and its end says so once more

    def instantiate(self, captured: CudaGraph) -> CudaGraph:
        self._enter("instantiate")
        result = driver.cuGraphInstantiate(self._living("instantiate", captured, False), 0)
        return CudaGraph(self._checked("instantiate", result), True)

    def update(self, executable: CudaGraph, captured: CudaGraph) -> bool:
        self._enter("update")
        graphs = self._living("update", executable, True), self._living("update", captured, False)
        result = driver.cuGraphExecUpdate(*graphs)
        if result[0] == driver.CUresult.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE:
            return False
        self._checked("update", result)
        return True

    def upload(self, executable: CudaGraph, stream: CudaStream) -> None:
        self._queue("upload", stream, driver.cuGraphUpload, self._living("upload", executable, True))

    def launch_graph(self, executable: CudaGraph, stream: CudaStream) -> None:
        self._queue("launch_graph", stream, driver.cuGraphLaunch, self._living("launch_graph", executable, True))

    def destroy(self, graph: CudaGraph) -> None:
        self._enter("destroy")
        function = driver.cuGraphExecDestroy if graph.executable else driver.cuGraphDestroy
        # An interrupt that comes during the call is raised when it has returned, and then the handle may be another's.
        # Between these lines Python looks for none, so no graph is lost.
        handle, graph.handle = graph.handle, None
        if handle is None:
            return
        result = function(handle)
        if result[0] != _SUCCESS:
            graph.handle = handle
        self._checked("destroy", result)

    # Memory.

    def allocate(self, size: int) -> tuple[int, Any]:
        self._enter("allocate")
        with self._foreign("allocate"):
            if size < COMPILED_BYTES:
                array = jax.device_put(np.zeros(max(size, ALIGNMENT), np.uint8), self.device)
            else:
                array = jnp.zeros(size, jnp.uint8, device=self.device)
            return self.hold(array)

    def hold(self, array: Array, name: str = "the array") -> tuple[int, Any]:
        """See `Runtime.hold`. JAX does not donate an array that has a capsule, and ``delete()`` does not free it."""
        where = "CudaRuntime.hold"
        check_array(where, array, name, self.device)
        with self._foreign("hold"):
            array.block_until_ready()
            address = array.unsafe_buffer_pointer()
            if address % ALIGNMENT:
                # Such as a part of another library's memory.
                wanted = f"a multiple of {ALIGNMENT}"
                raise InvalidArgument(f"address of {name}", where=where, got=hex(address), wanted=wanted)
            return address, array.__dlpack__()

    # Profiles.

    def range(self, name: str) -> AbstractContextManager[Any]:
        found = self._ranges.get(name)
        if found is None:
            found = self._ranges[name] = self._annotate(name)
        return found

    # Inside.

    def _enter(self, call: str, on: CudaStream | CudaCapture | None = None) -> Any:
        """Begin a call, in the device's context; the stream that it is about."""
        if self._lost is not None:
            raise self._error(call, self._lost)
        self._checked(call, driver.cuCtxSetCurrent(self._context))
        return on.stream if isinstance(on, CudaCapture) else on

    def _queue(
        self, call: str, on: CudaStream | CudaCapture, function: Callable[..., tuple[Any, ...]], *arguments: Any
    ) -> None:
        """Call a function of the driver whose last argument is the stream."""
        stream = self._enter(call, on)
        with stream.lock:
            self._usable(call, stream, on)
            self._checked(call, function(*arguments, stream.handle))

    def _usable(self, call: str, stream: CudaStream, on: CudaStream | CudaCapture) -> None:
        """Wait until no other thread captures a stream, whose lock is held. Refuse to queue where this one does, and to
        record where nothing is captured any more.
        """
        wanted = on if isinstance(on, CudaCapture) else None
        if stream.capture is not wanted:
            stream.wait_for_others()
            if self._lost is not None:  # meanwhile
                raise self._error(call, self._lost)
        if stream.capture is not wanted:
            raise self._error(call, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "a stream that records for nobody else")

    def _end(self, call: str, capture: CudaCapture) -> tuple[Any, ...]:
        """Stop recording, whatever error there is; of an interrupt it is not known whether the driver has stopped."""
        stream = capture.stream
        if stream.capture is not capture:
            raise self._error(call, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "a recording that has not ended")
        try:
            self._enter(call)
            result = driver.cuStreamEndCapture(stream.handle)
        except CudaError:
            stream.end_recording()
            raise
        stream.end_recording()
        return result

    def _living(self, call: str, graph: CudaGraph, executable: bool) -> Any:
        """The driver's handle; it must not see one that it has taken back, or of another kind."""
        if graph.handle is None or graph.executable is not executable:
            wanted = "an executable that exists" if executable else "a recorded graph that exists"
            raise self._error(call, "CUDA_ERROR_INVALID_HANDLE", wanted)
        return graph.handle

    def _checked(self, call: str, result: tuple[Any, ...]) -> Any:
        if result[0] != _SUCCESS:
            raise self._error(call, result[0].name)
        return result[1] if len(result) > 1 else None

    def _error(self, call: str, name: str, wanted: str = "CUDA_SUCCESS") -> CudaError:
        kind = StickyError if name in STICKY else CudaError
        if kind is StickyError:
            self._lost = name
        return kind("call failed", where=f"CudaRuntime.{call}", got=name, wanted=wanted)

    @contextlib.contextmanager
    def _foreign(self, call: str) -> Generator[None]:
        """Errors of the driver as others raise them, by the name that they give; all others pass."""
        try:
            yield
        except StickyError:
            raise
        except Exception as error:
            name = str(error.got) if isinstance(error, CudaError) else _name_of(error)
            if name is None:
                raise
            raise self._error(call, name) from error


def _name_of(error: Exception) -> str | None:
    """The driver's name of an error in the text of an exception."""
    text = str(error)
    found = re.search(r"CUDA_ERROR_\w+", text)
    if found:
        return found[0]
    memory = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in text
    return OUT_OF_MEMORY if memory else None


def _cuda_device(device: jax.Device | None) -> jax.Device:
    """The device, or the first one of JAX; refused unless it is a GPU."""
    if device is None:
        try:
            device = jax.local_devices(backend="gpu")[0]
        except RuntimeError:
            device = jax.local_devices()[0]
    if device.platform != "gpu":
        raise CannotServe("device", where="CudaRuntime", got=str(device), wanted="a CUDA device")
    return device


def _cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _builder(cubins: Path | None) -> str:
    """What made the kernels, for program fingerprints."""
    if cubins is None:
        import triton

        return f"triton {triton.__version__}"
    return " and ".join(compiled.builders(cubins))


def _annotate() -> Callable[[str], AbstractContextManager[Any]]:
    """Makes NVTX ranges, where the ``nvtx`` package is installed."""
    if importlib.util.find_spec("nvtx") is None:
        nothing = contextlib.nullcontext()
        return lambda name: nothing
    annotate = importlib.import_module("nvtx").annotate
    return lambda name: annotate(name, domain="moe_jax")
