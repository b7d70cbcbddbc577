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
        lock: held while something is queued, and while ``capture`` changes: in blocks alone, which no interrupt leaves
            with the lock.
        capture: what records on it now. That keeps the stream from other threads, and whoever ends it gives it back.
    """

    owner: Any = field(repr=False)
    handle: Any
    pinned: PinnedMemory = field(repr=False)
    capture: CudaCapture | None = field(default=None, repr=False)
    lock: Any = field(default_factory=threading.RLock, repr=False)
    _ended: threading.Condition = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._ended = threading.Condition(self.lock)

    def wait_for_others(self) -> None:
        """Return when no other thread records on it. The lock is held, though not meanwhile."""
        thread = threading.get_ident()
        while self.capture is not None and self.capture.thread != thread:
            self._ended.wait()

    def end_recording(self) -> None:
        """Say that nothing is recorded on it any more, so that others may use it; again, if that was interrupted."""
        with self.lock:
            # First: they look when the lock is free, and nobody waits where nothing is recorded.
            self._ended.notify_all()
            self.capture = None


@dataclass(eq=False)
class CudaCapture:
    """A recording, which its thread begins and ends."""

    stream: CudaStream
    thread: int = field(default_factory=threading.get_ident, init=False)


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
