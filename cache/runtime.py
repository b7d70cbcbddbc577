"""What the store of graphs needs of a device, as a protocol; and the errors of one.

Two runtimes serve it: `SimulatedRuntime` on the host, and `moe_jax.cache.cuda_runtime.CudaRuntime`. Handles are opaque
to the store. Of CUDA they are:

=============  ===============================================================================================
`Stream`       ``CudaStream``: a non-blocking one of ``cuda.core``, and what captures on it
`Kernel`       `moe_jax.pallas_kernels.launcher.LoadedKernel`
`Capture`      ``CudaCapture``: a stream between the driver's begin and end of a relaxed capture
`Captured`     ``CudaGraph`` of a ``CUgraph``
`Executable`   ``CudaGraph`` of a ``CUgraphExec``
`Event`        ``CudaEvent``: one of ``cuda.core``
`Reading`      ``CudaReading``: pinned memory of the host, and an event
=============  ===============================================================================================

Every method may raise `CudaError`, and `StickyError` when the context is lost: then nothing works in this process any
more. A method that raises has done nothing and left nothing behind, `end_capture` and `instantiate` included; `launch`
on a stream may then have been preceded by others that run. Methods may be called from any thread; the device is made
current in each.
"""

from __future__ import annotations

import contextlib
import gc
import math
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Array

from moe_jax.pallas_kernels.errors import CudaError, InvalidArgument
from moe_jax.pallas_kernels.spec import KernelSpec

# Most that `Runtime.queue_read` takes. What is read at once goes through pinned memory up to here: one wait, where
# pageable memory takes two and another copy.
READ_BYTES = 1 << 16

Stream = Any
Kernel = Any
Capture = Any
Captured = Any
Executable = Any
Event = Any
Reading = Any


class StickyError(CudaError):
    """An error that the context does not recover from, such as an illegal address. Only a new process helps."""


