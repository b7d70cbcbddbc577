"""`moe-jax bench kernels`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from moe_jax import doctor
from moe_jax.bench import plot as plots
from moe_jax.bench import table as tables
from moe_jax.bench.cases import NAMED, default_rows, parse_rows, parse_shape
from moe_jax.cli import output
from moe_jax.cli.measuring import capability_of, check_folder, draw, head, progress_on, write

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
    check_folder("--json", json)
    check_folder("--plot", plot)
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
    from moe_jax.bench.run import bench, versions
    from moe_jax.bench.timing import Clock, CudaTimer

    clock = Clock(time_limit)
    device = jax.devices("gpu")[0]
    told = head(machine, device, capability)
    told["versions"] |= versions(PEER_PACKAGES)
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
        keep=lambda report: write(json, told | report),
    )
    return told | measured


def _show(report: Mapping[str, Any], console: Console) -> None:
    """The table on a terminal, as Markdown elsewhere; and what was not measured."""
    if console.is_terminal:
        draw(console, f"expert layer, bf16, {report['device']}", tables.HEADINGS, tables.rows_of(report))
        console.print(Text(tables.facts(report)))
    else:
        print(tables.markdown(report), file=console.file)
    if report["stopped"]:
        print(f"Not complete: {report['stopped']} is over.", file=console.file)
