"""A step that is queued before the tokens of the one before it are read: tokens are those of an engine that waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from engines import COUNT, MAIN, OPTIONS, PROMPTS, ending_with, expected, other_model, turned_model
from flax import nnx

from moe_jax.cache import NotReplayed, SimulatedRuntime, StickyError, StoreUnusable
from moe_jax.engine import Engine
from moe_jax.errors import InvalidArgument
from moe_jax.pallas_kernels.errors import CudaError
from tiny_models import tiny_model

TWO, THREE = PROMPTS[:2], PROMPTS[:3]
AHEAD, ALONE = ["queue_read", "launch_graph", "finish_read"], ["read"]


@pytest.fixture
def made(engine_for) -> Callable[..., Engine]:
    def make(model: Any = None, **options: Any) -> Engine:
        engine = engine_for(model or tiny_model(MAIN), **{**OPTIONS, **options})
        engine.warmup()
        return engine

    return make


@pytest.fixture
def engine(made) -> Engine:
    return made()


@pytest.fixture
def calls(engine, monkeypatch) -> list[str]:
    """Launches of graphs and reads, in their order."""
    found: list[str] = []
    for name in ("launch_graph", "queue_read", "finish_read", "read"):
        real = getattr(engine.runtime, name)

        def call(*given: Any, name: str = name, real: Any = real) -> Any:
            found.append(name)
            return real(*given)

        monkeypatch.setattr(engine.runtime, name, call)
    return found


def stepped(engine: Engine, into: dict[int, list[int]], more: bool = True) -> None:
    """One step of all that are live."""
    for number, token in engine._step(engine.live, more=more).items():
        into.setdefault(number, []).append(token)


def finished(engine: Engine, into: dict[int, list[int]]) -> None:
    """Step until none is live."""
    for _ in range(2 * COUNT):
        stepped(engine, into)
    assert not engine.live


def lengths(engine: Engine) -> list[tuple[int, int]]:
    """The books, which a batch keeps until they are asked for."""
    if engine._stepper.batch is not None:
        engine._stepper.batch.settle()
    return [(one.length, one.newest) for one in engine._sequences.values()]


def started(engine: Engine, prompts: Any, steps: int = 2, count: int = COUNT) -> tuple[Iterator[Any], list[Any]]:
    """A stream, and its first steps."""
    stream = engine.generate(prompts, max_new_tokens=count, stream=True)
    return stream, [next(stream) for _ in range(steps)]


def rows(steps: list[Any]) -> list[list[int]]:
    return np.stack(steps, 1).tolist()


# -- When -------------------------------------------------------------------------------------------------------------


def test_the_next_step_is_launched_before_tokens_are_read(engine, calls):
    numbers, new, replays = engine.prefill(THREE, max_new_tokens=COUNT), {}, engine.stats()["replays"]
    seen = []
    for _ in range(COUNT):
        calls.clear()
        stepped(engine, new)
        seen.append([*calls])
        assert engine.explain_last_step() == "replay: 3 rows in a bucket of 4"
    # They reach their limit with the last one, so nothing is behind it.
    assert seen == [["launch_graph", *AHEAD], *[AHEAD] * (COUNT - 2), ALONE]
    assert engine.live == ()
    assert [new[number] for number in numbers] == expected()[:3]
    assert engine.stats()["replays"] - replays == COUNT


def test_generate_runs_ahead(engine, calls):
    assert engine.generate(THREE, max_new_tokens=COUNT).tolist() == expected()[:3]
    assert calls == ["launch_graph", *AHEAD * (COUNT - 1), *ALONE]


def test_what_is_read_after_each_step_is_of_that_step(engine, calls):
    tokens, _ = engine.generate(THREE, max_new_tokens=COUNT, logprobs=True)
    assert tokens.tolist() == expected()[:3]
    assert calls == ["launch_graph", "read", "read"] * COUNT


def test_a_step_of_the_user_never_runs_ahead(engine, calls):
    engine.prefill(THREE, max_new_tokens=COUNT)
    for _ in range(COUNT):
        engine.step()
    assert calls == ["launch_graph", "read"] * COUNT


def test_nothing_runs_ahead_while_prompts_wait(engine, calls):
    """Five for four places: the last one runs alone when the others are there."""
    assert engine.generate(PROMPTS, max_new_tokens=COUNT).tolist() == expected()
    assert calls == [*["launch_graph", "read"] * COUNT, "launch_graph", *AHEAD * (COUNT - 1), *ALONE]


def test_only_behind_a_replay(engine_for):
    engine = engine_for(tiny_model(MAIN), **OPTIONS)
    new, seen = {}, []
    (number,) = engine.prefill(PROMPTS[1:2], max_new_tokens=COUNT)
    for _ in range(COUNT):
        before = engine.runtime.calls["queue_read"]
        stepped(engine, new)
        seen.append(
            (engine.explain_last_step().split(":")[0].split(" ")[0], engine.runtime.calls["queue_read"] - before)
        )
    assert seen == [("direct", 0), ("capture", 0), *[("replay", 1)] * (COUNT - 3), ("replay", 0)]
    assert new[number] == expected()[1]


def test_without_graphs_never(engine_for):
    engine = engine_for(tiny_model(MAIN), **OPTIONS, graphs="off", runtime=SimulatedRuntime(1 << 25))
    before = engine.runtime.calls["queue_read"]
    assert engine.generate(THREE, max_new_tokens=COUNT).tolist() == expected()[:3]
    assert engine.runtime.calls["queue_read"] == before


# -- Ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["config", "stop"])
@pytest.mark.parametrize("at", [0, 2, COUNT - 2])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], THREE], ids=len)
def test_others_go_on_where_one_ends(made, by, at, prompts):
    """And the step that ran ahead gives them their tokens: it was for nothing only where nobody is left."""
    token = expected()[0][at]
    engine = made(ending_with(token) if by == "config" else None)
    options: dict[str, Any] = {"max_new_tokens": COUNT, "stop": token if by == "stop" else None}
    wanted = engine._model.generate(prompts, graphs="jit", **options)
    used = [row.index(token) + 1 if token in row else COUNT for row in expected()[: len(prompts)]]
    before = engine.stats()
    assert engine.generate(prompts, **options).tolist() == wanted.tolist()
    after = engine.stats()
    assert after["replays"] - before["replays"] == max(used) + (max(used) < COUNT)
    assert after["live"] == after["sequences"] == 0
    assert engine.generate(prompts, **options).tolist() == wanted.tolist()


def test_tokens_do_not_wait_for_the_step_ahead_where_one_ends(made, monkeypatch):
    """What that step has drawn for the others is read when it is asked for."""
    engine = made(ending_with(expected()[0][2]))
    ends, other = engine.prefill(TWO, max_new_tokens=COUNT)
    new: dict[int, list[int]] = {}
    with monkeypatch.context() as patch:
        patch.setattr(engine.runtime, "read", None)
        for _ in range(3):
            stepped(engine, new)
    assert new == {ends: expected()[0][:3], other: expected()[1][:3]} and engine.live == (other,)
    reads = engine.runtime.calls["read"]
    stepped(engine, new)
    assert engine.runtime.calls["read"] == reads + 1 and new[other] == expected()[1][:4]


def test_new_weights_do_not_wait_for_what_they_void(engine, monkeypatch):
    stream, steps = started(engine, TWO)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runtime, "read", None)
        engine.update_weights()
    steps += stream
    assert rows(steps) == expected()[:2]


def test_nobody_waits_for_a_step_that_was_for_nothing(made, monkeypatch):
    engine = made(ending_with(expected()[1][2]))
    engine.prefill(PROMPTS[1:2], max_new_tokens=COUNT)
    monkeypatch.setattr(engine.runtime, "read", None)
    new: dict[int, list[int]] = {}
    finished(engine, new)
    assert [*new.values()] == [expected()[1][: expected()[1].index(expected()[1][2]) + 1]]


def test_tokens_given_later_may_end_a_sequence(made):
    """Of one whose rows have become others'."""
    engine = made(ending_with(expected()[0][2]))
    ends, other = engine.prefill(TWO, max_new_tokens=COUNT)
    new: dict[int, list[int]] = {}
    stepped(engine, new)
    stepped(engine, new)
    more = [engine._step((other,), more=True)[other] for _ in range(2)]
    assert engine.live == (ends, other)
    assert engine._step((ends,)) == {ends: expected()[0][2]}
    assert engine.live == (other,) and engine._step(()) == {}
    assert [*new[other], *more, engine.step()[other]] == expected()[1][:5]


