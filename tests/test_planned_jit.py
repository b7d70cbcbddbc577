"""`planned_jit`: equal plans reuse, changed ones are refused with a reason, and results equal the function's own."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as AxisOrder

from flax_layers import CONFIG, H, inputs
from moe_jax import planned_jit
from moe_jax.errors import InvalidArgument, MoeJaxError, PlanChanged
from planned_steps import Plan, Scale, counted, on


def test_C63_equal_plans_built_anew_compile_once():
    x = inputs(3)

    def step(x, sizes):
        return x * sizes[0]

    functions = set()
    for _ in range(50):
        plan = {"moe": dataclasses.replace(CONFIG), "plan": Plan(), "tiles": [4, 128], "banks": {"up", "down"}}
        function = planned_jit(step, plan=plan, static=["sizes"])
        functions.add(function)
        np.testing.assert_array_equal(function(x, [2, 3]), x * 2)
    assert sum(each.stats().plan_compiles for each in functions) == 1
    assert function.stats().plan_reuses == 1 and str(function.explain_last()) == "reused: the fingerprint is equal"
    by_arguments = planned_jit(step, plan=lambda x, sizes: {"plan": Plan(), "rows": [x.shape[0]]}, static=["sizes"])
    for _ in range(50):
        by_arguments(x, [2, 3])
    counted(1, 49, by_arguments)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Plan)])
def test_a_changed_field_of_the_plan_is_refused_and_named(field):
    other = {
        "dtype": jnp.bfloat16,
        "layout": "interleaved",
        "variant": "split",
        "slots": 16,
        "k": 4,
        "capability": (8, 0),
    }[field]
    now = Plan()
    traces = []

    def step(x):
        traces.append(now)
        return x + now.k

    for on_change in ("recompile", "raise"):
        now = Plan()
        function = planned_jit(step, plan=lambda x: now, on_change=on_change)  # noqa: B023 (it is meant to change)
        function.clear()
        x = jnp.ones(3)
        assert function(x)[0] == 3
        now = dataclasses.replace(now, **{field: other})
        path = f"plan.{field}" + ("[0]" if field == "capability" else "")
        if on_change == "recompile":
            assert function(x)[0] == 1 + now.k
            assert function.explain_last().action == "compiled"
            assert [each.path for each in function.explain_last().differences] == [path]
            counted(2, 0, function)
        else:
            with pytest.raises(PlanChanged) as caught:
                function(x)
            error = caught.value
            assert path in str(error) and error.where == "planned_jit(step)" and isinstance(error, MoeJaxError)
            assert error.differences == ((path, error.wanted, error.got),) and error.wanted != error.got
            assert function.explain_last().action == "refused"
            assert (function.stats().refused, function.stats().plan_compiles) == (1, 1)
            assert dict(function.stats().reasons) == {path: 1}
            now = Plan()
            assert function(x)[0] == 3
            counted(1, 1, function)
    assert len(traces) == 3


def in_two() -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(jax.make_mesh((2,), ("d",)), jax.sharding.PartitionSpec("d"))


TRANSPOSED = Format(AxisOrder((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
X = np.arange(12, dtype=np.float32).reshape(4, 3)
CHANGES = {
    "shape": (lambda: jnp.asarray(X[:2]), "x"),
    "dtype": (lambda: jnp.asarray(X, jnp.bfloat16), "x"),
    "weak type": (lambda: jnp.full((4, 3), 2.0), "x"),
    "committed": (lambda: on(0, jnp.asarray(X)), "x device"),
    "device": (lambda: on(1, jnp.asarray(X)), "x device"),
    "sharding": (lambda: jax.device_put(X, in_two()), "x device"),
    "order of axes": (lambda: jax.device_put(X, TRANSPOSED), "x order of axes"),
    "structure": (lambda: {"a": jnp.asarray(X)}, "structure of the arguments"),
    "a number": (lambda: 2.5, "x"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_an_argument_compiles_its_own_program(change):
    make_other, path = CHANGES[change]
    other = make_other()

    def step(x):
        return jax.tree.map(lambda leaf: leaf * 2 + 1, x)

    function = planned_jit(step)
    first = jnp.asarray(X)
    for _ in range(3):
        np.testing.assert_array_equal(function(first), X * 2 + 1)
        result, wanted = function(other), jax.jit(step)(other)
        assert jax.tree.structure(result) == jax.tree.structure(wanted)
        for got, want in zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(got, want)
            assert got.sharding == want.sharding and got.dtype == want.dtype and got.weak_type == want.weak_type
            assert got.committed == want.committed
    counted(2, 4, function)
    assert path in [each.path for each in function.compilations()[1].differences]


def test_two_orders_of_axes_have_two_programs():
    """Equal in shape, dtype, device and everything else."""
    function = planned_jit(lambda x: x * 2)
    usual, transposed = on(0, jnp.asarray(X)), jax.device_put(X, TRANSPOSED)
    assert usual.aval is transposed.aval and usual.sharding == transposed.sharding
    for x in (usual, usual, transposed, transposed, usual, transposed):
        np.testing.assert_array_equal(function(x), X * 2)
    counted(2, 4, function)


def test_numbers_and_numpy_arrays_are_arguments_too():
    function = planned_jit(lambda a, b, c: (a * b, c))
    for value in (2.0, 3.0):
        result = function(jnp.ones(3), value, np.arange(4, dtype=np.float32))
        np.testing.assert_array_equal(result[0], np.full(3, value))
        np.testing.assert_array_equal(result[1], np.arange(4))
    counted(1, 1, function)
    function(jnp.ones(3), 2.0, jnp.arange(4, dtype=jnp.float32))  # the same program serves JAX's own arrays
    counted(1, 2, function)
    function(jnp.ones(3), np.float32(2), np.arange(4, dtype=np.float32))  # but a number of NumPy has a strong type
    counted(2, 2, function)
    for argument, name in (("text", r"a\[0\]"), (object(), r"a\[0\]")):
        with pytest.raises(InvalidArgument, match=rf": {name}: argument: got a builtins\.\w+, wanted arrays"):
            planned_jit(lambda a: 1)([argument])


def test_random_keys_are_arguments():
    function = planned_jit(lambda key: jax.random.uniform(key))
    values = {float(function(jax.random.key(seed))) for seed in range(3)}
    assert len(values) == 3
    counted(1, 2, function)


OPTIONS = {
    "jax_enable_x64": lambda: jax.enable_x64(True),
    "jax_default_matmul_precision": lambda: jax.default_matmul_precision("highest"),
    "jax_numpy_dtype_promotion": lambda: jax.numpy_dtype_promotion("standard"),
    "jax_numpy_rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "jax_default_device": lambda: jax.default_device(jax.devices()[1]),
    "jax_default_prng_impl": lambda: jax.default_prng_impl("rbg"),
    "jax_threefry_partitionable": lambda: jax.threefry_partitionable(False),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_jax_are_part_of_the_fingerprint(option):
    function = planned_jit(lambda x: x @ x)
    x = on(0, jnp.eye(2))
    function(x)
    with OPTIONS[option]():
        function(x)
        function(x)
    function(x)
    counted(2, 2, function)
    assert f"jax.config['{option}']" in [each.path for each in function.compilations()[1].differences]


def test_static_values_count_by_content_and_type():
    traces = []

    def step(x, how, scale=1):
        traces.append((how, scale))
        return x * float(scale)

    function = planned_jit(step, static=["how", 2])
    x = jnp.ones(2)
    how = {"sizes": [1, 2]}
    function(x, how, 2)
    function(x, {"sizes": [1, 2]}, 2)
    function(x, how, 2)
    counted(1, 2, function)
    how["sizes"].append(3)
    function(x, how, 2)  # changed in place
    assert function.explain_last().reason == "how['sizes'][2] was absent, is 3"
    function(x, how, 2.0)
    assert function.explain_last().reason == "scale was 2, is 2.0"
    assert function(x, how, True)[0] == 1
    assert len(traces) == 4
    function(x, how=how, scale=True)  # by name: another program, as for jax.jit
    counted(5, 2, function)


def test_C63_static_values_without_equality_are_refused():
    class Options:
        pass

    function = planned_jit(lambda x, options, f: f(x), static=["options", "f"])
    with pytest.raises(InvalidArgument, match=r"options: a static value without equality: got a .*Options, wanted"):
        function(jnp.ones(1), Options(), jnp.sin)
    assert function(jnp.zeros(1), None, jnp.cos)[0] == 1
    assert function(jnp.zeros(1), None, jnp.sin)[0] == 0
    assert "f was jax.numpy.cos" in function.explain_last().reason


def test_plans_without_content_are_refused():
    for plan, place in ((object(), "plan"), ({"x": [object()]}, "plan['x'][0]")):
        with pytest.raises(InvalidArgument) as caught:
            planned_jit(lambda x: x, plan=plan)
        assert str(caught.value).startswith(f"planned_jit(<lambda>): {place}: got a builtins.object")
    function = planned_jit(lambda x: x, plan=lambda x: {"x": jnp.ones(1)})
    with pytest.raises(InvalidArgument, match=r"planned_jit\(<lambda>\): plan\['x'\]: .* got a jaxlib"):
        function(1)
    assert planned_jit(lambda x: x, plan=jnp.bfloat16)(1) == 1  # a class, which could be called, is content


def test_an_array_that_was_donated_before_is_named():
    function = planned_jit(lambda cache, x: ({"k": cache["k"] + x}, x), donate=["cache"])
    cache, x = {"k": jnp.ones(3), "v": jnp.ones(3)}, jnp.ones(3)
    function(cache, x)
    for _ in range(2):  # a program that the last call used, and one that has to be made
        with pytest.raises(InvalidArgument, match=r"<lambda>\): cache\['k'\].*: got a deleted array"):
            function(cache, x)
        function.clear()
    np.testing.assert_array_equal(function({"k": jnp.ones(3), "v": jnp.ones(3)}, x)[0]["k"], 2 * np.ones(3))


def test_a_plan_is_what_it_was_when_the_function_was_planned():
    plan = {"slots": [8]}
    function = planned_jit(lambda x: x + 1, plan=plan)
    function(1)
    plan["slots"].append(9)
    function(1)
    counted(1, 1, function)
    function(1.0)
    assert [each.path for each in function.explain_last().differences] == ["x"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"donate": ["y"]}, "donate: got 'y', wanted names or numbers of arguments"),
        ({"static": [-1]}, "static: got -1"),
        ({"static": "x"}, "planned_jit: static: got 'x', wanted a list"),
        ({"donate": ["x"], "static": [0]}, r"both static and donated: got \['x'\]"),
        ({"on_change": "ask"}, "on_change: got 'ask', wanted 'recompile' or 'raise'"),
        ({"donate": None}, "planned_jit: donate: got None, wanted a list"),
        ({"static": 1.5}, "planned_jit: static: got 1.5"),
        ({"donate": b"x"}, "planned_jit: donate: got b'x'"),
        ({"donate": [7]}, "donate: got 7, wanted names or numbers of arguments"),
        ({"command_buffers": "yes"}, "command_buffers: got 'yes', wanted True or False"),
        ({"command_buffers": 1}, "command_buffers: got 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(InvalidArgument, match=message):
        planned_jit(lambda x: x, **options)
    with pytest.raises(InvalidArgument, match="fn: got a int, wanted a function"):
        planned_jit(1)


def test_prepare_allows_programs_without_running_them():
    ran = []

    def step(model, x):
        jax.debug.callback(lambda: ran.append(1))
        return model(x)

    model = Scale()
    function = planned_jit(step, plan=Plan(), on_change="raise")
    shapes = [jax.ShapeDtypeStruct((rows, H), jnp.float32) for rows in (1, 4)]
    keys = [function.prepare(model, shape) for shape in shapes]
    assert len(set(keys)) == 2 and ran == []
    for rows in (1, 4, 1):
        np.testing.assert_array_equal(function(model, inputs(rows)), model(inputs(rows)))
    jax.effects_barrier()
    assert len(ran) == 3
    counted(2, 3, function)
    with pytest.raises(PlanChanged, match=r"changed in x: got float32\[2, 8\], wanted float32\[1, 8\]"):
        function(model, inputs(2))
    assert function.prepare(model, shapes[0]) == keys[0]


def test_a_refused_call_donates_nothing():
    function = planned_jit(lambda x: x + 1, donate=["x"], on_change="raise")
    x, y = jnp.zeros(3), jnp.zeros(4)
    function(x)
    assert x.is_deleted()
    with pytest.raises(PlanChanged):
        function(y)
    assert not y.is_deleted() and float(y[0]) == 0


def test_errors_of_a_refusal_cross_processes():
    import pickle

    error = PlanChanged("changed", where="here", got=1, wanted=2, differences=[("plan.k", "2", "1")])
    assert pickle.loads(pickle.dumps(error)).differences == error.differences


def test_donation_of_arrays_and_containers():
    function = planned_jit(lambda a, cache, b: (a + b, jax.tree.map(lambda x: x + 1, cache)), donate=["cache"])
    a, b, cache = jnp.ones(3), jnp.ones(3), {"k": jnp.zeros(3), "v": [jnp.ones(2)]}
    leaves = jax.tree.leaves(cache)
    for _ in range(3):
        result, cache = function(a, cache, b)
    assert all(leaf.is_deleted() for leaf in leaves) and not a.is_deleted() and not b.is_deleted()
    np.testing.assert_array_equal(cache["k"], np.full(3, 3.0))
    np.testing.assert_array_equal(result, np.full(3, 2.0))
    counted(1, 2, function)
