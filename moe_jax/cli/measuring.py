"""What the commands of `moe-jax bench` and the scripts in `benchmarks` share: the machine, progress, and the file of
the report.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from moe_jax import __version__, doctor
from moe_jax.cache import Runtime, SimulatedRuntime
from moe_jax.errors import CannotServe, InvalidArgument
from moe_jax.pallas_kernels.stored import publish

SIMULATED_BYTES = 1 << 30  # of a simulated device; the host gives only what is touched


def check_folder(option: str, path: Path | None) -> None:
    """Refuse a file whose folder is not there, before anything is measured.

    Raises:
        InvalidArgument: naming the option.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise InvalidArgument("folder", where=option, got=str(path), wanted="a file in a folder that is there")


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


def head(machine: doctor.Machine, device: jax.Device, capability: int) -> dict[str, Any]:
    """What a report says of the machine, and the date."""
    from moe_jax.bench.run import today

    named = {name: version for name, version in machine.packages.items() if version}
    return {
        "device": device.device_kind,
        "capability": f"{capability // 10}.{capability % 10}",
        "driver": machine.driver,
        "versions": {"moe-jax": __version__, "Python": machine.python, **named},
        "date": today(),
        "dtype": "bfloat16",
    }


def measured_device(where: str, *, simulated: bool) -> tuple[jax.Device, dict[str, Any]]:
    """The GPU that is measured, or the CPU of a simulated one; and what a report says of it, as `head` does.

    Raises:
        CannotServe: there is no GPU, or something it needs is missing.
    """
    machine = doctor.examine()
    capability = SimulatedRuntime.capability if simulated else capability_of(machine, where)
    device = jax.devices("cpu" if simulated else "gpu")[0]
    return device, head(machine, device, capability)


def runtime_of(device: jax.Device, cubins: Path | None, *, simulated: bool) -> Runtime:
    """The runtime that steps are measured on. A simulated one needs no GPU, and its times say nothing.

    Args:
        cubins: a folder from which alone kernels come; None: Triton compiles them here.
    """
    if simulated:
        return SimulatedRuntime(SIMULATED_BYTES)
    from moe_jax.cache.cuda_runtime import CudaRuntime  # needs packages that a simulated device does not

    return CudaRuntime(device, cubins=cubins)


def write(path: Path | None, report: Mapping[str, Any]) -> None:
    """Replace the file as a whole: a run that is cut off leaves the report of the cell before."""
    if path is None:
        return
    publish(path, f"{json.dumps(report, indent=1)}\n".encode())


def draw(console: Console, title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on a terminal."""
    table = Table(*headings, title=title)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


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
