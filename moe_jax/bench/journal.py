"""Trials of a search as lines of a file, so that a search that was killed goes on where it stopped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Journal:
    """Measurements that were made, by what was measured.

    A line is written and flushed after each measurement. A last line that a kill cut short is dropped. Faults are not
    kept: the next search tries them again.

    Args:
        path: file to read and to append to; None keeps nothing.
        **conditions: what must be equal for a measurement to count again, such as the device and the kernel's source.
    """

    def __init__(self, path: Path | None, **conditions: Any):
        self.path, self.conditions = path, conditions
        self.known: dict[str, tuple[float, float]] = {}
        if path is None or not path.exists():
            return
        whole = [line for line in path.read_text().splitlines() if line.endswith("}")]
        path.write_text("".join(f"{line}\n" for line in whole))
        for line in whole:
            entry = json.loads(line)
            self.known[entry["key"]] = entry["us"], entry["spread"]

    def remember[C](
        self, measure: Callable[[C], tuple[float, float]], **case: Any
    ) -> Callable[[C], tuple[float, float]]:
        """``measure``, asked only for what the file does not hold yet.

        Args:
            measure: median and spread in microseconds of a candidate, a frozen dataclass.
            **case: what is measured beside the candidate: operation, shape, rows.
        """

        def remembered(candidate: C) -> tuple[float, float]:
            tile = dataclasses.asdict(candidate)  # pyrefly: ignore[bad-argument-type]
            key = json.dumps([self.conditions, case, tile], sort_keys=True)
            if key not in self.known:
                us, spread = measure(candidate)
                self.known[key] = us, spread
                if self.path is not None:
                    with self.path.open("a") as file:
                        file.write(json.dumps({"key": key, "us": us, "spread": spread}) + "\n")
            return self.known[key]

        return remembered
