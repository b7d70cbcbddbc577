"""`moe-jax bench kernels`."""

from __future__ import annotations

import json as json_format
import os
import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from moe_jax import __version__, doctor
from moe_jax.bench import plot as plots
from moe_jax.bench import table as tables
from moe_jax.bench.cases import NAMED, default_rows, parse_rows, parse_shape
from moe_jax.cli import output
from moe_jax.errors import CannotServe, InvalidArgument

WHERE = "moe-jax bench kernels"
PEER_PACKAGES = ("torch", "tokamax")


def run(
    shapes: Sequence[str],
    rows: str | None,
    *,
    json: Path | None,
    plot: Path | None,
    cubins: Path | None,
    time_limit: float,
) -> None:
    """Measure, print the table, and write the report and the plot.

    Raises:
        InvalidArgument: an option's value.
        CannotServe: no CUDA GPU, or a package that is missing.
    """
    chosen = [parse_shape(text) for text in shapes] or list(NAMED.values())
    counts = None if rows is None else parse_rows(rows)
    cells = [(shape, counts or default_rows(shape)) for shape in dict.fromkeys(chosen)]
    for option, path in (("--json", json), ("--plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidArgument("folder", where=option, got=str(path), wanted="a file in a folder that is there")
    if plot is not None:
        plots.figure_class()
    # PyTorch and raw launches take memory beside JAX, which else takes most of it at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    machine = doctor.examine()
    capability = capability_of(machine, WHERE)
    console = output.log_console(plain=False)
    with progress_on(console) as progress:
        report = _measure(cells, machine, capability, cubins, time_limit, json, progress)
    _show(report, Console(highlight=False))
    if plot is not None:
        plots.roofline(report, plot)


def _measure(cells, machine, capability, cubins, time_limit, json, progress) -> dict[str, Any]:
    import jax

    from moe_jax.bench import contenders, launches, peers_jax, peers_torch
    from moe_jax.bench.run import bench, today
    from moe_jax.bench.timing import Clock, CudaTimer

    clock = Clock(time_limit)
    device = jax.devices("gpu")[0]
    named = {name: version for name, version in machine.packages.items() if version}
    head = {
        "device": device.device_kind,
        "capability": f"{capability // 10}.{capability % 10}",
        "driver": machine.driver,
        "versions": {"moe-jax": __version__, "Python": machine.python, **named, **_versions(PEER_PACKAGES)},
        "date": today(),
        "dtype": "bfloat16",
    }
    measured = bench(
        cells,
        [
            launches.contender(cubins, capability),
            *contenders.back_ends(),
            *peers_torch.contenders(),
            *peers_jax.contenders(),
        ],
        CudaTimer(device, cubins, capability),
        clock,
        device=device,
        seed=secrets.randbelow(2**31),
        progress=progress,
        keep=lambda report: write(json, head | report),
    )
    return head | measured


def capability_of(machine: doctor.Machine, where: str) -> int:
    """Compute capability of the GPU that would be measured, 90 for 9.0.

    Raises:
        CannotServe: there is none, or something it needs is missing.
    """
    wanted = "an NVIDIA GPU of compute capability 8.0 or newer that JAX can use"
    gpus = [device for device in machine.devices if device.platform == "gpu"]
    problems = doctor.problems(machine)
    if problems:
        raise CannotServe("no usable GPU", where=where, got=problems[0].what, wanted=f"{wanted}: {problems[0].remedy}")
    if not gpus or gpus[0].capability is None or "." not in gpus[0].capability:
        sees = ", ".join(f"{device.kind} ({device.platform})" for device in machine.devices[:1]) or "no device"
        driver = f"NVIDIA driver {machine.driver}" if machine.driver else "no NVIDIA driver"
        raise CannotServe("no CUDA GPU", where=where, got=f"{driver}, JAX sees {sees}", wanted=wanted)
    major, minor = gpus[0].capability.split(".")
    return 10 * int(major) + int(minor)


def _versions(packages: Sequence[str]) -> dict[str, str]:
    from moe_jax.bench.run import versions

    return versions(packages)


def write(path: Path | None, report: Mapping[str, Any]) -> None:
    """Replace the file as a whole: a run that is cut off leaves the report of the cell before."""
    if path is None:
        return
    fresh = path.with_name(f"{path.name}.part")
    fresh.write_text(json_format.dumps(report, indent=1) + "\n")
    fresh.replace(path)


@contextmanager
def progress_on(console: Console) -> Generator[Any]:
    """A bar on a terminal; a line for each measurement everywhere."""
    if not console.is_terminal:
        yield lambda done, total, text: print(f"[{done}/{total}] {text}", file=console.file, flush=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("measuring")

        def show(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total)
            bar.console.print(Text(text))

        yield show


def _show(report: Mapping[str, Any], console: Console) -> None:
    """The table on a terminal, as Markdown elsewhere; and what was not measured."""
    if console.is_terminal:
        drawn = Table(*tables.HEADINGS, title=f"expert layer, bf16, {report['device']}")
        for row in tables.rows_of(report):
            drawn.add_row(*map(Text, row))
        console.print(drawn)
        console.print(Text(tables.facts(report)))
    else:
        print(tables.markdown(report), file=console.file)
    if report["stopped"]:
        print(f"Not complete: {report['stopped']} is over.", file=console.file)
