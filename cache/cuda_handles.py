"""What a `CudaRuntime` gives to the store of graphs: streams, recordings, graphs and events."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import Any

from .pinned import PinnedMemory

_serials = itertools.count(1)


@dataclass(eq=False)
class CudaStream:
    """A non-blocking stream. ``int(stream.handle)`` is its ``CUstream``.

    Attributes:
        capture: what records on it now; its thread holds ``lock`` meanwhile.
    """

    owner: Any = field(repr=False)
    handle: Any
    pinned: PinnedMemory = field(repr=False)
    capture: CudaCapture | None = field(default=None, repr=False)
    lock: Any = field(default_factory=threading.RLock, repr=False)

    def end_recording(self) -> None:
        """Say that nothing is recorded on it any more, so that others may use it."""
        self.capture = None
        self.lock.release()


@dataclass(eq=False)
class CudaCapture:
    """A recording."""

    stream: CudaStream


@dataclass(eq=False)
class CudaGraph:
    """What was recorded, or an executable of it; ``serial`` is never given twice, handles of the driver are.

    Attributes:
        handle: the driver's; None when the graph has been destroyed.
    """

    serial: int = field(default_factory=_serials.__next__, init=False)
    handle: Any = field(repr=False)
    executable: bool


@dataclass(eq=False)
class CudaEvent:
    """A point in a stream's work."""

    owner: Any = field(repr=False)
    handle: Any
