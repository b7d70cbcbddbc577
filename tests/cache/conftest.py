"""What the tests of the store of graphs share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from toy_step import World


@pytest.fixture(params=["simulate", pytest.param("cuda", marks=pytest.mark.gpu)])
def world_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    """Makes toy models, each on a device of its own kind: ``world_for(max_entries=1)``, with the options of `World`."""
    worlds: list[World] = []

    def make(**options: Any) -> World:
        if request.param == "cuda":
            from cuda_device import WatchedRuntime

            options = {"runtime": WatchedRuntime(driver), "mode": "on", **options}
        worlds.append(World(**options))
        return worlds[-1]

    if request.param == "cuda":
        from cuda_device import watch

        driver = watch(monkeypatch)
    yield make
    for world in worlds:
        world.runtime.heal()
        world.graphs.close()
        assert not world.runtime.executables and not world.runtime.graphs
