"""Compiling and loading an engine's kernels: all before its first step, several at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moe_jax.cache import Runtime
from moe_jax.cache.runtime import Kernel

from .step import Steps

# Seconds before progress is shown: kernels that Triton finds in its cache on disk are loaded sooner.
PATIENCE = 1.0


def load_kernels(runtime: Runtime, steps: Steps) -> tuple[Kernel, ...]:
    """Every kernel of every launch list, each once; a terminal sees how far the compiling is."""
    specs = {spec.key: spec for lists in (steps.decode, steps.prompt) for some in lists.values() for spec in some.specs}
    with _progress("compiling kernels", Console(stderr=True, highlight=False)) as report:
        runtime.prepare(specs.values(), report)
    return tuple(runtime.load(spec) for spec in specs.values())


@contextlib.contextmanager
def _progress(label: str, console: Console) -> Generator[Callable[[int, int], None]]:
    """Gives the function to report ``(done, total)`` to. Shows a bar once it has taken long, on a terminal only."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task, begin = progress.add_task(label, total=None), time.monotonic()

    def report(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total)
        if time.monotonic() - begin > PATIENCE:
            progress.start()

    try:
        yield report
    finally:
        progress.stop()
