"""What the engine's steps are (direct, captured, replayed) and that none is stale."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import (
    COUNT,
    MAIN,
    OPTIONS,
    PROMPTS,
    ending_with,
    expected,
    kinds,
    last,
    other_model,
    step_loses_the_context,
    take,
    turned_model,
)
from flax import nnx

from moe_jax.cache import NotReplayed, SimulatedRuntime, StoreUnusable, decision
from moe_jax.cache.store import estimated_bytes
from moe_jax.engine import Engine, ending
from moe_jax.errors import CannotServe, InvalidArgument
from moe_jax.pallas_kernels.errors import CudaError
from moe_jax.testing import assert_replay_equals_direct
from tiny_models import tiny_model


@pytest.fixture
def engine(engine_for) -> Engine:
    engine = engine_for(tiny_model(MAIN), **OPTIONS)
    engine.warmup()
    return engine


def test_calls_are_direct_then_capture_then_replays(engine_for):
    engine = engine_for(tiny_model(MAIN), **OPTIONS)
    (number,) = engine.prefill([PROMPTS[0]])
    new: dict[int, list[int]] = {}
    seen = []
    for _ in range(5):
        take(engine, new, 1)
        seen.append((last(engine).kind, last(engine).handle))
    assert [kind for kind, _ in seen] == ["direct", "capture", "replay", "replay", "replay"]
    assert len({handle for _, handle in seen[1:]}) == 1
    assert new[number] == expected()[0][:5]
    assert engine.explain_last_step() == "replay: 1 rows in a bucket of 1"


def test_after_warmup_steps_are_replays_and_nothing_is_compiled_or_loaded(engine, compiles):
    stats = engine.stats()
    assert (stats["captures"], stats["graphs"], stats["replays"]) == (3, 3, 0)
    loads, new = engine.runtime.calls["load"], {}
    engine.prefill(PROMPTS[:4])
    take(engine, new, COUNT)
    assert list(new.values()) == expected()[:4]
    assert engine.stats()["replays"] == COUNT
    assert engine.runtime.calls["load"] == loads and not compiles


@pytest.mark.parametrize("mode", ["simulate", "strict"])
def test_the_least_bounds_that_are_taken_hold_a_graph_of_every_bucket(engine_for, mode):
    """One less of either is refused: then `warmup` would evict what it has captured itself."""
    steps = engine_for(tiny_model(MAIN), **OPTIONS)._steps.decode.values()
    least = {"max_entries": len(steps), "max_bytes": sum(map(estimated_bytes, steps))}
    options: dict[str, Any] = {**OPTIONS, "graphs": mode, "runtime": SimulatedRuntime(1 << 25)}
    for name, value in least.items():
        with pytest.raises(InvalidArgument, match=f"{name}: got {value - 1}, wanted at least {value}, a graph for"):
            engine_for(tiny_model(MAIN), **options, **{name: value - 1})
    engine = engine_for(tiny_model(MAIN), **options, **least)
    engine.warmup()
    for prompt in PROMPTS[:4]:
        engine.prefill([prompt])
        assert kinds(engine, 1) == ["replay"]
    assert not engine.stats()["evictions"]


def test_warmup_touches_no_sequence(engine_for):
    engine = engine_for(tiny_model(MAIN), **OPTIONS)
    new: dict[int, list[int]] = {}
    engine.prefill(PROMPTS[:4])
    take(engine, new, 3)
    engine.warmup()
    take(engine, new, COUNT - 3)
    assert list(new.values()) == expected()[:4]


def test_replay_equals_direct_at_every_bucket(engine):
    assert assert_replay_equals_direct(engine, PROMPTS[:4]) == 4 + 3
    assert engine.stats()["sequences"] == 0


def test_replay_equals_direct_finds_a_stale_replay(engine, monkeypatch):
    """A test of the test: with the fourth check broken, weights that moved are read where they were."""
    monkeypatch.setattr(decision, "check_resources", lambda held, table: None)
    monkeypatch.setattr("moe_jax.cache.graphs.check_resources", lambda held, table: None)
    for name in ("0.qkv", "0.down"):
        engine.memory.bind_weights({name: jnp.asarray(engine.memory.read(name)[..., ::-1])})
    with pytest.raises(AssertionError, match=r"1 rows in a bucket of 1"):
        assert_replay_equals_direct(engine, PROMPTS[:1])


def test_replay_equals_direct_wants_replays(engine_for):
    engine = engine_for(tiny_model(MAIN), **OPTIONS, graphs="off", runtime=SimulatedRuntime(1 << 25))
    with pytest.raises(AssertionError, match="graphs off"):
        assert_replay_equals_direct(engine, PROMPTS[:1])


def test_C42_results_of_earlier_steps_stay(engine):
    engine.prefill(PROMPTS[:3])
    kept = [(engine.step(), engine.memory.read("logits")) for _ in range(4)]
    copies = [(dict(tokens), logits.copy()) for tokens, logits in kept]
    for _ in range(3):
        engine.step()
    for (tokens, logits), (then, before) in zip(kept, copies, strict=True):
        assert tokens == then
        np.testing.assert_array_equal(logits.view(np.uint8), before.view(np.uint8))
    # Each result was fed back as the next input, on the device.
    assert [[tokens[i] for tokens, _ in kept] for i in range(3)] == [row[:4] for row in expected()[:3]]


def test_C43_new_weights_in_storage_that_stays_count_at_once(engine_for):
    engine = engine_for(tiny_model(MAIN), **OPTIONS, weights="owned")
    engine.warmup()
    engine.prefill(PROMPTS[:2])
    engine.step()
    handle = last(engine).handle
    engine.update_weights(other_model())
    # Keys and values of the old weights are not computed anew, so these sequences go.
    for number in engine.live:
        engine.release(number)
    new: dict[int, list[int]] = {}
    engine.prefill(PROMPTS[:2])
    take(engine, new, COUNT)
    assert (last(engine).kind, last(engine).handle) == ("replay", handle)
    assert list(new.values()) == expected(other=True)[:2]
    engine.update_weights()
    assert engine.generate(PROMPTS, max_new_tokens=COUNT).tolist() == expected()


def test_C43_moved_weights_are_read_where_they_are(engine):
    (number,) = engine.prefill([PROMPTS[1]])
    engine.update_weights({name: jnp.zeros(shape, dtype) for name, dtype, shape in engine._geometry.weights})
    engine.update_weights()
    new: dict[int, list[int]] = {}
    take(engine, new, 1)
    assert last(engine).reason == "weights moved" and "weights moved" in engine.explain_last_step()
    take(engine, new, 1)
    assert last(engine).kind == "capture"
    take(engine, new, 1)
    assert last(engine).kind == "replay"
    assert new[number] == expected()[1][:3]


def test_arrays_of_the_user_are_not_under_the_graphs(engine_for):
    model = turned_model()
    engine = engine_for(model, **OPTIONS)
    for array in jax.tree.leaves(nnx.state(model.module)):
        array.delete()
    new: dict[int, list[int]] = {}
    engine.prefill(PROMPTS[:4])
    take(engine, new, COUNT)
    assert list(new.values()) == expected(other=True)[:4]


def test_C46_scratch_lives_as_long_as_the_graphs(engine):
    """Other sizes and large allocations between the replays of a bucket; freed memory is poisoned and used again."""
    new: dict[int, list[int]] = {}
    (number,) = engine.prefill([PROMPTS[0]])
    for turn in range(6):
        take(engine, new, 1)
        _, block = engine.runtime.allocate(1 << 20)
        others = engine.prefill(PROMPTS[1 : 2 + turn % 3])
        engine._step(tuple(others))
        del block
        for other in others:
            engine.release(other)
    assert new[number] == expected()[0][:6]


def test_C60_every_number_of_sequences_is_a_replay_up_to_the_declared_most(engine):
    used = []
    for prompt in PROMPTS[:4]:
        engine.prefill([prompt])
        engine.step()
        assert last(engine).kind == "replay"
        used.append(engine.explain_last_step().removeprefix("replay: "))
    assert used == [f"{rows} rows in a bucket of {bucket}" for rows, bucket in ((1, 1), (2, 2), (3, 4), (4, 4))]
    with pytest.raises(CannotServe, match="wanted at most 0 and 0"):
        engine.prefill([[1]])


@pytest.mark.parametrize("most", [7, 12, 20, 64])
def test_C60_the_declared_most_has_a_bucket(engine_for, most):
    engine = engine_for(tiny_model(MAIN), **{**OPTIONS, "max_sequences": most})
    assert engine.decode_buckets[-1] == most and set(engine._steps.decode) == set(engine.decode_buckets)


def test_a_prompt_between_decodes_leaves_the_capture(engine):
    new: dict[int, list[int]] = {}
    (first,) = engine.prefill([PROMPTS[0]])
    take(engine, new, 1)
    handle, captures = last(engine).handle, engine.stats()["captures"]
    (number,) = engine.prefill([PROMPTS[4]])
    assert last(engine).kind == "direct" and last(engine).reason == "prompt"
    engine.release(number)
    # The same rows as before the prompt, which had the device's rows for itself.
    take(engine, new, 1)
    assert new[first] == expected()[0][:2]
    assert (last(engine).kind, last(engine).handle) == ("replay", handle)
    assert engine.stats()["captures"] == captures
    assert engine.stats()["transitions"] == 4


def test_a_replaced_manifest_sweeps_every_graph(engine):
    (number,) = engine.prefill([PROMPTS[0]])
    new: dict[int, list[int]] = {}
    take(engine, new, 1)
    engine.registry.accept(engine.registry.manifest("main")[0])
    seen = []
    for _ in range(3):
        take(engine, new, 1)
        seen.append(last(engine).kind)
    assert seen == ["direct", "capture", "replay"]
    assert engine.stats()["swept"] >= 3
    assert new[number] == expected()[0][:4]


def test_rows_4_3_2_1_4_keep_the_graph_of_four(engine):
    numbers = engine.prefill(PROMPTS[:4])
    engine.step()
    handle = last(engine).handle
    for number in numbers[:3]:
        engine.release(number)
        assert kinds(engine, 1) == ["replay"]
    engine.prefill(PROMPTS[:3])
    engine.step()
    assert (last(engine).kind, last(engine).handle) == ("replay", handle)


@pytest.mark.parametrize("call", ["launch_graph", "record_event"])
def test_a_failing_graph_costs_no_token(engine, call):
    (number,) = engine.prefill([PROMPTS[0]])
    new: dict[int, list[int]] = {}
    take(engine, new, 1)
    engine.runtime.fail(call)
    take(engine, new, 4)
    assert last(engine).kind == "replay"
    assert new[number] == expected()[0][:5]


def test_a_step_that_failed_is_made_again(engine):
    numbers = engine.prefill(PROMPTS[:3], max_new_tokens=3)
    new: dict[int, list[int]] = {}
    for _ in range(3):
        engine.runtime.fail("read")
        with pytest.raises(CudaError):
            engine.step()
        assert engine.explain_last_step().startswith("failed: ")
        take(engine, new, 1)
    assert engine.live == ()
    assert [new[number] for number in numbers] == [row[:3] for row in expected()[:3]]


@pytest.mark.parametrize("after", range(4))
def test_a_prompt_that_failed_leaves_nothing(engine, after):
    engine.runtime.fail("write", after=after)
    with pytest.raises(CudaError):
        engine.prefill(PROMPTS[:4])
    engine.runtime.heal()
    stats = engine.stats()
    assert (stats["sequences"], stats["free_sequences"], stats["free_pages"]) == (0, 4, 32)
    assert engine.generate(PROMPTS, max_new_tokens=COUNT).tolist() == expected()


def test_a_lost_context_ends_the_engine_and_it_says_so(engine):
    engine.prefill(PROMPTS[:1])
    engine.runtime.fail("execute")
    step_loses_the_context(engine)


def test_strict_refuses_what_is_no_replay(engine_for):
    engine = engine_for(tiny_model(MAIN), **OPTIONS, graphs="strict", runtime=SimulatedRuntime(1 << 25))
    engine.prefill(PROMPTS[:2])
    with pytest.raises(NotReplayed, match="first call"):
        engine.step()
    engine.warmup()
    new: dict[int, list[int]] = {}
    take(engine, new, 2)
    assert list(new.values()) == [row[:2] for row in expected()[:2]]


def test_off_is_direct_always(engine_for):
    engine = engine_for(tiny_model(MAIN), **OPTIONS, graphs="off", runtime=SimulatedRuntime(1 << 25))
    engine.warmup()
    assert engine.generate(PROMPTS, max_new_tokens=COUNT).tolist() == expected()
    stats = engine.stats()
    assert stats["direct"] == stats["steps"] and stats["graphs"] == 0


def test_close_gives_everything_back():
    runtime = SimulatedRuntime(1 << 25)
    engine = Engine(tiny_model(MAIN), **OPTIONS, graphs="simulate", runtime=runtime)
    engine.warmup()
    engine.prefill(PROMPTS[:4])
    engine.step()
    assert runtime.executables and runtime.space.bytes
    with engine:
        engine.step()
    engine.close()
    assert not runtime.executables and not runtime.graphs and runtime.space.bytes == 0
    assert engine.stats()["state"] == "closed"
    for call in (engine.step, engine.warmup, lambda: engine.prefill([[1]]), lambda: engine.release(0)):
        with pytest.raises(StoreUnusable, match="closed"):
            call()


@pytest.mark.parametrize("weights", ["held", "owned"])
def test_a_step_that_ended_a_row_but_could_not_be_read_has_not_happened(engine_for, weights):
    """Made again with other weights, it draws another token, and the row goes on."""
    probe = engine_for(tiny_model(MAIN), **OPTIONS)
    (number,) = probe.prefill([PROMPTS[0]])
    model, found = ending_with(probe.step()[number]), []
    for fails in (False, True):
        engine = engine_for(model, **OPTIONS, weights=weights)
        (number,) = engine.prefill([PROMPTS[0]])
        if fails:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine.runtime, "read", unreadable(engine.runtime))
                with pytest.raises(CudaError):
                    engine.step()
        engine.update_weights(other_model().module)
        found.append([engine.step()[number] for _ in range(4)])
    assert found[0] == found[1] and -1 not in found[0]


def unreadable(runtime: SimulatedRuntime):
    """Everything that is queued runs, and then cannot be read."""

    def read(address, dtype, shape, stream):
        runtime.synchronize(stream)
        raise CudaError("call failed", where="read", got="CUDA_ERROR_UNKNOWN", wanted="success")

    return read


LEFT_OPEN = """
import atexit
seen = []
atexit.register(lambda: print("state:", seen[0].stats()["state"]))
import moe_jax
from tiny_models import tiny_model
engine = moe_jax.Engine(tiny_model("olmoe"), max_sequences=1, max_tokens=16, chunk=1, graphs="simulate")
seen.append(engine)
engine.warmup()
assert engine.stats()["graphs"] == 1
"""


def test_an_engine_left_open_is_closed_at_the_end_of_the_process():
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, (tests.parent, tests)))
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "state: closed"), done.stderr


def test_an_engine_that_does_not_close_at_exit_keeps_no_other_open():
    closed = []

    class Stub:
        def __init__(self, name: str, error: BaseException | None = None):
            self.name, self.error, self.lock = name, error, threading.RLock()

        def close(self) -> None:
            if self.error is not None:
                raise self.error
            closed.append(self.name)

    lost = CudaError("call failed", where="close", got="CUDA_ERROR_UNKNOWN", wanted="success")
    left = [
        Stub("a"),
        Stub("b", lost),
        Stub("c", OSError("full")),
        Stub("d"),
        Stub("e", ValueError("late")),
        Stub("f"),
    ]
    with pytest.raises(ValueError, match="late") as caught:
        ending._close_all(left)
    assert closed == ["a", "d", "f"]
    assert isinstance(caught.value.__context__, OSError)
