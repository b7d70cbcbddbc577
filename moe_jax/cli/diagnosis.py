"""`moe-jax doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console

from moe_jax import __version__, doctor
from moe_jax.cli import output


def run(*, as_json: bool) -> bool:
    """Print what was found; False when something is wrong."""
    machine = doctor.examine()
    problems = doctor.problems(machine)
    operations = doctor.operations() if machine.devices else []
    if as_json:
        report = {
            "ok": not problems,
            "moe_jax": __version__,
            "machine": asdict(machine),
            "operations": [asdict(operation) for operation in operations],
            "problems": [asdict(problem) for problem in problems],
        }
        print(json.dumps(report))
        return not problems
    rows = [("moe-jax", __version__), ("Python", machine.python)]
    rows += [(name, version or "not installed") for name, version in machine.packages.items()]
    rows.append(("NVIDIA driver", machine.driver or "none"))
    rows += [(name, repr(value)) for name, value in machine.variables.items()]
    for device in machine.devices:
        capability = f", compute capability {device.capability}" if device.capability else ""
        rows.append((f"device ({device.platform})", f"{device.kind}{capability}"))
    rows += machine.libraries.items()
    rows += [(f"operation {operation.name}", f"{operation.backend} ({operation.why})") for operation in operations]
    output.table("moe-jax doctor", rows, Console(highlight=False))
    for problem in problems:
        print(f"PROBLEM: {problem.what}\n REMEDY: {problem.remedy}")
    if not problems:
        gpu = any(device.platform == "gpu" for device in machine.devices)
        print("OK: the GPU is usable." if gpu else "OK: no NVIDIA GPU here; everything runs on the CPU, slowly.")
    return not problems
