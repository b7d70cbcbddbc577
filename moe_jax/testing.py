"""For tests of programs that decode with an engine. Needs pytest (the ``test`` extra).

from moe_jax.testing import assert_replay_equals_direct, engine_for  # noqa: F401 (a fixture)

def test_my_model_replays_exactly(engine_for):
    engine = engine_for(model, max_sequences=4, max_tokens=128)
    assert_replay_equals_direct(engine, ["a prompt", "and another"])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from moe_jax.cache import Certificate, Graphs, LaunchList, Outcome, ResourceTable
from moe_jax.engine import Engine
from moe_jax.errors import InvalidArgument
from moe_jax.model import Model
from moe_jax.pallas_kernels.checks import check_integer, check_kind


class _Twice:
    """Stands where an engine's store stood: each decode step is replayed, then run direct from the same state."""

    def __init__(self, engine: Engine):
        self.store, self.memory, self.runtime = engine.graphs, engine.memory, engine.runtime
        self.direct = Graphs(engine.runtime, engine.registry, mode="off")
        self.compared = 0

    def step(self, launches: LaunchList, certificate: Certificate, table: ResourceTable) -> Outcome:
        if certificate.phase == "prompt":
            return self.store.step(launches, certificate, table)
        # Scratch is not compared: kernels leave parts of it as they were.
        names = [b.name for b in launches.buffers if b.name != "scratch"]
        arenas = [name for name in names if getattr(table.get(name), "use", None) == "arena"]
        before = {name: self.memory.read(name) for name in arenas}
        outcome = self.store.step(launches, certificate, table)
        np.testing.assert_equal(outcome.kind, "replay", f"{outcome.reason} {outcome.detail or ''}")
        replayed = {name: self.memory.read(name) for name in arenas}
        for name, values in before.items():
            self.memory.write(name, values)
        self.runtime.synchronize(self.store.stream)
        self.direct.step(launches, certificate, table)
        self.direct.drain()
        for name, values in replayed.items():
            # As bytes: a NaN equals itself.
            direct, got = (array.reshape(-1).view(np.uint8) for array in (self.memory.read(name), values))
            message = f"{name}, {certificate.rows} rows in a bucket of {certificate.bucket}"
            np.testing.assert_array_equal(got, direct, message)
        self.compared += 1
        return outcome


def assert_replay_equals_direct(engine: Engine, prompts: Sequence[Any], *, steps: int = 1, **options: Any) -> int:
    """Replayed decode steps leave the bits that direct ones leave: tokens, logits, keys, values and books.

    Prompts join one by one and leave in the same order, so every number of live sequences up to theirs is stepped
    twice. The engine is warmed up first; its own live sequences are stepped along.

    Args:
        prompts: no more than the engine has places for, each as `Engine.prefill` takes it.
        steps: at each number of sequences.
        options: of `Engine.prefill`.

    Returns:
        steps compared.

    Raises:
        InvalidArgument: an argument of another kind; nothing ran.
        AssertionError: a bit differs (which memory, and where), or a step was no replay (and why).
    """
    where = "assert_replay_equals_direct"
    check_kind(where, "engine", engine, Engine)
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise InvalidArgument("prompts", where=where, got=repr(prompts), wanted="a list of prompts")
    steps = check_integer(where, "steps", steps, 1)
    engine.warmup()
    store, numbers = engine.graphs, []
    twice: Any = _Twice(engine)
    engine.graphs = twice
    try:
        for prompt in prompts:
            numbers += engine.prefill(prompt, **options)
            for _ in range(steps):
                engine.step()
        while numbers:
            engine.release(numbers.pop(0))
            for _ in range(steps):
                engine.step()
    finally:
        engine.graphs = store
        twice.direct.close()
        for number in numbers:
            engine.release(number)
    return twice.compared


@pytest.fixture
def engine_for() -> Iterator[Callable[..., Engine]]:
    """Makes engines: ``engine_for(model, max_sequences=…, max_tokens=…, …)``, by default with ``graphs="simulate"``.

    After the test it checks that their counters add up, and closes them.
    """
    engines: list[Engine] = []

    def make(model: Model, **options: Any) -> Engine:
        given: dict[str, Any] = {"graphs": "simulate", **options}
        engines.append(Engine(model, **given))
        return engines[-1]

    yield make
    for engine in engines:
        counts = engine.stats()
        engine.close()
        sums = {
            "plan_calls": counts["plan_compiles"] + counts["plan_reuses"],
            "steps": sum(counts[kind] for kind in ("direct", "captures", "updates", "replays")),
            "direct": sum(counts["declines"].values()),
        }
        np.testing.assert_equal({name: counts[name] for name in sums}, sums)
