"""`moe-jax bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="bench", help="Measure on this machine's GPU.", no_args_is_help=True)


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


@app.command()
def decode(
    shape: Annotated[
        str, typer.Option(metavar="NAME", help="qwen3-30b-a3b, mixtral-8x7b, olmoe-1b-7b, or tiny to try it out.")
    ] = "qwen3-30b-a3b",
    rows: Annotated[str, typer.Option(metavar="N,N,…", help="Numbers of sequences, at most 64.")] = "1,16,64",
    context: Annotated[int, typer.Option(min=2, help="Tokens that every sequence has before.")] = 1024,
    modes: Annotated[
        str, typer.Option(metavar="NAME,…", help="What is measured.")
    ] = "engine,engine-nographs,jit,jit-stock",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report there, cell by cell.")] = None,
    cubins: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The engine's kernels, from benchmarks/decode_build.py.")
    ] = None,
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", min=1.0, help="Stop after about so long.")] = 540.0,
) -> None:
    """Time whole decode steps of a model with random weights: the engine with graphs and without, and jitted steps."""
    from moe_jax.cli import bench_decode

    bench_decode.run(shape, rows, context, modes, json=json, cubins=cubins, time_limit=time_limit)
