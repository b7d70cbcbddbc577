"""Engines that are still open when the process ends are closed then."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from typing import Protocol

from moe_jax.pallas_kernels.errors import CudaError

# That the end of a process waits for an engine which a thread without end still uses.
EXIT_SECONDS = 1.0


class Closable(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakKeyDictionary[Closable, threading.RLock] = weakref.WeakKeyDictionary()


def close_at_exit(engine: Closable, lock: threading.RLock) -> None:
    """Close it under its lock when the process ends, if it is still there."""
    _open[engine] = lock


@atexit.register
def _close() -> None:
    """JAX has registered its own end before, so this comes first: the device is still there."""
    for engine, lock in list(_open.items()):
        if lock.acquire(timeout=EXIT_SECONDS):
            try:
                with contextlib.suppress(CudaError):  # the others still want to be closed
                    engine.close()
            finally:
                lock.release()
