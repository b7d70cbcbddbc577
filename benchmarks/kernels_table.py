"""Put the kernels' table into the README, from the raw results.

    python benchmarks/kernels_table.py [REPORT.json …]

With reports named, they are first put together as benchmarks/results/h200-kernels.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_jax.bench.table import END, inserted, merged
from moe_jax.cli.bench_kernels import built_by

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks/results/h200-kernels.json"


def document(text: str, report: Mapping[str, Any]) -> str:
    """A document with the tables of a report between its markers, and below them what built the kernels; errors as
    those of `inserted`.
    """
    made, told = inserted(text, report), built_by(report)
    return made.replace(f"\n{END}", f" {told}\n{END}") if told else made


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="*", metavar="REPORT.json")
    paths = parser.parse_args(words).reports
    if paths:
        RESULTS.write_text(json.dumps(merged([json.loads(Path(path).read_text()) for path in paths]), indent=1) + "\n")
    README.write_text(document(README.read_text(), json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