# -- Between two steps ------------------------------------------------------------------------------------------------


def own_sequences(engine: Engine) -> None:
    (number,) = engine.prefill(PROMPTS[4:5])
    assert [engine.step()[number] for _ in range(3)] == expected()[4][:3]
    engine.release(number)


def same_weights(engine: Engine) -> None:
    engine.update_weights(tiny_model(MAIN))


def second_generate(engine: Engine) -> None:
    assert engine.generate(PROMPTS[2:4], max_new_tokens=COUNT).tolist() == expected()[2:4]


def left_stream(engine: Engine) -> None:
    stream, _ = started(engine, PROMPTS[2:4])
    del stream


BETWEEN = [own_sequences, Engine.warmup, second_generate, left_stream, same_weights]


@pytest.mark.parametrize("weights", ["held", "owned"])
@pytest.mark.parametrize("event", BETWEEN, ids=lambda event: event.__name__)
def test_a_stream_goes_on_after(made, event, weights):
    engine = made(weights=weights)
    stream, steps = started(engine, TWO)
    for step in stream:
        event(engine)
        steps.append(step)
    assert rows(steps) == expected()[:2]


def test_two_streams_take_turns(engine, calls):
    """A step that the other one's rows have displaced was not for nothing."""
    one, two = (engine.generate(prompts, max_new_tokens=COUNT, stream=True) for prompts in (TWO, PROMPTS[2:4]))
    pairs = [*zip(one, two, strict=True)]
    assert [rows([pair[i] for pair in pairs]) for i in range(2)] == [expected()[:2], expected()[2:4]]
    assert calls.count("launch_graph") == 2 * COUNT


