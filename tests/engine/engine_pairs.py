"""Engines on the simulated device and on a GPU, for bodies of tests that are the same on both; and pairs of engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engines import MAIN, OPTIONS, last

from moe_jax.cache import SimulatedRuntime
from moe_jax.engine import Engine
from moe_jax.model import Model
from tiny_models import tiny_model

Make = Callable[..., Engine]
# What takes the simulated device minutes is left out of the usual run there.
LONG = pytest.mark.parametrize(
    "device",
    [pytest.param("simulate", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
    indirect=True,
)
WARM_UP = ["direct", "capture", "replay"]


class Device:
    """Where the engines of a test run.

    Args:
        kind: ``"simulate"`` or ``"cuda"``.
        driver: under every CUDA runtime.
    """

    def __init__(self, kind: str, driver: Any):
        self.kind, self._driver = kind, driver

    @property
    def simulated(self) -> bool:
        return self.kind == "simulate"

    def runtime(self) -> Any:
        """A new one, so that what fails in it is the test's own."""
        if self.simulated:
            return SimulatedRuntime(1 << 26)
        from cuda_device import WatchedRuntime

        return WatchedRuntime(self._driver)


# What the simulated device shows here, test_engine_graphs.py shows sooner: it proves the tests themselves.
@pytest.fixture(params=[pytest.param("simulate", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    if request.param == "simulate":
        return Device("simulate", None)
    from cuda_device import watch

    return Device("cuda", watch(monkeypatch))


@pytest.fixture
def make(device: Device, engine_for: Make) -> Make:
    """Makes engines on the device, as `engine_for` does."""

    def made(model: Model, **options: Any) -> Engine:
        mode = options.get("graphs", "simulate" if device.simulated else "on")
        runtime = options.get("runtime") or (None if mode == "simulate" else device.runtime())
        return engine_for(model, **{**options, "graphs": mode, "runtime": runtime})

    return made


class Pair:
    """An engine, and one whose steps are all direct: both are told the same, and must agree in every bit."""

    def __init__(self, make: Make, model: Model, **options: Any):
        self.engine = make(model, **options)
        self.engines = self.engine, make(model, **options, graphs="off")

    def each(self, call: Callable[[Engine], Any]) -> Any:
        """What a call gives for both."""
        one, two = (call(engine) for engine in self.engines)
        assert one == two
        return one

    def prefill(self, prompts: Any, **options: Any) -> list[int]:
        return self.each(lambda engine: engine.prefill(prompts, **options))

    def release(self, *numbers: int) -> None:
        for number in numbers:
            self.each(lambda engine, number=number: engine.release(number))

    def step(self) -> str:
        """One step of both; how the first one's ran."""
        tokens = self.each(lambda engine: engine.step())
        one, two = (engine.memory.read("logits")[: len(tokens)] for engine in self.engines)
        assert one.shape and np.isfinite(one).all()
        np.testing.assert_array_equal(one.view(np.uint8), two.view(np.uint8))
        assert last(self.engines[1]).kind == "direct"
        return last(self.engine).kind

    def kinds(self, count: int) -> list[str]:
        return [self.step() for _ in range(count)]

    def new_manifest(self) -> None:
        """Replaced by an equal one: every graph goes."""
        self.engine.registry.accept(self.engine.registry.manifest("main")[0])


@pytest.fixture
def pair(make: Make) -> Pair:
    """Of the main model, warmed up."""
    made = Pair(make, tiny_model(MAIN), **OPTIONS)
    made.engine.warmup()
    return made