class Runtime(Protocol):
    """A device as the store of graphs sees it.

    Attributes:
        simulated: runs on the host.
        compiler: compiler and device capability, as in ``"triton 3.9.0, sm_90"``: part of every program fingerprint.
        device: JAX's; None on the host.
        device_kind: as JAX names it, e.g. ``"NVIDIA H200"``, by which tuned tiles are found; ``"host"``.
        capability: such as 90; 80, the least that is served, on the host.
    """

    simulated: bool
    compiler: str
    device: jax.Device | None
    device_kind: str
    capability: int

    def new_stream(self) -> Stream:
        """A stream of its owner's own, which no other stream waits for by itself."""
        ...

    def load(self, spec: KernelSpec) -> Kernel:
        """Compile or find, and load, so that nothing is left to the first launch. Not during capture.

        Raises:
            CannotServe, InvalidArgument: a kernel that does not run here.
        """
        ...

    def prepare(self, specs: Iterable[KernelSpec], progress: Callable[[int, int], object] | None = None) -> None:
        """Compile now what `load` would compile, several at a time, so that it finds everything.

        Args:
            progress: called in this thread with kernels done and in all, from ``(0, total)`` to ``(total, total)``;
                not where nothing is to be compiled.

        Raises:
            CannotServe, InvalidArgument: a kernel that does not run here.
        """
        ...

    def launch(self, kernel: Kernel, addresses: Sequence[int], on: Stream | Capture) -> None:
        """Queue, or record, one launch; an address for each argument of the kernel's spec."""
        ...

    def copy(self, target: int, source: int, size: int, on: Stream | Capture) -> None:
        """Queue, or record, a copy of ``size`` bytes on the device."""
        ...

    def begin_capture(self, stream: Stream) -> Capture:
        """Record what is launched on the result; other streams and threads are not restricted.

        Who is interrupted from here to the end of `end_capture` calls `abandon_capture`, whatever has been returned.
        """
        ...

    def end_capture(self, capture: Capture) -> Captured:
        """What was recorded. On an error the recording is gone."""
        ...

    def abandon_capture(self, stream: Stream) -> None:
        """End what is recorded on a stream, if anything is, and forget it; raises only `StickyError`."""
        ...

    def instantiate(self, captured: Captured) -> Executable:
        """An executable of what was recorded; independent of it afterwards."""
        ...

    def update(self, executable: Executable, captured: Captured) -> bool:
        """Change an executable in place to what was recorded; False, and no change, where that is not possible.

        Launches that are in flight are not affected.
        """
        ...

    def upload(self, executable: Executable, stream: Stream) -> None:
        """Bring an executable to the device, so that its first launch costs no more than the others."""
        ...

    def launch_graph(self, executable: Executable, stream: Stream) -> None:
        """Queue one launch of an executable."""
        ...

    def destroy(self, graph: Captured | Executable) -> None:
        """Give a graph back. The caller has waited for its launches. On an error it is still there.

        One that is gone already is left alone: who was interrupted when the device had taken it back may try again.
        """
        ...

    def record_event(self, stream: Stream, event: Event | None = None) -> Event:
        """An event, a new or the given one, that is done when what was queued until now is."""
        ...

    def event_done(self, event: Event) -> bool:
        """Whether the event's work is done; does not wait."""
        ...

    def wait(self, event: Event) -> None:
        """Return when the event's work is done."""
        ...

    def synchronize(self, stream: Stream) -> None:
        """Return when all work of a stream is done."""
        ...

    def allocate(self, size: int) -> tuple[int, Any]:
        """Memory of ``size`` bytes: its address, and a capsule; it is freed when the last reference to that goes."""
        ...

    def hold(self, array: Array, name: str = "the array") -> tuple[int, Any]:
        """Memory of an array that has been computed, without a copy where the device is a real one: address, capsule.

        Args:
            name: of the array, for messages.

        Raises:
            InvalidArgument: an array that was deleted, is not on this device alone, or lies there in another order.
        """
        ...

    def write(self, address: int, values: np.ndarray, stream: Stream) -> None:
        """Queue a copy of host values to the device; ``values`` may change after the call."""
        ...

    def read(self, address: int, dtype: str, shape: tuple[int, ...], stream: Stream) -> np.ndarray:
        """Wait for a stream and copy from the device: a new array, which no later step changes."""
        ...

    def queue_read(
        self, address: int, dtype: str, shape: tuple[int, ...], stream: Stream, reading: Reading | None = None
    ) -> Reading:
        """Queue a copy of a few values from the device to the host, behind what was queued until now.

        Args:
            reading: one that was queued before on the same stream, whose values were taken or are not wanted any more.
                Its memory is used again, and it is not to be finished afterwards. It has to live until the call has
                returned.

        Raises:
            InvalidArgument: not 1 to 65536 bytes.
        """
        ...

    def finish_read(self, reading: Reading) -> np.ndarray:
        """Wait for a copy: a new array. What was queued behind it is not waited for."""
        ...

    def range(self, name: str) -> AbstractContextManager[Any]:
        """A named range for profilers (NVTX)."""
        ...


def queued_bytes(where: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a read that is to be queued.

    Raises:
        InvalidArgument: none, or more than `READ_BYTES`.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if not 0 < size <= READ_BYTES:
        raise InvalidArgument("size", where=where, got=size, wanted=f"1 to {READ_BYTES} bytes")
    return size


_uncollected = 0
_collector_lock = threading.Lock()
_collector_was_on = False


@contextlib.contextmanager
def no_collection() -> Generator[None]:
    """Python's cyclic collector off: what it finds may free device objects in the middle of a capture.

    It is one for the process, so the last of all threads that entered turns it on again, if it was on.
    """
    global _uncollected, _collector_was_on
    with _collector_lock:
        if _uncollected == 0:
            _collector_was_on = gc.isenabled()
            gc.disable()
        _uncollected += 1
    try:
        yield
    finally:
        with _collector_lock:
            _uncollected -= 1
            if _uncollected == 0 and _collector_was_on:
                gc.enable()
