"""The engine on a GPU beside other work, where calls of CUDA fail, and in the long run; as on the simulated device."""

from __future__ import annotations

import functools
import gc
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_pairs import LONG, WARM_UP, Device, Pair, device, make, pair
from engines import MAIN, OPTIONS, PROMPTS, last, other_model, step_loses_the_context, turned_model

import moe_jax
from moe_jax.cache import Reason, row_buckets
from moe_jax.engine import Engine
from moe_jax.model import Model
from moe_jax.pallas_kernels import compiled
from moe_jax.pallas_kernels.errors import CudaError
from side_by_side import side_by_side
from tiny_models import tiny_model

__all__ = ["device", "make", "pair"]


# -- Neighbours -------------------------------------------------------------------------------------------------------


def test_after_warmup_nothing_is_compiled_loaded_or_captured(make, device, compiles, monkeypatch):
    """By XLA or Triton; long prompts too, whose lengths were told."""
    built = []
    real = compiled.compile_spec
    monkeypatch.setattr(compiled, "compile_spec", lambda *given: built.append(given) or real(*given))
    if not device.simulated:
        # Not what tests before this one have built.
        monkeypatch.setattr("cuda_device.WatchedRuntime.built", {})
    engine = make(tiny_model(MAIN), **OPTIONS, long_prompts=12)
    engine.warmup(prompts=[13])
    assert bool(built) != device.simulated
    built.clear()
    compiles.clear()
    loads, captures = engine.runtime.calls["load"], engine.stats()["captures"]
    numbers = engine.prefill(PROMPTS[:3], temperature=0.7, top_k=5, seed=4)
    numbers += engine.prefill([list(range(13))])
    for _ in range(3):
        for _ in range(2):
            engine.step()
            assert last(engine).kind == "replay"
        engine.release(numbers.pop(0))
    assert (engine.runtime.calls["load"], engine.stats()["captures"]) == (loads, captures)
    assert not built and not compiles


def test_two_engines_in_two_threads_beside_compilation_and_copies(make):
    """Each captures again and again; the user's own program gives what it gave before."""
    user = jax.jit(lambda x: jnp.cumsum(jnp.sin(x), axis=-1))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 1000), np.float32))
    before = np.asarray(user(x)).tobytes()
    pairs = [Pair(make, model, **OPTIONS) for model in (tiny_model(MAIN), other_model())]

    def steps(pair: Pair, turns: int) -> None:
        for turn in range(turns):
            numbers = pair.prefill(PROMPTS[:2], temperature=0.9, seed=turn)
            assert pair.kinds(4) == [*WARM_UP, "replay"]
            pair.release(*numbers)
            pair.new_manifest()

    def disturb(number: int) -> None:
        y = jax.device_put(np.full(1 << 16, number, np.float32))
        constant = float(number)
        mean = jax.jit(lambda y, constant=constant: (y * constant).mean())(y)
        assert float(mean) == pytest.approx(number**2, rel=1e-4)
        assert np.asarray(user(x)).tobytes() == before

    side_by_side([functools.partial(steps, pair, 6) for pair in pairs], disturb)
    assert np.asarray(user(x)).tobytes() == before


# -- Failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["begin_capture", "launch", "end_capture", "instantiate", "upload", "launch_graph"])
def test_a_capture_that_fails_costs_no_token(pair, call):
    """Twice, the second time for want of memory."""
    pair.prefill(PROMPTS[:2], temperature=0.9, seed=5)
    for name in ("CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY"):
        pair.new_manifest()
        assert pair.step() == "direct"
        step_of_two(pair, call, name)
        assert pair.kinds(3) == WARM_UP
    assert sum(pair.engine.stats()["graph_error"].values()) == 2


def step_of_two(pair: Pair, call: str, name: str) -> None:
    """A step of both, the first one's with a call that fails: the direct one first, that has the same driver."""
    wanted = pair.engines[1].step()
    pair.engine.runtime.fail(call, name=name)
    assert pair.engine.step() == wanted
    outcome = last(pair.engine)
    assert outcome.kind == "direct" and outcome.reason is Reason.GRAPH_FAILED and name in outcome.detail


