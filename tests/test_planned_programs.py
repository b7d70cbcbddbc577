"""Programs of `planned_jit`: bounds, threads, devices, processes, and everything else in the process."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_layers import inputs, make
from moe_jax import planned, planned_jit
from moe_jax.errors import InvalidArgument
from planned_steps import Plan, Scale, counted, on

ROOT = Path(__file__).parent.parent


def test_within_other_transformations_the_function_is_part_of_them():
    model, x = Scale(), inputs(2, 3)

    def apply(model, x):
        return jnp.sum(jnp.square(model(x)))

    function = planned_jit(apply, plan=Plan(), donate=["x"], on_change="raise")
    wanted = apply(model, x)
    np.testing.assert_allclose(jax.jit(function)(model, x), wanted, rtol=1e-5)
    np.testing.assert_allclose(nnx.jit(function)(model, x), wanted, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda x: function(model, x))(x), jax.grad(lambda x: apply(model, x))(x))
    grads, want = nnx.grad(function)(model, x), nnx.grad(apply)(model, x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), grads, want)
    np.testing.assert_allclose(jnp.sum(jax.vmap(lambda x: function(model, x))(x)), wanted, rtol=1e-5)
    assert jax.jit(lambda: function(model, x))().shape == ()  # nothing traced among the arguments, but a trace around
    with jax.disable_jit():
        np.testing.assert_allclose(function(model, x), wanted, rtol=1e-5)
    stats = function.stats()
    assert stats.traced == 7 and stats.plan_calls == 0 and not x.is_deleted()
    assert function.explain_last().action == "traced"


def test_traced_values_count_in_the_program_around():
    function = planned_jit(lambda x, n: x * n, static=["n"])
    outer = jax.jit(lambda x: function(x, 2) + function(x, 3))
    np.testing.assert_array_equal(outer(jnp.ones(2)), np.full(2, 5.0))
    assert function.stats().traced == 2


def test_C71_one_and_4096_rows_with_equal_plans():
    model = make()

    def both(model, one, many):
        return model(one), model(many)

    single, double = planned_jit(lambda model, x: model(x), plan=Plan()), planned_jit(both, plan=Plan())
    one, many = inputs(1), inputs(4096)
    other = planned_jit(lambda x: x + 1)
    for _ in range(2):
        apart, together = (single(model, one), single(model, many)), double(model, one, many)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), apart, together)
        np.testing.assert_allclose(apart[1][:1], apart[0], rtol=1e-4, atol=1e-5)  # the same first row
        other(one)  # a compilation in between
    counted(2, 2, single)
    counted(1, 1, double)


def test_C72_threads_with_two_plans_compile_each_once_and_get_right_results():
    traces = []

    def step(x, k):
        traces.append(k)
        return x * k

    plans, wrong, start = (2, 3), [], threading.Barrier(4)
    functions = [planned_jit(step, plan=lambda x, k: {"k": k}, static=["k"]) for _ in range(2)]

    def work(index):
        function, x = functions[index % 2], jnp.full(4, float(index))
        start.wait()
        for call in range(200):
            k = plans[(call + index) % 2]
            if not bool((function(x, k) == index * k).all()):
                wrong.append((index, call))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and sorted(traces) == [2, 3]
    stats = [function.stats() for function in functions]
    assert sum(each.plan_compiles for each in stats) == 2
    assert sum(each.plan_calls for each in stats) == 800


def test_C73_results_lie_where_the_arguments_lie_and_mixed_devices_are_refused():
    model = make()
    state = jax.device_put(nnx.state(model), jax.devices()[1])
    nnx.update(model, state)
    function = planned_jit(lambda model, cache, x: (model(x), cache))
    for _ in range(2):  # an uncommitted argument follows the others
        result = function(model, on(1, jnp.zeros(2)), inputs(3))
        assert {device for leaf in result for device in leaf.devices()} == {jax.devices()[1]}
    counted(1, 1, function)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="arguments on different devices") as caught:
            function(model, on(2, jnp.zeros(2)), inputs(3))
        assert str(caught.value.got).startswith("cache on cpu:2, model.") and "on cpu:1" in str(caught.value.got)
    counted(1, 1, function)


def test_C61_programs_are_bounded_dropped_ones_compile_again_and_clear_frees(monkeypatch):
    def live() -> int:
        gc.collect()
        return len(jax.devices()[0].client.live_executables())

    def step(x):
        return x + 1

    monkeypatch.setattr(planned, "_PROGRAMS", 4)
    arrays = [np.zeros(size, np.float32) for size in range(1, 21)]
    before = live()
    function = planned_jit(step)
    for x in arrays:
        function(x)
    assert function.stats().programs == 4 and live() - before == 4
    np.testing.assert_array_equal(function(arrays[0]), np.ones(1))
    counted(21, 0, function)
    planned_jit(step)(arrays[0])
    again = planned_jit(step)
    again(arrays[0])  # the other's programs are its own too, and go with them
    function.clear()
    assert live() == before and function.stats().plan_calls == 0 and function.stats().programs == 0
    assert function.explain_last().action == "none"
    function(arrays[0])
    counted(1, 0, function)


def test_a_program_called_again_and_again_outlives_the_others(monkeypatch):
    monkeypatch.setattr(planned, "_PROGRAMS", 3)
    function = planned_jit(lambda x: x + 1)
    arrays = [np.zeros(size, np.float32) for size in range(1, 21)]
    for x in arrays:
        function(x)
        function(arrays[0])
    counted(20, 20, function)


def test_nobody_elses_programs_options_or_environment_are_touched(monkeypatch):
    traces, given, compile_ = [], [], jax.stages.Lowered.compile

    def spy(self, compiler_options=None, **more):
        given.append(compiler_options)
        return compile_(self, compiler_options, **more)

    @jax.jit
    def users(x):
        traces.append(x.shape)
        return x * 3

    @nnx.jit
    def users_nnx(model, x):
        traces.append("nnx")
        return model(x)

    names = [name for name in dir(jax.config) if name.startswith("jax_")]

    def config():
        return {name: getattr(jax.config, name) for name in names}

    model = Scale()
    x = inputs(2)
    users(x)
    users_nnx(model, x)
    environment, options, before = dict(os.environ), config(), list(traces)
    monkeypatch.setattr(jax.stages.Lowered, "compile", spy)
    function = planned_jit(lambda model, x: model(x), plan=Plan(), command_buffers=True)
    for rows in (1, 2, 3, 2):
        function(model, inputs(rows))
    function.clear()
    assert given == [None] * 3  # on a CPU there is nothing to ask for
    ours = len(given)
    users(x)
    users_nnx(model, x)
    assert traces == before and len(given) == ours
    assert dict(os.environ) == environment and config() == options


FINGERPRINT = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
import moe_jax
from flax_layers import CONFIG, make
x = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
step = moe_jax.planned_jit(lambda model, x, how: model(x), plan={"moe": CONFIG, "b": {"x", "y", "z"}}, static=["how"])
model = make()
print(step.prepare(model, x, {"b": 1, "a": (2,)}))
print(np.asarray(step(model, x, {"a": (2,), "b": 1})).tobytes().hex())
assert step.stats().plan_reuses == 1
"""


