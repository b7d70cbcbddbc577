"""Compiled JAX programs, kept by content.

A compiled program holds no addresses and no weights: arrays are handed to it at each call. So its program key
alone guards its reuse.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled

from moe_jax.pallas_kernels.checks import check_path
from moe_jax.pallas_kernels.errors import InvalidArgument

from .explain import Difference

# Compilations remembered with their reasons.
_REMEMBERED = 256

# Everything that XLA can capture, from the first kernel on. As a list: the form "+X" exists in XLA_FLAGS only.
_COMMAND_BUFFERS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION",
    "xla_gpu_graph_min_graph_size": 1,
}
_NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}


@dataclass(frozen=True, kw_only=True)
class ExecutableStats:
    """Counts since the start or the last `Executables.clear`.

    Attributes:
        entries: programs held now; ``max_entries`` at most.
        bytes: estimate of what they hold or need besides arguments and results: machine code and scratch, as XLA's
            ``memory_analysis`` gives them; 0 for a program without one, and without recorded command buffers, which XLA
            does not tell. ``max_bytes`` at most, unless a single program needs more.
        hits: calls answered with a program that was there, or being compiled by another thread.
        misses: calls that compiled.
        evictions: programs dropped, the least recently used first.
        compile_seconds: time spent tracing and compiling, all misses together.
    """

    entries: int
    max_entries: int
    bytes: int
    max_bytes: int | None
    hits: int
    misses: int
    evictions: int
    compile_seconds: float


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """One program that was compiled, and why.

    Attributes:
        key: its program key.
        seconds: tracing and compiling.
        bytes: as in `ExecutableStats`, of this program.
        command_buffers: on, off, or None for JAX's default.
        reason: why no program that was there could serve.
        differences: fields in which its parts differ from those of the nearest program that was there; ``a`` is of the
            program that was there, ``b`` of this one.
    """

    key: str
    seconds: float
    bytes: int
    command_buffers: bool | None
    reason: str
    differences: tuple[Difference, ...]


class Recipe(NamedTuple):
    """What to compile: a function, example arguments (arrays or avals), and the numbers of those given away."""

    function: Callable[..., Any]
    arguments: Sequence[Any]
    donate_argnums: tuple[int, ...] = ()


class Program:
    """A program of a store, or the promise of one while a thread compiles it.

    Attributes:
        program: what to call; None before it is compiled, and again once the store has dropped it.
        compiling: held by the thread that compiles it. A lock and no event that somebody has to set: a ``with`` block
            lets go of it however the compilation ends, so nobody waits for a thread that has given up.
    """

    def __init__(self, store: Executables, parts: Mapping[str, str]):
        self.program: Compiled | None = None
        self.parts, self.bytes, self.used = parts, 0, 0
        self.compiling = threading.Lock()
        self._clock = store.clock
        self.touch()

    def touch(self) -> None:
        """Say that the program is used now: the store drops those first that were used longest ago."""
        self.used = next(self._clock)


class Executables:
    """A bounded, thread-safe store of ahead-of-time compiled programs, evicting the least recently used.

    Each key is compiled once, however many threads ask for it at the same time. A compilation that fails leaves
    nothing behind: its error goes to the caller, and the next call tries again. A dropped program's memory is free as
    soon as nobody uses it: JAX's own caches do not hold it either.
    """

    def __init__(self, max_entries: int = 64, max_bytes: int | None = None):
        if max_entries < 1:
            raise InvalidArgument("max_entries", where="Executables", got=max_entries, wanted="at least 1")
        if max_bytes is not None and max_bytes < 1:
            raise InvalidArgument("max_bytes", where="Executables", got=max_bytes, wanted="at least 1, or None")
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self.clock = itertools.count()
        self._lock = threading.Lock()
        self._entries: dict[str, Program] = {}
        self._reset_counts()

    def get_or_compile(
        self,
        key: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        donate_argnums: tuple[int, ...] = (),
        command_buffers: bool | None = None,
        parts: Mapping[str, str] | None = None,
    ) -> Compiled:
        """The program under ``key``, compiled now if it is not there.

        Args:
            key: a `program_key` of everything that determines the program: what ``function`` computes, the
                shapes, dtypes and devices of ``arguments``, and the options.
            function: what to compile; used on a miss only.
            arguments: arrays or `jax.ShapeDtypeStruct`, as `jax.stages.Wrapped.lower` takes them.
            donate_argnums: arguments whose buffers the program may reuse.
            command_buffers: True has XLA record the program's kernels and launch them as one, which pays when the same
                arguments come again (decoding); False has it launch them one by one (prompts); None leaves JAX's
                default. For this program alone, and on GPUs only.
            parts: what the key was made of, as text by field (`fields`): the reason of a compilation is told by them.
        """
        recipe = Recipe(function, arguments, donate_argnums)
        entry, _ = self.acquire(key, lambda: recipe, command_buffers=command_buffers, parts=lambda: parts or {})
        program = entry.program
        # Dropped since, by another thread: compiled again.
        return program or self.get_or_compile(
            key, function, arguments, donate_argnums=donate_argnums, command_buffers=command_buffers, parts=parts
        )

    def acquire(
        self,
        key: str,
        recipe: Callable[[], Recipe],
        *,
        command_buffers: bool | None = None,
        parts: Callable[[], Mapping[str, str]] = dict,
    ) -> tuple[Program, Compilation | None]:
        """The program under ``key`` with its place in the store, and how it was compiled if this call did it.

        ``recipe`` and ``parts`` are called on a miss only. Other arguments as for `get_or_compile`.
        """
        while True:
            with self._lock:
                entry = self._entries.get(key)
            if entry is None:
                entry = Program(self, parts())
                with entry.compiling:
                    with self._lock:
                        if key in self._entries:
                            continue
                        reason, differences = self._reason(entry.parts)
                        self._entries[key] = entry
                        self._misses += 1
                    return entry, self._compile(key, entry, recipe, command_buffers, reason, differences)
            if entry.program is None:
                with entry.compiling:
                    pass
            with self._lock:
                if entry.program is not None:
                    entry.touch()
                    self._hits += 1
                    return entry, None
                # Its compilation failed, or it was dropped meanwhile.
                self._remove(key, entry)

    def holds(self, key: str) -> bool:
        """Whether a program is there, or being compiled."""
        with self._lock:
            return key in self._entries

    def stats(self) -> ExecutableStats:
        """A snapshot of the counts."""
        with self._lock:
            return ExecutableStats(
                entries=len(self._entries),
                max_entries=self.max_entries,
                bytes=sum(entry.bytes for entry in self._entries.values()),
                max_bytes=self.max_bytes,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                compile_seconds=self._compile_seconds,
            )

    def compilations(self) -> tuple[Compilation, ...]:
        """The last 256 compilations since the start or the last `clear`, oldest first."""
        with self._lock:
            return tuple(self._compilations)

    def clear(self) -> None:
        """Drop all programs and counts. A program in use lives until its user lets go of it."""
        with self._lock:
            dropped = list(self._entries.values())
            self._entries.clear()
            self._reset_counts()
        for entry in dropped:
            entry.program = None

    def _reason(self, parts: Mapping[str, str]) -> tuple[str, tuple[Difference, ...]]:
        others = [differing(entry.parts, parts) for entry in self._entries.values()]
        if not others:
            return "no program was there", ()
        nearest = min(others, key=len)
        return "new key" if not nearest else summary(nearest), nearest

    def _compile(self, key, entry, recipe, command_buffers, reason, differences) -> Compilation:
        start = time.perf_counter()
        try:
            function, arguments, donate_argnums = recipe()

            # JAX keeps what it traced and compiled for as long as the function lives: one of our own each time.
            @functools.wraps(function)
            def program(*args):
                return function(*args)

            options = _options(command_buffers, arguments)
            lowered = jax.jit(program, donate_argnums=donate_argnums).lower(*arguments)
            compiled = lowered.compile(compiler_options=options)
            entry.bytes = _bytes(compiled)
            entry.program = compiled
        except BaseException:
            # For the counts: whoever comes next would find no program and remove it too.
            with self._lock:
                self._remove(key, entry)
            raise
        seconds = time.perf_counter() - start
        record = Compilation(
            key=key,
            seconds=seconds,
            bytes=entry.bytes,
            command_buffers=command_buffers,
            reason=reason,
            differences=differences,
        )
        with self._lock:
            if self._entries.get(key) is entry:
                self._compile_seconds += seconds
                self._compilations.append(record)
                self._evict(key)
        return record

    def _remove(self, key: str, entry: Program) -> None:
        if self._entries.get(key) is entry:
            del self._entries[key]

    def _evict(self, newest: str) -> None:
        # Never one that is being compiled: other threads wait for it, and it would be compiled again.
        finished = sorted(
            (entry.used, key) for key, entry in self._entries.items() if entry.program is not None and key != newest
        )
        held = sum(entry.bytes for entry in self._entries.values())
        for _, key in finished:
            if len(self._entries) <= self.max_entries and (self.max_bytes is None or held <= self.max_bytes):
                return
            entry = self._entries.pop(key)
            held -= entry.bytes
            entry.program = None
            self._evictions += 1

    def _reset_counts(self) -> None:
        self._hits = self._misses = self._evictions = 0
        self._compile_seconds = 0.0
        self._compilations: deque[Compilation] = deque(maxlen=_REMEMBERED)


def differing(known: Mapping[str, str], wanted: Mapping[str, str]) -> tuple[Difference, ...]:
    """Fields (`fields`) whose texts differ, in the order of ``known``."""
    names = dict.fromkeys([*known, *wanted])
    texts = ((name, known.get(name, "absent"), wanted.get(name, "absent")) for name in names)
    return tuple(Difference(*text) for text in texts if text[1] != text[2])


def summary(differences: Sequence[Difference]) -> str:
    """Differences in one line, the first three spelled out."""
    shown = [f"{each.path} was {each.a}, is {each.b}" for each in differences[:3]]
    return "; ".join([*shown, f"and {len(differences) - 3} more"] if len(differences) > 3 else shown)


def use_compilation_cache(path: str | Path | None) -> None:
    """Have JAX keep compiled programs in a folder, so that the next process loads instead of compiling them.

    The cache is JAX's own and serves every program of the process; this sets its options ``jax_compilation_cache_dir``
    and ``jax_persistent_cache_min_compile_time_secs`` (to 0, because a decode step's programs are small) and nothing
    else. Programs on disk are code: use a folder that nobody else can write to.

    Args:
        path: a folder, made if it is not there; None switches the cache off.

    Raises:
        InvalidArgument: no path, or one that is not of a folder.
        OSError: of the file system.
    """
    folder = None if path is None else check_path("use_compilation_cache", path).absolute()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    name = None if folder is None else str(folder)
    if jax.config.jax_compilation_cache_dir != name:
        compilation_cache.reset_cache()  # JAX reads the option once; this closes what it has open and deletes nothing
        jax.config.update("jax_compilation_cache_dir", name)
    if name is not None:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _options(command_buffers: bool | None, arguments: Sequence[Any]) -> dict[str, Any] | None:
    if command_buffers is None or _platform(arguments) not in ("gpu", "cuda"):
        return None
    return dict(_COMMAND_BUFFERS if command_buffers else _NO_COMMAND_BUFFERS)


def _platform(arguments: Sequence[Any]) -> str:
    """Where a program of these arguments runs: on the devices they are bound to, else on the default one."""
    for leaf in jax.tree.leaves(arguments):
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None and getattr(leaf, "committed", True):
            return next(iter(sharding.device_set)).platform
    device = jax.config.jax_default_device
    return device.platform if isinstance(device, jax.Device) else device or jax.default_backend()


def _bytes(program: Compiled) -> int:
    """What XLA says that a program needs, see `ExecutableStats`; 0 where it cannot say."""
    try:
        found = program.memory_analysis()
    except jax.errors.JaxRuntimeError:
        found = None
    if found is None:
        return 0
    return int(found.generated_code_size_in_bytes + found.temp_size_in_bytes)
