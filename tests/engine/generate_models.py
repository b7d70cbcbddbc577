"""Models that keep an engine of their own, and what tests of `Model.generate` on it share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from engines import COUNT, MAIN, PROMPTS

from moe_jax import serving
from moe_jax.cache import SimulatedRuntime
from moe_jax.engine import Engine
from moe_jax.model import Model
from moe_jax.tokenizer import Tokenizer
from test_tokenizer import CONFIG, TEMPLATE, byte_tokenizer
from tiny_models import tiny_config, tiny_module

THREE = PROMPTS[:3]
SIMULATE: dict[str, Any] = {"max_new_tokens": COUNT, "graphs": "simulate"}
JIT: dict[str, Any] = {"max_new_tokens": COUNT, "graphs": "jit"}


def text_model(**changes: Any) -> Model:
    """A model with an engine of its own; the module is shared, so it must not be changed."""
    config = dataclasses.replace(tiny_config(MAIN), **changes)
    return Model(config, tiny_module(tiny_config(MAIN)), Tokenizer(byte_tokenizer(), CONFIG, TEMPLATE))


@pytest.fixture
def model() -> Iterator[Model]:
    model = text_model()
    yield model
    model.close()


@pytest.fixture
def gpu(monkeypatch) -> list[Exception]:
    """Makes `generate` take the CPU for a GPU with a simulated runtime; an error put in here is raised instead."""
    errors: list[Exception] = []

    def runtime(*_: object) -> SimulatedRuntime:
        if errors:
            raise errors[-1]
        return SimulatedRuntime(1 << 26)

    monkeypatch.setattr(serving, "on_gpu", lambda device: True)
    monkeypatch.setattr("moe_jax.engine.options.cuda_runtime", runtime)
    return errors


def engine_of(model: Model) -> Engine:
    assert model._serving is not None and model._serving._kept is not None
    return model._serving._kept.engine


def closed(engine: Engine) -> bool:
    return engine.stats()["state"] == "closed"


def size(model: Model) -> tuple[int, int, int]:
    """Places, tokens and pages of the engine that is kept; nobody has any of them."""
    stats = model.engine_stats()
    assert stats is not None and model._serving is not None and model._serving._kept is not None
    assert (stats["free_sequences"], stats["free_pages"]) == (stats["max_sequences"], stats["pages"])
    kept = model._serving._kept
    assert not kept.claims
    return stats["max_sequences"], kept.engine._geometry.max_tokens, stats["pages"]
