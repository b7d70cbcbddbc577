"""How engines end: closed, dropped, with the device's context, or, if they are still open then, with the process.

An engine that nobody holds any more is closed as by `Engine.close`. Python says so wherever the last reference goes or
the collector runs, and that thread may have the lock of another engine, or be inside JAX. So the closing is done by a
thread of its own, which has nothing (`apart`). The one in which the engine was dropped waits for that, but not for
ever: it may have what the other one needs. An engine of `Model.generate` whose last stream is collected is closed in
the same way.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable, Generator
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Protocol

from moe_jax.cache import Graphs, StickyError, StoreUnusable
from moe_jax.cache.runtime import Kernel
from moe_jax.pallas_kernels.errors import CudaError

from .memory import Memory
from .sequences import Sequence

if TYPE_CHECKING:
    from .prompts import Prompts
    from .stepping import Stepper

# That a thread waits until an engine which was dropped in it is closed, and the end of a process for an engine that a
# thread without end still uses.
SECONDS = 1.0


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


class Owned:
    """Everything that an engine has on its device and in flight there, and how that goes.

    It knows of no engine, so it can be closed when the engine is gone.

    Attributes:
        lock: of the engine; taken while this is closed.
        life: of the engine.
        sequences: of the engine, by number.
        kernels: loaded. They stay for as long as the engine: a graph that is evicted takes none with it.
        prompts, stepper: None until they are made.
        dropped: the engine is gone, or never was whole.
    """

    def __init__(self, graphs: Graphs, memory: Memory):
        self.lock = threading.RLock()
        self.life = Life()
        self.sequences: dict[int, Sequence] = {}
        self.kernels: tuple[Kernel, ...] = ()
        self.prompts: Prompts | None = None
        self.stepper: Stepper | None = None
        self.dropped = False
        self._graphs, self._memory = graphs, memory

    def end_with(self, engine: object) -> None:
        """Let this be closed when the engine is dropped or the process ends, if it is not closed by then."""
        _open[self] = None
        # At exit `_close` comes before the end of JAX; a finalizer would come at any time.
        weakref.finalize(engine, _engine_gone, self).atexit = False

    def close(self) -> None:
        """Wait for everything, destroy the graphs and let go of all memory. A second call does nothing."""
        with self.lock:
            if self.life.over == "closed":
                return
            # The engine's own store, and one that was put in its place.
            others = () if self.stepper is None else (self.stepper.graphs,)
            for store in dict.fromkeys((self._graphs, *others)):
                # What a lost context holds cannot be given back to it; the second call lets go of it here.
                with contextlib.suppress(StickyError):
                    store.close()
                store.close()
            self.kernels = ()
            if self.prompts is not None:
                self.prompts.release()
            self._memory.release()
            self.sequences.clear()
            if self.stepper is not None:
                self.stepper.close()
            _open.pop(self, None)
            self.life.over = "closed"

    def drop(self) -> None:
        """Close it for an engine that is no more. What the device refuses is tried again, at the latest at exit."""
        self.dropped = True
        with contextlib.suppress(CudaError):
            self.close()


# All that is not closed yet: whoever loses sight of it, it is not lost.
_open: dict[Owned, None] = {}


def close_dropped() -> None:
    """Try again to close what dropped engines have left: their memory may be needed."""
    for owned in list(_open):
        if owned.dropped and owned.lock.acquire(blocking=False):
            try:
                # Whoever dropped it has been told of errors that are not of the device.
                with contextlib.suppress(Exception):
                    owned.drop()
            finally:
                owned.lock.release()


def apart(close: Callable[[], object]) -> None:
    """Close something in a thread of its own, as where this is called something else may be under way: see the module.

    Where no thread can be made, nothing is done: others try again later. What ``close`` raises is told by the thread.
    """
    done = threading.Lock()
    done.acquire()
    try:
        # `threading.Thread` takes locks of its own, which the interrupted code may have.
        _thread.start_new_thread(_then_release, (close, done))
    except RuntimeError:
        return  # no more threads
    try:
        done.acquire(timeout=SECONDS)
    except KeyboardInterrupt:
        _thread.interrupt_main()  # from a finalizer it would go nowhere


def _then_release(close: Callable[[], object], done: threading.Lock) -> None:
    try:
        close()
    finally:
        done.release()


def _engine_gone(owned: Owned) -> None:
    """Close what a dropped engine has left; or the next engine or the end of the process does it."""
    if owned.life.over != "closed":
        owned.dropped = True
        apart(owned.drop)


class Closable(Protocol):
    @property
    def lock(self) -> threading.RLock: ...

    def close(self) -> None: ...


@atexit.register
def _close() -> None:
    """Close all engines that are left open.

    JAX has registered its own end before, so this comes first: the device is still there.

    Raises:
        BaseException: what kept one of them from closing, when all have been tried; errors of the device say nothing
            that a process at its end could use.
    """
    _close_all(list(_open))


def _close_all(left: Items[Closable]) -> None:
    for at, owned in enumerate(left):
        if owned.lock.acquire(timeout=SECONDS):
            try:
                with contextlib.suppress(CudaError):
                    owned.close()
            except BaseException:
                _close_all(left[at + 1 :])
                raise
            finally:
                owned.lock.release()
