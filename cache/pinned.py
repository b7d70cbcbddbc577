"""Host memory that a CUDA device writes into by itself, and what has been asked for and is on its way there."""

from __future__ import annotations

import ctypes
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .runtime import READ_BYTES


class PinnedMemory:
    """Memory of the host that the device writes into. A stream's own is shared, and read under ``lock``; that of a
    `CudaReading` is the reading's alone.

    Attributes:
        address, values: of the same `READ_BYTES` bytes.
    """

    def __init__(self, driver: Any, context: Any, address: int):
        self.address, self.lock = address, threading.Lock()
        self.values = np.frombuffer((ctypes.c_ubyte * READ_BYTES).from_address(address), np.uint8)
        free = weakref.finalize(self, _free_pinned, driver, context, address)
        free.atexit = False  # the driver may be gone by then, and the memory goes with the process

    def copied(self, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        """A copy of what the device has written at its begin."""
        values = np.empty(shape, dtype)
        values.reshape(-1).view(np.uint8)[:] = self.values[: values.nbytes]
        return values


@dataclass(eq=False)
class CudaReading:
    """A copy to the host that has been queued, into memory of its own; the next one may use it again.

    Attributes:
        event: done when the copy is.
        dtype, shape: of what is read.
    """

    pinned: PinnedMemory = field(repr=False)
    event: Any
    dtype: str
    shape: tuple[int, ...]


def _free_pinned(driver: Any, context: Any, address: int) -> None:
    """In any thread, whose context stays what it was; what a lost context does not take back goes with the process."""
    driver.cuCtxPushCurrent(context)
    driver.cuMemFreeHost(address)
    driver.cuCtxPopCurrent()
