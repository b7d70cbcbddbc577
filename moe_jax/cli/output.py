"""What the commands print: tables, progress, sizes. Drawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text


def table(title: str, rows: Iterable[tuple[str, str]], console: Console) -> None:
    """Print name and value pairs."""
    if not console.is_terminal:
        for name, value in rows:
            print(f"{name}: {value}", file=console.file)
        return
    drawn = Table("", "", title=title, show_header=False)
    for name, value in rows:
        drawn.add_row(Text(name), Text(value))  # as Text: "moe-jax[cuda13]" is no markup
    console.print(drawn)


def log_console(*, plain: bool) -> Console:
    """The console on stderr; ``plain`` makes it one that draws nothing, as without a terminal."""
    return Console(stderr=True, highlight=False, force_terminal=False if plain else None)


@contextmanager
def byte_progress(label: str, console: Console) -> Generator[Callable[[int, int], None]]:
    """Shows progress by bytes while the block runs; gives the function to report ``(done, total)`` to."""
    if not console.is_terminal:
        print(label, file=sys.stderr, flush=True)
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def waiting(label: str, console: Console) -> Generator[Callable[[], None]]:
    """Says what is waited for, until the block ends or the function given is called, which may be repeated."""
    if not console.is_terminal:
        print(label, file=sys.stderr, flush=True)
        yield lambda: None
        return
    with console.status(label) as status:
        yield status.stop


def human_bytes(count: int) -> str:
    """``12345678`` as ``"11.8 MiB"``."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
