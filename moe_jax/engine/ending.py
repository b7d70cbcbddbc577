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
    """What has a lock, and is closed under it."""

    _lock: threading.RLock

    def close(self) -> None: ...


_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_at_exit(engine: Closable) -> None:
    """Close it when the process ends, if it is still there and open."""
    _open.add(engine)


@atexit.register
def _close() -> None:
    """JAX has registered its own end before, so this comes first: the device is still there."""
    for engine in list(_open):
        if engine._lock.acquire(timeout=EXIT_SECONDS):
            try:
                with contextlib.suppress(CudaError):  # the others still want to be closed
                    engine.close()
            finally:
                engine._lock.release()
