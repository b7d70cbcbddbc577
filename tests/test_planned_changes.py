"""`planned_jit(on_change="raise")`: what is allowed after failures, at once from threads, and on the only device."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as AxisOrder

from moe_jax import planned_call, planned_jit
from moe_jax.errors import PlanChanged
from planned_steps import counted, on

ROOT = Path(__file__).parent.parent


class Failure(Exception):
    pass


def failing(monkeypatch: pytest.MonkeyPatch, error: type[BaseException] = Failure) -> None:
    """The next compilation fails."""
    make = planned_call.recipe

    def fails(*_):
        monkeypatch.setattr(planned_call, "recipe", make)
        raise error

    monkeypatch.setattr(planned_call, "recipe", fails)


@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt])
@pytest.mark.parametrize("how", ["called", "prepared"])
def test_what_was_allowed_stays_so_when_it_fails_to_compile_again(how, error, monkeypatch):
    """Its program was dropped: planned functions of one Python function share their store."""

    def step(x):
        return x + 1

    function, other = planned_jit(step, on_change="raise"), planned_jit(step)
    (function if how == "called" else function.prepare)(jnp.ones(3))
    other.clear()
    failing(monkeypatch, error)
    with pytest.raises(error):
        function(jnp.ones(3))
    for _ in range(2):
        with pytest.raises(PlanChanged, match=r"got float32\[5\], wanted float32\[3\]"):
            function(jnp.ones(5))
    assert function(jnp.ones(3))[0] == 2


def test_a_first_call_that_fails_allows_nothing_and_a_prepare_that_fails_takes_nothing_back(monkeypatch):
    function = planned_jit(lambda x: x + 1, on_change="raise")
    for make in (function, function.prepare):
        failing(monkeypatch)
        with pytest.raises(Failure):
            make(jnp.ones(3))
    assert function(jnp.ones(4))[0] == 2
    failing(monkeypatch)
    with pytest.raises(Failure):
        function.prepare(jnp.ones(5))
    with pytest.raises(PlanChanged, match=r"got float32\[5\], wanted float32\[4\]"):
        function(jnp.ones(5))
    with pytest.raises(PlanChanged, match=r"got float32\[3\], wanted float32\[4\]"):
        function(jnp.ones(3))
    function.clear()
    assert function(jnp.ones(3))[0] == 2


def test_a_fingerprint_that_another_call_is_compiling_counts_until_that_has_failed(monkeypatch):
    """Two first calls at once: the second waits for the first one's program, and makes it when that fails."""
    inside, leave, lock, results = threading.Event(), threading.Event(), threading.Lock(), []
    make = planned_call.recipe

    def slow(*arguments):
        with lock:
            first = not inside.is_set()
            inside.set()
        if first:
            leave.wait(60)
            raise Failure
        return make(*arguments)

    monkeypatch.setattr(planned_call, "recipe", slow)
    function = planned_jit(lambda x: x + 1, on_change="raise")

    def work(name: str) -> None:
        try:
            function(jnp.ones(3))
            results.append(f"{name} served")
        except Failure:
            results.append(f"{name} failed")

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in ("first", "second")]
    threads[0].start()
    inside.wait(60)
    threads[1].start()
    with pytest.raises(PlanChanged):  # while the first call is not over, it is the only one
        function(jnp.ones(5))
    time.sleep(0.2)
    leave.set()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(results) == ["first failed", "second served"]
    with pytest.raises(PlanChanged, match=r"got float32\[5\], wanted float32\[3\]"):
        function(jnp.ones(5))


TRANSPOSED = Format(AxisOrder((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def test_a_call_that_began_before_clear_allows_nothing_after_it():
    begun, go_on = threading.Event(), threading.Event()

    def step(x):
        if x.shape == (3,):
            begun.set()
            assert go_on.wait(30)
        return x + 1

    planned = planned_jit(step, plan="v1", on_change="raise")
    thread = threading.Thread(target=planned, args=(jnp.ones(3),))
    thread.start()
    assert begun.wait(30)
    planned.clear()
    go_on.set()
    thread.join()
    assert planned(jnp.ones(4)).shape == (4,)
    with pytest.raises(PlanChanged):
        planned(jnp.ones(5))


def test_a_prepared_order_of_axes_counts():
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    usual, transposed = on(0, jnp.asarray(x)), jax.device_put(x, TRANSPOSED)
    function = planned_jit(lambda x: x * 2, on_change="raise")
    key = function.prepare(jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=TRANSPOSED))
    np.testing.assert_array_equal(function(transposed), x * 2)
    with pytest.raises(PlanChanged, match="changed in x order of axes"):
        function(usual)
    assert function.prepare(usual) not in (key, None)
    np.testing.assert_array_equal(function(usual), x * 2)
    counted(2, 2, function)


ONE_DEVICE = """
import jax, jax.numpy as jnp, numpy as np
from moe_jax import planned_jit
from moe_jax.errors import PlanChanged
(device,) = jax.devices()
bound, unbound = jax.device_put(jnp.ones(3), device), jnp.ones(3)
struct = jax.ShapeDtypeStruct((3,), jnp.float32)
bound_struct = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
assert bound.committed and not unbound.committed
arrays, everything = [bound, unbound, np.ones(3, np.float32)], [bound, unbound, struct, bound_struct]
keys = set()
for first in everything:
    for use in ("call", "prepare"):
        if use == "call" and first in (struct, bound_struct):
            continue
        step = planned_jit(lambda x: x + 1, on_change="raise")
        keys.add(step.prepare(first) if use == "prepare" else step(first) is None or step.prepare(first))
        for x in arrays:
            assert step(x)[0] == 2
        keys |= {step.prepare(x) for x in everything}
        assert step.stats().plan_compiles == 1 and step.stats().refused == 0, step.compilations()
assert len(keys) == 1
try:
    step(jnp.ones(5))
except PlanChanged as error:
    print(error)
# A sharding of another kind is another fingerprint, in the key and in the quick comparison alike.
mesh = jax.make_mesh((1,), ("d",))
named = jax.device_put(jnp.ones(3), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
step = planned_jit(lambda x: x + 1)
for x in (bound, named, unbound, named):
    step(x)
assert (step.stats().plan_compiles, step.stats().plan_reuses) == (2, 2)
"""


def one_device(code: str) -> str:
    flags = " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_on_the_only_device_it_does_not_count_whether_an_array_is_bound_to_it():
    said = one_device(ONE_DEVICE)
    assert "program fingerprint changed in x: got float32[5], wanted float32[3]" in said


def test_where_there_are_others_it_counts_whether_an_array_is_bound():
    function = planned_jit(lambda x: x + 1, on_change="raise")
    function.prepare(jnp.ones(3))
    with pytest.raises(PlanChanged, match="changed in x device"):
        function(on(0, jnp.ones(3)))
