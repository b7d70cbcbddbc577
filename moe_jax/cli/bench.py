"""`moe-jax bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="bench", help="Measure on this machine's GPU.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `kernels` a subcommand while it is the only one."""


@app.command()
def kernels(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|H,I,E,K", help="Expert layer to measure; may be repeated. All named ones if left out."
        ),
    ] = None,
    rows: Annotated[str | None, typer.Option(metavar="N,N,…", help="Row counts, e.g. 1,4,16.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report there, cell by cell.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the roofline (needs matplotlib).")] = None,
    cubins: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Take raw-launched kernels from there, whichever Triton built them."),
    ] = None,
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", min=1.0, help="Stop after about so long.")] = 540.0,
) -> None:
    """Time our back ends of the expert layer, and every peer that imports, beside the device's own ceilings."""
    from moe_jax.cli import bench_kernels

    bench_kernels.run(shape or (), rows, json=json, plot=plot, cubins=cubins, time_limit=time_limit)