@pytest.mark.parametrize("displaced", [False, True])
@pytest.mark.parametrize("weights", ["held", "owned"])
def test_new_weights_make_drawn_tokens_void(made, weights, displaced):
    """Those given afterwards are those of an engine that never runs ahead and has them at the same point."""
    engine, waiting = made(weights=weights), made(weights=weights)
    waiting.prefill(THREE, max_new_tokens=COUNT)
    wanted = []
    for step in range(COUNT):
        if step == 2:
            waiting.update_weights(other_model())
        wanted.append([*waiting.step().values()])
    stream, steps = started(engine, THREE)
    if displaced:
        engine.prefill(PROMPTS[4:5])
    engine.update_weights(other_model())
    steps += stream
    assert rows(steps) == rows(wanted) != expected()[:3]


def test_a_stream_that_is_left_gives_its_places_back(engine):
    stream, _ = started(engine, THREE)
    stream.close()
    assert engine.stats()["free_sequences"] == 4 and not engine._stepper._drawn
    assert engine.generate(PROMPTS[:4], max_new_tokens=COUNT).tolist() == expected()[:4]


def test_a_stream_that_is_left_while_its_tokens_come_leaves_nothing(engine, monkeypatch):
    stream, _ = started(engine, TWO)
    read = engine.runtime.read
    monkeypatch.setattr(engine.runtime, "read", lambda *given: (stream.close(), read(*given))[1])
    engine.warmup()
    assert not engine._stepper._drawn and not engine._stepper._doubtful


def test_a_closed_engine_ends_its_streams(engine):
    stream, _ = started(engine, THREE)
    engine.close()
    assert engine.runtime.space.bytes == 0 and not engine.runtime.executables
    stepper = engine._stepper
    assert stepper.batch is stepper._ahead is stepper._reading is None and not stepper._drawn
    with pytest.raises(StoreUnusable, match="closed"):
        next(stream)


# -- Faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["launch_graph", "record_event"])
@pytest.mark.parametrize("after", range(3))
def test_a_replay_ahead_that_fails_costs_no_token(engine, call, after):
    stream, steps = started(engine, THREE, 1)
    engine.runtime.fail(call, after=after)
    steps += stream
    assert rows(steps) == expected()[:3]
    assert not engine.runtime._faults


@pytest.mark.parametrize("parts", [0, 5])
def test_a_step_ahead_that_fails_is_told_when_it_is_asked_for(engine, parts):
    """Some launches of it may have run."""
    numbers, new = engine.prefill(THREE, max_new_tokens=COUNT), {}
    stepped(engine, new)
    engine.runtime.fail("launch_graph", times=None)
    engine.runtime.fail("launch", after=parts, times=None)
    stepped(engine, new)
    before = lengths(engine)
    for more in (True, False):
        with pytest.raises(CudaError, match="launch"):
            engine._step(engine.live, more=more)
        assert lengths(engine) == before and engine.live == tuple(numbers)
        assert engine.explain_last_step().startswith("failed: ")
    engine.runtime.heal()
    finished(engine, new)
    assert [new[number] for number in numbers] == expected()[:3]


