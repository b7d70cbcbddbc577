"""Put the kernels' table into the README, from the raw results.

    python benchmarks/kernels_table.py [REPORT.json …]

With reports named, they are first put together as benchmarks/results/h200-kernels.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from moe_jax.bench.table import inserted, merged
from moe_jax.errors import InvalidArgument

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks/results/h200-kernels.json"


def read(path: str) -> dict[str, Any]:
    """A report.

    Raises:
        InvalidArgument: the file is none.
        OSError: it cannot be read.
    """
    wanted = "a report of `moe-jax bench kernels`, in JSON"
    try:
        found = json.loads(Path(path).read_text())
    except ValueError as error:
        raise InvalidArgument("report", where=path, got=error, wanted=wanted) from None
    if not (isinstance(found, dict) and {"versions", "cells"} <= found.keys()):
        raise InvalidArgument("report", where=path, got="something else", wanted=wanted)
    return found


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="*", metavar="REPORT.json")
    paths = parser.parse_args(words).reports
    if paths:
        RESULTS.write_text(json.dumps(merged([read(path) for path in paths]), indent=1) + "\n")
    README.write_text(inserted(README.read_text(), json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    from refusals import told  # beside this file, which is its place only when it runs as a script

    told(main)
