"""Where a model's arrays lie: served if the jitted step can, refused elsewhere, with an error of our own."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from moe_jax.errors import CannotServe
from moe_jax.model import Model
from tiny_models import tiny_config, tiny_model, tiny_module

MAIN = "qwen3_moe"
PROMPTS, TOKENS = [[5, 17, 3], [11]], np.asarray([[1, 2, 3]])
pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices (conftest.py sets XLA_FLAGS)")


def placed(place: Callable[[int], Sharding | None]) -> Model:
    """A tiny model whose arrays lie where they are told to, by number; None: not bound to a device."""
    config = tiny_config(MAIN)
    graphdef, state = nnx.split(tiny_module(config))
    leaves, tree = jax.tree.flatten(state)
    there = [jax.device_put(np.asarray(leaf), place(index)) for index, leaf in enumerate(leaves)]
    return Model(config, nnx.merge(graphdef, tree.unflatten(there)))


def on(device: int) -> Sharding:
    return SingleDeviceSharding(jax.devices()[device])


def in_mesh(devices: int, spec: P, kind: AxisType = AxisType.Auto) -> Sharding:
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(kind,), devices=jax.devices()[:devices])
    return NamedSharding(mesh, spec)


SERVED = {
    "unbound": lambda index: None,
    "one device": lambda index: on(0),
    "another": lambda index: on(1),
    "the first unbound, the others on another": lambda index: on(1) if index else None,
    "the last unbound, the others on another": lambda index: None if index == 3 else on(1),
    "a mesh of one device": lambda index: in_mesh(1, P()),
    "a mesh of one device, the first split": lambda index: in_mesh(1, P() if index else P("x")),
    "on each of two, as JAX's types say": lambda index: in_mesh(2, P(), AxisType.Explicit),
}


@pytest.mark.parametrize("place", SERVED.values(), ids=SERVED)
def test_a_model_that_lies_whole_on_a_device_is_served_however_it_came_there(place):
    model, wanted = placed(place), tiny_model(MAIN)
    np.testing.assert_array_equal(model.generate(PROMPTS, max_new_tokens=4), wanted.generate(PROMPTS, max_new_tokens=4))
    assert model.explain_generate().startswith("jitted step")
    np.testing.assert_array_equal(model(TOKENS), wanted(TOKENS))


REFUSED = {
    "replicated": lambda index: in_mesh(2, P()),
    "the first split": lambda index: in_mesh(2, P() if index else P("x")),
    "another split": lambda index: in_mesh(2, P("x") if index == 1 else P()),
    "two devices": lambda index: on(min(index, 1)),
    "a device and a mesh": lambda index: in_mesh(2, P()) if index else on(0),
}


@pytest.mark.parametrize("place", REFUSED.values(), ids=REFUSED)
def test_a_model_on_several_devices_is_refused_with_a_typed_error(place):
    model = placed(place)
    for call in (lambda: model.generate(PROMPTS, max_new_tokens=4), lambda: model(TOKENS)):
        with pytest.raises(CannotServe, match=r"sharded argument|devices: got"):
            call()


def test_arrays_on_different_devices_are_named():
    with pytest.raises(
        CannotServe, match=r"generate: devices: got arrays on .*:0 and .*:1, wanted all of a model on the same"
    ):
        placed(REFUSED["two devices"]).generate(PROMPTS, max_new_tokens=4)
