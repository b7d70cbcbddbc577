"""`moe-jax bench decode`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from moe_jax import doctor
from moe_jax.bench.cases import parse_rows
from moe_jax.cli import output
from moe_jax.cli.device import free_memory
from moe_jax.cli.measuring import capability_of, check_folder, draw, head, progress_on, write
from moe_jax.errors import InvalidArgument

WHERE = "moe-jax bench decode"


def run(
    shape: str, rows: str, context: int, modes: str, *, json: Path | None, cubins: Path | None, time_limit: float
) -> None:
    """Measure, print the table, and write the report.

    Raises:
        InvalidArgument: an option's value.
        CannotServe: no CUDA GPU, or one on which not even a layer fits.
    """
    from moe_jax.bench import decode
    from moe_jax.bench.decode_model import config_of
    from moe_jax.pallas_kernels.linear.heuristics import MAX_ROWS

    config, counts, chosen = config_of(shape), parse_rows(rows), decode.parse_modes(modes)
    if counts[-1] > MAX_ROWS:
        raise InvalidArgument("rows", where="--rows", got=counts[-1], wanted=f"at most {MAX_ROWS}, as the engine takes")
    most = config.max_positions - decode.positions()
    if context > most:
        raise InvalidArgument("context", where="--context", got=context, wanted=f"at most {most} for {shape}")
    check_folder("--json", json)
    # Weights and caches may take nearly all of the device, other libraries need little beside them.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the older name, which must not stand beside the newer one
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.95")
    machine = doctor.examine()
    capability = capability_of(machine, WHERE)
    with progress_on(output.log_console(plain=False)) as progress:
        report = _measure(
            shape, config, counts, context, chosen, machine, capability, json, cubins, time_limit, progress
        )
    _show(report, Console(highlight=False))


def _measure(
    shape, config, counts, context, modes, machine, capability, json, cubins, time_limit, progress
) -> dict[str, Any]:  # fmt: skip
    import jax

    from moe_jax.bench import decode, decode_model
    from moe_jax.bench.timing import Clock, CudaTimer
    from moe_jax.cache.cuda_runtime import CudaRuntime

    clock, total = Clock(time_limit), len(counts) * len(modes)
    device = jax.devices("gpu")[0]
    ceilings = CudaTimer(device, cubins, capability).ceilings()
    progress(0, total, f"read {ceilings.read_tbs:.2f} TB/s, matmul {ceilings.matmul_tflops:.0f} TFLOP/s")
    free, _ = free_memory(device)
    made = config
    if free is not None:
        made = decode_model.fitting(config, counts[-1] * decode.longest(config, context), free)
    seed = secrets.randbelow(2**31)
    model = decode_model.random_model(made, seed, device)
    size = decode_model.weight_bytes(made)
    progress(0, total, f"{shape}: {made.layers} of {config.layers} layers, {size / 1e9:.1f} GB, {clock.spent:.0f} s")
    told = head(machine, device, capability) | {
        "shape": shape,
        "layers": made.layers,
        "layers_published": config.layers,
        "weight_bytes": size,
    }
    measured = decode.bench(
        model,
        counts,
        context,
        modes,
        CudaRuntime(device, cubins=cubins),
        ceilings,
        clock,
        seed=seed,
        progress=progress,
        keep=lambda report: write(json, told | report),
    )
    return told | measured


def _show(report: Mapping[str, Any], console: Console) -> None:
    """The table on a terminal, as Markdown elsewhere; what was not measured, and what was cut."""
    from moe_jax.bench import decode
    from moe_jax.bench.table import facts

    if console.is_terminal:
        title = f"decode step, {report['shape']}, bf16, {report['device']}"
        draw(console, title, decode.HEADINGS, decode.rows_of(report))
    else:
        print(decode.markdown(report), file=console.file)
    print(f"\n{facts(report)}", file=console.file)
    if report["layers"] < report["layers_published"]:
        cut = f"{report['layers']} of {report['layers_published']} layers, which is what fits"
        print(f"Cut: {report['shape']} with {cut}.", file=console.file)
    for cell in report["cells"]:
        for fault in cell["faults"]:
            print(f"{cell['mode']}, {cell['rows']} rows: {fault}", file=console.file)
    if report["stopped"]:
        print(f"Not complete: {report['stopped']}.", file=console.file)