@pytest.mark.parametrize("call", ["launch_graph", "record_event"])
def test_a_replay_that_fails_costs_no_token(pair, call):
    pair.prefill(PROMPTS[:2], temperature=0.9, seed=6)
    pair.step()
    wanted = pair.engines[1].step()
    pair.engine.runtime.fail(call)
    assert pair.engine.step() == wanted
    assert pair.kinds(3) == WARM_UP


def test_a_step_whose_result_cannot_be_read_is_made_again(pair):
    pair.prefill(PROMPTS[:3], temperature=0.9, seed=7)
    for _ in range(3):
        pair.engine.runtime.fail("read")
        with pytest.raises(CudaError):
            pair.engine.step()
        assert pair.step() == "replay"


def test_a_prompt_that_cannot_be_written_leaves_nothing(pair):
    for after in range(4):
        pair.engine.runtime.fail("write", after=after)
        with pytest.raises(CudaError):
            pair.engine.prefill(PROMPTS[:4])
        pair.engine.runtime.heal()
        assert pair.engine.stats()["free_sequences"] == 4
    one, two = (engine.generate(PROMPTS, max_new_tokens=4).tolist() for engine in pair.engines)
    assert one == two


def test_a_lost_context_ends_the_engine_and_it_says_so(make):
    """Not really lost: the driver is made to say so. `tests/cache/test_cuda_runtime_gpu.py` loses one."""
    engine = make(tiny_model(MAIN), **OPTIONS)
    engine.warmup()
    engine.prefill(PROMPTS[:1])
    engine.runtime.fail("launch_graph", name="CUDA_ERROR_ILLEGAL_ADDRESS", **sticky(engine))
    step_loses_the_context(engine)


def sticky(engine: Engine) -> dict[str, bool]:
    """The simulated device must be told; the driver's name says it."""
    return {"sticky": True} if engine.runtime.simulated else {}


# -- Memory and time --------------------------------------------------------------------------------------------------


def used(runtime: Any) -> int:
    """Bytes that this process has allocated on the device."""
    gc.collect()
    return runtime.space.bytes if runtime.simulated else runtime.device.memory_stats()["bytes_in_use"]


@pytest.mark.parametrize("end", ["closed", "dropped"])
def test_an_engine_gives_everything_back(device, end):
    """Dropped while a step is under way."""
    runtime, small = device.runtime(), 1 << 16
    turned_model()
    before = used(runtime)
    engine = Engine(turned_model(), **OPTIONS, graphs="simulate" if device.simulated else "on", runtime=runtime)
    engine.warmup()
    engine.prefill(PROMPTS[:2])
    engine.step()
    stream = engine.generate(PROMPTS[2:4], max_new_tokens=20, stream=True)
    for _ in range(2):
        next(stream)
    assert len(runtime.executables) == 3 and used(runtime) > before + small
    if end == "closed":
        engine.close()
        assert not runtime.executables and not runtime.graphs
    del engine, stream
    assert not runtime.executables and not runtime.graphs
    assert used(runtime) <= before + small


@LONG
@pytest.mark.parametrize("shipped", [False, True])
def test_time_of_a_capture(make, record_property, monkeypatch, shipped):
    """From begin to the executable; recorded for whoever reads the report of the run."""
    model = moe_jax.load() if shipped else tiny_model(MAIN)
    engine = make(model, max_sequences=1, max_tokens=64, page_size=8, chunk=1)
    begun, times = [], []
    begin, instantiate = engine.runtime.begin_capture, engine.runtime.instantiate

    def begin_capture(stream: Any) -> Any:
        begun.append(time.perf_counter())
        return begin(stream)

    def instantiated(captured: Any) -> Any:
        executable = instantiate(captured)
        times.append(1e3 * (time.perf_counter() - begun[-1]))
        return executable

    monkeypatch.setattr(engine.runtime, "begin_capture", begin_capture)
    monkeypatch.setattr(engine.runtime, "instantiate", instantiated)
    engine.prefill([[5, 6, 7]])
    for _ in range(5):
        engine.registry.accept(engine.registry.manifest("main")[0])
        assert [(engine.step(), last(engine).kind)[1] for _ in range(3)] == WARM_UP
    launches = len(engine._steps.decode[1].launches)
    record_property("launches", launches)
    record_property("capture_ms", times)
    print(f"\ncapture and instantiation of {launches} launches: {', '.join(f'{t:.2f}' for t in times)} ms")
    assert len(times) == 5
    if not engine.runtime.simulated:
        assert min(times) < 15


