"""Compiled JAX programs, kept by content.

A compiled program holds no addresses and no weights: arrays are handed to it at each call. So its program key
alone guards its reuse.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.stages import Compiled

from moe_jax.pallas_kernels.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class ExecutableStats:
    """Counts since the start or the last `Executables.clear`.

    Attributes:
        entries: programs held now; ``max_entries`` at most.
        hits: calls answered with a program that was there, or being compiled by another thread.
        misses: calls that compiled.
        evictions: programs dropped, the least recently used first.
        compile_seconds: time spent tracing and compiling, all misses together.
    """

    entries: int
    max_entries: int
    hits: int
    misses: int
    evictions: int
    compile_seconds: float


class _Entry:
    """A program, or the promise of one while a thread compiles it."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.program: Compiled | None = None


class Executables:
    """A bounded, thread-safe store of ahead-of-time compiled programs, evicting the least recently used.

    Each key is compiled once, however many threads ask for it at the same time. A compilation that fails leaves
    nothing behind: its error goes to the caller, and the next call tries again.
    """

    def __init__(self, max_entries: int = 64):
        if max_entries < 1:
            raise InvalidArgument("max_entries", where="Executables", got=max_entries, wanted="at least 1")
        self.max_entries = max_entries
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._reset_counts()

    def get_or_compile(
        self, key: str, function: Callable[..., Any], arguments: Sequence[Any], *, donate_argnums: tuple[int, ...] = ()
    ) -> Compiled:
        """The program under ``key``, compiled now if it is not there.

        Args:
            key: a `program_key` of everything that determines the program: what ``function`` computes, the
                shapes, dtypes and devices of ``arguments``, and ``donate_argnums``.
            function: what to compile; used on a miss only.
            arguments: arrays or `jax.ShapeDtypeStruct`, as `jax.stages.Wrapped.lower` takes them.
            donate_argnums: arguments whose buffers the program may reuse.
        """
        while True:
            with self._lock:
                entry = self._entries.get(key)
                if entry is None:
                    entry = self._entries[key] = _Entry()
                    self._misses += 1
                    break
                self._entries.move_to_end(key)
            entry.done.wait()
            if entry.program is not None:
                with self._lock:
                    self._hits += 1
                return entry.program
        return self._compile(key, entry, function, arguments, donate_argnums)

    def stats(self) -> ExecutableStats:
        """A snapshot of the counts."""
        with self._lock:
            return ExecutableStats(
                entries=len(self._entries),
                max_entries=self.max_entries,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                compile_seconds=self._compile_seconds,
            )

    def clear(self) -> None:
        """Drop all programs and counts. A program in use lives until its user lets go of it."""
        with self._lock:
            self._entries.clear()
            self._reset_counts()

    def _compile(self, key, entry, function, arguments, donate_argnums) -> Compiled:
        try:
            start = time.perf_counter()
            program = jax.jit(function, donate_argnums=donate_argnums).lower(*arguments).compile()
        except BaseException:
            with self._lock:
                if self._entries.get(key) is entry:
                    del self._entries[key]
            entry.done.set()
            raise
        entry.program = program
        entry.done.set()
        with self._lock:
            self._compile_seconds += time.perf_counter() - start
            # Not one that is being compiled: other threads wait for it, and it would be compiled again.
            finished = [k for k, e in self._entries.items() if e.program is not None and k != key]
            for old in finished[: max(0, len(self._entries) - self.max_entries)]:
                del self._entries[old]
                self._evictions += 1
        return program

    def _reset_counts(self) -> None:
        self._hits = self._misses = self._evictions = 0
        self._compile_seconds = 0.0
