"""Put the kernels' table into the README, from the raw results.

    python benchmarks/kernels_table.py [REPORT.json …]

With reports named, they are first put together as benchmarks/results/h200-kernels.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from moe_jax.bench.table import inserted, merged

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks/results/h200-kernels.json"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="*", metavar="REPORT.json")
    paths = parser.parse_args(words).reports
    if paths:
        RESULTS.write_text(json.dumps(merged([json.loads(Path(path).read_text()) for path in paths]), indent=1) + "\n")
    README.write_text(inserted(README.read_text(), json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