class Traffic:
    """Sequences of random lengths that come and go; now and then new weights or a new manifest."""

    def __init__(self, engine: Engine, models: list[Model]):
        self.engine, self.models, self.rng = engine, models, np.random.default_rng(8)
        self.numbers: list[int] = []

    def step(self) -> None:
        engine, rng = self.engine, self.rng
        gone = [n for n in self.numbers if n not in engine.live or rng.random() < 0.02]
        for number in gone:
            engine.release(number)
            self.numbers.remove(number)
        while not self.numbers or (engine.stats()["free_sequences"] and rng.random() < 0.2):
            prompt = rng.integers(0, 258, rng.integers(1, 20)).tolist()
            options = {"temperature": float(rng.random()), "seed": int(rng.integers(1 << 30))}
            self.numbers += engine.prefill([prompt], max_new_tokens=int(rng.integers(1, 24)), **options)
        if rng.random() < 0.005:
            engine.update_weights(self.models[int(rng.integers(2))])
        if rng.random() < 0.005:
            engine.registry.accept(engine.registry.manifest("main")[0])
        assert sorted(engine.step()) == sorted(self.numbers)


ALONE = [pytest.mark.gpu, pytest.mark.alone]


@pytest.mark.parametrize(
    "device", [pytest.param("simulate", marks=pytest.mark.slow), pytest.param("cuda", marks=ALONE)], indirect=True
)
def test_ten_thousand_steps_leave_memory_flat_and_graphs_within_bounds(make, device):
    """Of mixed shapes, on a GPU; some on the simulated device. One graph fewer is allowed than there are buckets."""
    places = 4 if device.simulated else 8
    allowed = len(row_buckets(places)) - 1
    engine = make(tiny_model(MAIN), **{**OPTIONS, "max_sequences": places})
    engine.graphs._store.max_entries = allowed  # an engine does not take so few
    traffic = Traffic(engine, [tiny_model(MAIN), other_model()])
    steps, samples = (60 if device.simulated else 10_000), []
    start = time.perf_counter()
    for number in range(1, steps + 1):
        traffic.step()
        stats = engine.stats()
        assert stats["graphs"] <= allowed and stats["plans"] <= 4 * allowed and not stats["undestroyed"]
        if not number % (steps // 10):
            samples.append((used(engine.runtime), free_bytes(device)))
    seconds = time.perf_counter() - start
    stats = engine.stats()
    counts = {kind: stats[kind] for kind in ("direct", "captures", "replays", "evictions", "swept")}
    print(f"\n{steps} steps in {seconds:.1f} s: {counts}; bytes in use and free: {samples}")
    assert stats["evictions"] and len(engine.runtime.executables) == stats["graphs"] + stats["retired"]
    own, free = zip(*samples[2:], strict=True)
    assert max(own) - min(own) <= 1 << 16
    assert free[0] - free[-1] < 16 << 20
    assert device.simulated or seconds < 60


def free_bytes(device: Device) -> int:
    """Of the whole device: that is why such a test runs alone."""
    if device.simulated:
        return 0
    import cuda_device

    return cuda_device.free_bytes()


def test_the_driver_that_fails_on_request_is_under_the_runtime(device, make) -> None:
    """A test of the tests: a failure that is asked for happens, once."""
    runtime = device.runtime()
    stream = runtime.new_stream()
    runtime.fail("synchronize")
    with pytest.raises(CudaError, match=r"synchronize: .*CUDA_ERROR_UNKNOWN"):
        runtime.synchronize(stream)
    runtime.synchronize(stream)


def test_pairs_that_differ_are_found(make) -> None:
    """A test of the tests: other weights in one of two engines."""
    pair = Pair(make, tiny_model(MAIN), **OPTIONS)
    pair.prefill(PROMPTS[:2])
    pair.step()
    pair.engines[1].update_weights(other_model())
    with pytest.raises(AssertionError):
        pair.kinds(3)
