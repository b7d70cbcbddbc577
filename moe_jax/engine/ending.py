"""How engines end: closed, with the device's context, or, if they are still open then, with the process."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Generator
from typing import Protocol

from moe_jax.cache import StickyError, StoreUnusable
from moe_jax.pallas_kernels.errors import CudaError

# That the end of a process waits for an engine which a thread without end still uses.
EXIT_SECONDS = 1.0


class Life:
    """Whether an engine can be used. Not thread-safe: its owner locks.

    Attributes:
        over: why it cannot; None while it can.
    """

    def __init__(self) -> None:
        self.over: str | None = None

    def refuse(self, where: str) -> None:
        """Nothing, unless it is over.

        Raises:
            StoreUnusable: saying why.
        """
        if self.over is not None:
            wanted = "an engine that is open" if self.over == "closed" else "a new process"
            raise StoreUnusable("engine", where=where, got=self.over, wanted=wanted)

    def lost(self, error: StickyError) -> None:
        """The device's context, with everything in it."""
        self.over = f"dead, the device context is lost: {error}"

    @contextlib.contextmanager
    def using(self, where: str) -> Generator[None]:
        """Refuse, or run the block, in which the context may be lost."""
        self.refuse(where)
        try:
            yield
        except StickyError as error:
            self.lost(error)
            raise


class Closable(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakKeyDictionary[Closable, threading.RLock] = weakref.WeakKeyDictionary()


def close_at_exit(engine: Closable, lock: threading.RLock) -> None:
    """Close it under its lock when the process ends, if it is still there."""
    _open[engine] = lock


@atexit.register
def _close() -> None:
    """JAX has registered its own end before, so this comes first: the device is still there.

    Raises:
        BaseException: what kept one of them from closing, when all have been tried; errors of the device say nothing
            that a process at its end could use.
    """
    _close_all(list(_open.items()))


def _close_all(engines: list[tuple[Closable, threading.RLock]]) -> None:
    for at, (engine, lock) in enumerate(engines):
        if lock.acquire(timeout=EXIT_SECONDS):
            try:
                with contextlib.suppress(CudaError):
                    engine.close()
            except BaseException:
                _close_all(engines[at + 1 :])
                raise
            finally:
                lock.release()
