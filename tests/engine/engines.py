"""One tiny model and one geometry for most tests of the engine, so that its references are compiled once."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.cache import StickyError, StoreUnusable
from moe_jax.engine import Engine
from moe_jax.model import Model
from tiny_models import tiny_config, tiny_model, tiny_module

MAIN = "olmoe"
OPTIONS: dict[str, Any] = {"max_sequences": 4, "max_tokens": 64, "page_size": 8, "chunk": 4}
PROMPTS = [[5, 17, 3, 60, 2, 9, 9, 41, 8], [11], [80, 2, 2, 4], [200, 201], [33] * 6]
COUNT = 7  # tokens that an end is expected after, where none is given


def turned_model() -> Model:
    """The main model's structure with other weights, in arrays of its own."""
    config = tiny_config(MAIN)
    graphdef, state = nnx.split(tiny_module(config))
    turned = jax.tree.map(lambda x: jnp.asarray(np.ascontiguousarray(np.asarray(x)[..., ::-1])), state)
    return Model(config, nnx.merge(graphdef, turned))


@functools.cache
def other_model() -> Model:
    """One of these, shared between tests: do not change it."""
    return turned_model()


@functools.cache
def expected(other: bool = False) -> list[list[int]]:
    """Greedy tokens of every prompt from the jitted path, which knows no engine."""
    model = other_model() if other else tiny_model(MAIN)
    return model.generate(PROMPTS, max_new_tokens=COUNT, graphs="jit").tolist()


def ending_with(token: int) -> Model:
    """The main model with an end token."""
    config = dataclasses.replace(tiny_config(MAIN), eos_token_ids=(token,))
    return Model(config, tiny_module(tiny_config(MAIN)))


def kinds(engine: Engine, count: int) -> list[str]:
    """How the next steps run."""
    found = []
    for _ in range(count):
        engine.step()
        found.append(last(engine).kind)
    return found


def last(engine: Engine) -> Any:
    """Outcome of the last call of the store."""
    assert engine.graphs.last is not None
    return engine.graphs.last


def take(engine: Engine, into: dict[int, list[int]], steps: int) -> None:
    """Step, and collect tokens by sequence."""
    for _ in range(steps):
        for number, token in engine.step().items():
            into.setdefault(number, []).append(token)


def step_loses_the_context(engine: Engine) -> None:
    """The next step ends the engine, and every call and the counts say why."""
    with pytest.raises(StickyError):
        engine.step()
    with pytest.raises(StoreUnusable, match=r"context is lost.* wanted a new process"):
        engine.step()
    assert "context is lost" in engine.stats()["state"]
    engine.close()