def test_a_step_ahead_that_failed_may_have_run(made, monkeypatch):
    """And have ended a row, which goes on where other weights draw another token."""
    found = []
    for fails in (False, True):
        engine, new = made(ending_with(expected()[0][1])), {}
        numbers, real = engine.prefill(TWO), engine.graphs.step

        def step(*given: Any, real: Any = real, engine: Engine = engine) -> Any:
            outcome = real(*given)
            if engine.runtime.calls["queue_read"] > 1:  # the first is that of the engine's making
                raise CudaError("call failed", where="step", got="CUDA_ERROR_UNKNOWN", wanted="success")
            return outcome

        with monkeypatch.context() as patch:
            patch.setattr(engine.graphs, "step", step)
            stepped(engine, new, more=fails)
        assert engine.runtime.calls["queue_read"] == 1 + fails
        engine.update_weights(other_model().module)
        for _ in range(3):
            stepped(engine, new, more=False)
        found.append([new[number] for number in numbers])
    assert found[0] == found[1] and len(found[0][0]) == 4


def test_a_stream_whose_step_ahead_failed_ends_with_the_error(engine):
    stream, steps = started(engine, THREE, 1)
    for call in ("launch_graph", "launch"):
        engine.runtime.fail(call, times=None)
    steps.append(next(stream))
    with pytest.raises(CudaError, match="launch"):
        next(stream)
    engine.runtime.heal()
    assert rows(steps) == [row[:2] for row in expected()[:3]] and engine.stats()["free_sequences"] == 4
    assert engine.generate(PROMPTS, max_new_tokens=COUNT).tolist() == expected()


@pytest.mark.parametrize("call", ["queue_read", "finish_read", "read"])
def test_a_step_whose_tokens_cannot_be_read_is_made_again(made, call):
    """Each of them; reads come where a row has ended, or reaches its limit."""
    engine = made(ending_with(expected()[0][2]))
    numbers, new = engine.prefill(THREE, max_new_tokens=COUNT), {}
    failed = 0
    for _ in range(COUNT):
        before, live = lengths(engine), engine.live
        engine.runtime.fail(call)
        try:
            stepped(engine, new)
        except CudaError:
            failed += 1
            assert lengths(engine) == before and engine.live == live
            stepped(engine, new)
        engine.runtime.heal()
    assert failed >= 2
    cut = expected()[0].index(expected()[0][2]) + 1
    wanted = [row[: row.index(expected()[0][2]) + 1] if expected()[0][2] in row else row for row in expected()[:3]]
    assert len(new[numbers[0]]) == cut and [new[number] for number in numbers] == wanted


@pytest.mark.parametrize("event", [Engine.warmup, lambda engine: engine.prefill(PROMPTS[4:5])])
def test_whoever_takes_the_rows_may_fail_to_read_their_tokens(engine, event):
    """Then they are drawn again: the rows are further than the host."""
    stream, steps = started(engine, TWO)
    engine.runtime.fail("read")
    with pytest.raises(CudaError, match="read"):
        event(engine)
    assert engine.stats()["free_sequences"] == 2
    steps += stream
    assert rows(steps) == expected()[:2]


@pytest.mark.parametrize("call", ["launch_graph", "queue_read", "finish_read", "execute"])
def test_a_lost_context_ends_the_engine(engine, call):
    stream, _ = started(engine, THREE)
    engine.runtime.fail(call, sticky=True, name="CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(StickyError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS|CUDA_ERROR_UNKNOWN"):
        next(stream)
    assert "context is lost" in engine.stats()["state"]
    with pytest.raises(StoreUnusable, match="context is lost"):
        engine.step()


def test_arrays_that_the_user_deletes_stay(made):
    engine = made(turned_model())
    stream, steps = started(engine, THREE)
    for array in jax.tree.leaves(nnx.state(engine._model.module)):
        array.delete()
    with pytest.raises(InvalidArgument, match="deleted"):
        engine.update_weights()
    steps += stream
    assert rows(steps) == expected(other=True)[:3]


def test_strict_refuses_a_step_ahead_that_is_no_replay_when_it_is_asked_for(made, monkeypatch):
    """A manifest is replaced between a step and the one behind it."""
    engine = made(graphs="strict", runtime=SimulatedRuntime(1 << 25))
    numbers, new = engine.prefill(THREE, max_new_tokens=COUNT), {}
    stepped(engine, new)
    real = engine.runtime.queue_read

    def queue_read(*given: Any) -> Any:
        engine.registry.accept(engine.registry.manifest("main")[0])
        return real(*given)

    monkeypatch.setattr(engine.runtime, "queue_read", queue_read)
    stepped(engine, new)
    monkeypatch.undo()
    with pytest.raises(NotReplayed, match="first call"):
        stepped(engine, new)
    engine.warmup()
    finished(engine, new)
    assert [new[number] for number in numbers] == expected()[:3]