def test_C68_fingerprint_and_bits_are_equal_in_another_process():
    def start(seed: str) -> subprocess.Popen:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", FINGERPRINT]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    first, second = (process.communicate(timeout=120)[0].split() for process in [start("1"), start("2")])
    assert len(first) == 2 and len(first[0]) == 64 and first == second


def test_a_compilation_that_fails_leaves_nothing_behind():
    fail = True

    def step(x):
        if fail:
            raise RuntimeError("no")
        return x

    function = planned_jit(step, on_change="raise")
    for size in (1, 2):  # another fingerprint is not refused for one that never was
        with pytest.raises(RuntimeError, match="no"):
            function(jnp.ones(size))
        assert function.stats().programs == 0
    fail = False
    function(jnp.ones(3))
    counted(1, 0, function)


@contextlib.contextmanager
def traced_by_another():
    """Another thread stands in the middle of a trace."""
    inside, leave = threading.Event(), threading.Event()

    def body(x):
        inside.set()
        leave.wait()
        return x

    thread = threading.Thread(target=lambda: jax.jit(body)(1.0))
    thread.start()
    inside.wait()
    yield
    leave.set()
    thread.join()


def test_a_trace_in_another_thread_does_not_matter():
    function = planned_jit(lambda x: x + 1)
    with traced_by_another():
        assert function(1.0) == 2
    counted(1, 0, function)
