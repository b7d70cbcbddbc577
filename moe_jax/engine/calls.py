"""What the engine gives its store of graphs: a launch list with a certificate."""

from __future__ import annotations

import functools
from typing import NamedTuple

from moe_jax.cache import Certificate, LaunchList, Registry, bucket_for
from moe_jax.cache.identity import Phase

from .step import NAMESPACE, Steps


class Call(NamedTuple):
    """Of so many rows, while the registry is of this version."""

    rows: int
    version: int
    launches: LaunchList
    certificate: Certificate


class Calls:
    """Makes calls for any number of rows that there is a bucket for. Not thread-safe: its owner locks."""

    def __init__(self, steps: Steps, registry: Registry):
        self._steps, self._registry = steps, registry
        self._last: Call | None = None

    def decode(self, rows: int) -> Call:
        """Each row a sequence of its own. Steps of as many rows in a row get the same call."""
        last = self._last
        if last is None or last.rows != rows or last.version != self._registry.version:
            last = self._last = self._made(rows, "decode")
        return last

    def prompt(self, rows: int) -> Call:
        """All rows of one sequence."""
        return self._made(rows, "prompt")

    def _made(self, rows: int, phase: Phase) -> Call:
        version = self._registry.version  # first: what changes meanwhile is seen at the next step
        lists = self._steps.decode if phase == "decode" else self._steps.prompt
        bucket = bucket_for(rows, tuple(lists))
        assert bucket is not None
        generation = self._registry.owner_generation(NAMESPACE)
        return Call(rows, version, lists[bucket], certificate_of(generation, rows, bucket, phase))


@functools.lru_cache(maxsize=1024)
def certificate_of(generation: int, rows: int, bucket: int, phase: Phase) -> Certificate:
    """Equal calls get the same object, made once.

    Args:
        generation: of the engine's namespace.
    """
    return Certificate(
        namespace=NAMESPACE,
        owner_generation=generation,
        semantics="independent" if phase == "decode" else "sequential",
        rows=rows,
        bucket=bucket,
        sequences=rows if phase == "decode" else 1,
        phase=phase,
    )
