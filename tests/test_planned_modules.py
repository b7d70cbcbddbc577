"""`planned_jit` with Flax modules: split once, watched, put back, donated in part."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import moe_jax
from flax_layers import CONFIG, H, I, build, inputs, make
from moe_jax import planned, planned_call, planned_jit, splitting
from moe_jax.errors import CannotServe, InvalidArgument, PlanChanged
from moe_jax.pallas_kernels.grouped_moe import Activation, MoEConfig
from moe_jax.pallas_kernels.route import RouterConfig
from planned_steps import Counter, Plan, Scale, counted


def test_a_donated_module_gives_away_only_what_is_replaced():
    model = Counter()
    function = planned_jit(lambda model, x: model(x), donate=["model"])
    weight, count = model.weight.get_raw_value(), model.count.get_raw_value()
    for _ in range(3):
        np.testing.assert_array_equal(function(model, jnp.ones(4)), np.arange(4.0) * 2)
    assert count.is_deleted() and not weight.is_deleted() and model.weight.get_raw_value() is weight
    assert float(model.count[...]) == 3
    kept = Counter()
    count = kept.count.get_raw_value()
    planned_jit(lambda model, x: model(x))(kept, jnp.ones(4))
    assert not count.is_deleted() and float(kept.count[...]) == 1


def test_changes_reach_modules_that_share_variables():
    first = Counter()
    second = nnx.List([first, Counter()])

    def step(a, b, x):
        return a(x) + b[0](x) + b[1](x)

    function = planned_jit(step)
    for _ in range(2):
        function(first, second, jnp.ones(4))
    assert float(first.count[...]) == 4 and float(second[1].count[...]) == 2
    assert second[0] is first


def test_training_with_an_optimizer_equals_nnx_jit():
    def train(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(jnp.square(model(x))))(model)
        optimizer.update(model, grads)
        return loss

    losses = []
    for transform in (nnx.jit, functools.partial(planned_jit, donate=["optimizer"])):
        model = Scale()
        optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
        step = transform(train)
        losses.append([float(step(model, optimizer, inputs(3))) for _ in range(4)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    counted(1, 3, step)


def test_a_module_is_split_once_and_the_hot_path_makes_no_key(monkeypatch):
    model, x = make(), inputs(3)
    function = planned_jit(lambda model, x: model(x), plan={"k": 2})
    wanted = function(model, x)

    def never(*args, **kwargs):
        raise AssertionError("not on the hot path")

    monkeypatch.setattr(nnx, "split", never)
    for module in (planned, planned_call, splitting):
        monkeypatch.setattr(module, "program_key", never, raising=False)
    model.gate_up[...] = model.gate_up[...] * 0  # a value, not the structure
    np.testing.assert_array_equal(function(model, x), np.zeros_like(wanted))
    counted(1, 1, function)


def attribute(value):
    def change(model):
        model.scale = value

    return change


def replaced_variable(model):
    model.weight = nnx.Variable(model.weight[...])


def added(model):
    model.more = nnx.Param(jnp.ones(1))


def removed(model):
    del model.extra


MUTATIONS = {
    "attribute": (attribute(3), "model.scale", 3),
    "type of an attribute": (attribute(2.0), "model.scale", 2),
    "item of a list in place": (lambda model: model.sizes.append(4), "model.sizes[2]", 2),
    "item of a dict in place": (lambda model: model.names.update(b=2), "model.names['b']", 2),
    "metadata": (lambda model: model.weight.set_metadata(note="x"), "model.weight metadata ['note']", 2),
    "kind of variable": (replaced_variable, "model.weight variable", 2),
    "variable added": (added, "model.more", 2),
    "variable removed": (removed, "model.extra", 2),
    "attribute of a part": (lambda model: setattr(model.part, "scale", 5), "model.part.scale", 2),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_change_of_a_module_is_noticed(mutation):
    class Holder(Counter):
        def __init__(self):
            super().__init__()
            self.sizes, self.names, self.part, self.extra = [1, 2], {"a": 1}, Counter(), nnx.Param(jnp.ones(1))

    change, path, scale = MUTATIONS[mutation]
    model = Holder()
    function = planned_jit(lambda model, x: model(x))
    for _ in range(2):
        function(model, jnp.ones(4))
    counted(1, 1, function)
    change(model)
    for _ in range(2):
        np.testing.assert_array_equal(function(model, jnp.ones(4)), np.arange(4.0) * scale)
    counted(2, 2, function)
    assert path in [each.path for each in function.compilations()[1].differences]
    assert float(model.count[...]) == 4


def test_a_replaced_part_of_a_module_counts_at_once():
    class Outer(nnx.Module):
        def __init__(self):
            self.parts = nnx.List([Counter(), Counter()])

        def __call__(self, x):
            return self.parts[0](x) + self.parts[1](x)

    model = Outer()
    function = planned_jit(lambda model, x: model(x))
    function(model, jnp.ones(4))
    model.parts[1] = Counter()
    model.parts[1].weight[...] = jnp.zeros(4)
    np.testing.assert_array_equal(function(model, jnp.ones(4)), np.arange(4.0) * 2)
    assert float(model.parts[1].count[...]) == 1
    counted(1, 1, function)  # of equal structure: no new program
    model.parts[1].scale = 3
    function(model, jnp.ones(4))
    assert function.explain_last().reason == "model.parts[1].scale was 2, is 3"


def test_containers_that_cannot_be_watched_are_split_at_each_call():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Box:
        value: Any

    class Holder(nnx.Module):
        def __init__(self):
            self.box = nnx.data(Box(nnx.Param(jnp.ones(2))))
            self.array = nnx.data(jnp.full(2, 3.0))

        def __call__(self, x):
            return x * self.box.value[...] * self.array

    model = Holder()
    function = planned_jit(lambda model, x: model(x))
    np.testing.assert_array_equal(function(model, jnp.ones(2)), np.full(2, 3.0))
    model.box.value = nnx.Param(jnp.ones(2) * 5)
    np.testing.assert_array_equal(function(model, jnp.ones(2)), np.full(2, 15.0))
    model.array = jnp.full(2, 7.0)
    np.testing.assert_array_equal(function(model, jnp.ones(2)), np.full(2, 35.0))
    counted(1, 2, function)


def test_C64_modules_of_equal_options_share_a_program_also_with_lists_as_attributes():
    class Listed(nnx.Module):
        def __init__(self, sizes):
            self.sizes, self.moe = sizes, build()

        def __call__(self, x):
            return self.moe(x) * len(self.sizes)

    function = planned_jit(lambda model, x: model(x), plan=Plan())
    models = [Listed([1, 2]), Listed([1, 2]), Listed([1, 2, 3])]
    models[1].moe.down[...] = models[1].moe.down[...] * 2
    results = [function(model, inputs(3)) for model in models]
    np.testing.assert_allclose(results[1], results[0] * 2, rtol=1e-5)
    np.testing.assert_allclose(results[2] / 3, results[0] / 2, rtol=1e-5)
    counted(2, 1, function)
    assert function.explain_last().differences[0].path == "model.sizes[2]"


def test_a_static_attribute_that_cannot_be_compared_is_named():
    class Odd(nnx.Module):
        def __init__(self):
            self.options = {1, 2}
            self.odd = bytearray(b"x")

        def __call__(self, x):
            return x

    with pytest.raises(InvalidArgument, match=r"attribute .*Odd\.odd: .* got a builtins\.bytearray"):
        planned_jit(lambda model, x: model(x))(Odd(), jnp.ones(1))


def test_a_step_may_not_change_the_structure_of_a_module_nor_return_it():
    def grow(model, x):
        model.more = nnx.Param(x)
        return x

    model = Counter()
    with pytest.raises(CannotServe, match=r"planned_jit\(grow\): the function changed the structure of a module"):
        planned_jit(grow)(model, jnp.ones(1))
    with pytest.raises(InvalidArgument, match="a module in the result: got Counter, wanted arrays"):
        planned_jit(lambda model: (1, model))(model)
    assert not hasattr(model, "more")

    class Bare(nnx.Module):
        def __init__(self):
            self.array = nnx.data(jnp.ones(2))

    def replace(model):
        model.array = model.array + 1
        return 0

    with pytest.raises(CannotServe, match="replaced an array that is a module's attribute"):
        planned_jit(replace)(Bare())


def test_linen_modules_and_variables():
    class Block(linen.Module):
        features: int

        @linen.compact
        def __call__(self, x):
            return x + moe_jax.linen.MoE(self.features, CONFIG)(x)

    variables = Block(I).init(jax.random.key(0), inputs(2))
    function = planned_jit(lambda module, variables, x: module.apply(variables, x), static=["module"])
    for _ in range(3):
        np.testing.assert_allclose(
            function(Block(I), variables, inputs(2)), Block(I).apply(variables, inputs(2)), rtol=1e-6
        )
    counted(1, 2, function)


def test_a_planned_method():
    class Model(Counter):
        @functools.partial(planned_jit, plan=Plan(), donate=["self"])
        def step(self, x):
            return self(x)

    model = Model()
    for _ in range(2):
        np.testing.assert_array_equal(model.step(jnp.ones(4)), np.arange(4.0) * 2)
    assert float(model.count[...]) == 2
    counted(1, 1, Model.step)
    assert Model.step.__name__ == "step"


def test_functions_and_modules_are_let_go():
    def make_step():
        def step(model, x):
            return model(x)

        return step

    step, model = make_step(), Counter()
    watched = [weakref.ref(step), weakref.ref(model), weakref.ref(model.weight.get_raw_value())]
    function = planned_jit(step)
    function(model, jnp.ones(4))
    del model
    gc.collect()
    assert [each() is None for each in watched] == [False, True, True]
    del function, step
    gc.collect()
    assert watched[0]() is None


def test_the_moe_config_of_a_module_is_part_of_its_fingerprint():
    other = MoEConfig(
        router=RouterConfig(experts=4, top_k=3, renormalize=True),
        activation=Activation(name="swiglu", layout="interleaved"),
    )
    function = planned_jit(lambda model, x: model(x), on_change="raise")
    model = make()
    function(model, inputs(2))
    with pytest.raises(PlanChanged, match=r"model\.config\.router\.top_k and 1 more: got 3, wanted 2") as caught:
        function(moe_jax.nnx.MoE(H, I, other, rngs=nnx.Rngs(0)), inputs(2))
    assert [path for path, _, _ in caught.value.differences][1] == "model.config.activation.layout"
