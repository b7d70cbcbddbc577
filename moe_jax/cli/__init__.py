"""The command `moe-jax`: decode text, describe a checkpoint, examine the machine, measure kernels.

Results go to stdout, everything else (progress, summary, warnings, errors) to stderr.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import jax
import typer

from moe_jax import __version__
from moe_jax.cli import bench
from moe_jax.cli.device import DeviceName, GraphsName
from moe_jax.errors import InvalidArgument, MoeJaxError

DEFAULT_PROMPT = "In the beginning"

app = typer.Typer(
    name="moe-jax",
    help="Mixture-of-Experts inference for JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(bench.app)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit: 0, 1 when it could not do its job, 2 for wrong arguments, 130 when interrupted."""
    warnings.showwarning = _show_warning
    try:
        app(None if arguments is None else list(arguments))
    except InvalidArgument as error:
        _stop(error, 2)
    except (MoeJaxError, jax.errors.JaxRuntimeError, OSError) as error:
        _stop(error, 1)
    sys.exit(0)


@app.command()
def decode(
    model: Annotated[
        str | None, typer.Option(metavar="PATH", help="Checkpoint folder or hub id; the shipped model if left out.")
    ] = None,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Text to continue.")] = DEFAULT_PROMPT,
    max_new_tokens: Annotated[str, typer.Option(metavar="INTEGER", help="Longest continuation, in tokens.")] = "200",
    temperature: Annotated[str, typer.Option(metavar="FLOAT", help="0 takes the likeliest token each time.")] = "0.0",
    top_p: Annotated[
        str,
        typer.Option(
            metavar="FLOAT", help="With a temperature: sample from the likeliest tokens of this total probability."
        ),
    ] = "1.0",
    seed: Annotated[str, typer.Option(metavar="INTEGER", help="Seed of the sampling.")] = "0",
    device: Annotated[DeviceName, typer.Option(help="Where to run.")] = DeviceName.auto,
    graphs: Annotated[
        GraphsName | None,
        typer.Option(
            help="Device graphs of the engine; jit: the jitted step. If left out: on for a GPU, jit for a CPU.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Continue a text, printing it as it is decoded."""
    from moe_jax.cli import decoding

    # Texts until here: Typer refuses what is no number in words of its own.
    options = decoding.numbers(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    options["graphs"] = None if graphs is None else graphs.value
    decoding.run(model, prompt, options, device=device, as_json=json)


@app.command()
def info(
    path: Annotated[
        str | None, typer.Argument(help="Checkpoint folder or hub id; the shipped model if left out.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="PATH", help="The same, as decode takes it.")] = None,
    json: Json = False,
) -> None:
    """Say what a checkpoint is and how many of its experts would fit into memory."""
    from moe_jax.cli import description

    if path is not None and model is not None:
        got = f"{path!r} and --model {model!r}"
        raise InvalidArgument("two checkpoints", where="moe-jax info", got=got, wanted="one of the two")
    description.run(model if path is None else path, as_json=json)


@app.command()
def doctor(json: Json = False) -> None:
    """Examine Python, JAX, driver and GPU; exit 1 with the remedy when something is wrong."""
    from moe_jax.cli import diagnosis

    if not diagnosis.run(as_json=json):
        raise typer.Exit(1)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def _stop(error: Exception, code: int) -> NoReturn:
    sys.stdout.flush()
    first = str(error).strip().splitlines() or [type(error).__name__]
    print(f"error: {' '.join(line.strip() for line in first)}", file=sys.stderr)
    sys.exit(code)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)
