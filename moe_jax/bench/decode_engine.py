"""Decode steps of the engine, replayed as a graph or launched one by one, and what of their time is the host's."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

from moe_jax.bench.cases import distinct
from moe_jax.bench.decode_cell import WARM, Measured, check_finite, check_time, goes_on
from moe_jax.bench.timing import Clock
from moe_jax.cache import Certificate, Graphs, LaunchList, Outcome, ResourceTable, Runtime
from moe_jax.cache.runtime import no_collection
from moe_jax.engine import Engine
from moe_jax.errors import CannotServe
from moe_jax.model import Model

# Calls of a runtime that launch, that wait for the device, and that make a graph.
LAUNCHES = ("launch", "launch_graph")
WAITS = ("read", "wait", "synchronize")
CAPTURES = ("begin_capture", "instantiate")
ALONE = 30  # steps that are queued when the tokens of the one before have been read
WATCHED = 30  # steps of which launches and waiting are timed apart
PROBES = 200


def positions(steps: int) -> int:
    """Tokens that a sequence comes to beyond its context: the calls below, one by one."""
    return WARM + 2 * steps + ALONE + WATCHED + 3


def measure(
    model: Model,
    prompts: Sequence[Sequence[int]],
    graphs: Literal["on", "off"],
    runtime: Runtime,
    clock: Clock,
    steps: int,
) -> Measured:
    """One engine, a sequence for each prompt, from its making on.

    The prompts are really read, in chunks by the engine's own launches: no program of XLA's is compiled for them. Only
    the row bucket of the prompts' number is run.

    Raises:
        CannotServe: steps were no replays with ``graphs="on"``, logits that are not finite, or out of time.
    """
    where = f"engine with graphs={graphs!r}"
    length, rows = max(map(len, prompts)), len(prompts)
    begin = time.perf_counter()
    with Engine(
        model,
        max_sequences=rows,
        max_tokens=length + positions(steps),
        long_prompts=None,
        graphs=graphs,
        runtime=runtime,
    ) as engine:
        built = time.perf_counter() - begin
        for prompt in prompts:
            check_time(where, clock)
            engine.prefill([list(prompt)], max_new_tokens=positions(steps))
        engine.graphs.drain()
        with watched(runtime) as spent:
            start = time.perf_counter()
            engine.step()
            first = time.perf_counter() - start
            engine.step()
            capture = spent.get("capture")
        given = arguments(engine)
        for _ in range(WARM - 3):
            engine.step()
        replays = engine.stats()["replays"]
        # As `Engine.generate` steps, then as its callers do.
        us = _timed(lambda: engine._step(engine.live, more=True), lambda us: goes_on(where, clock, us, steps))
        alone = _timed(engine.step, lambda us: goes_on(where, clock, us, ALONE))
        host, launch = _shares(engine)
        replays = engine.stats()["replays"] - replays
        made = len(us) + len(alone) + WATCHED
        if graphs == "on" and replays != made:
            got = f"{replays} of {made} steps; {engine.explain_last_step()}"
            raise CannotServe("replays", where=where, got=got, wanted="all")
        check_finite(where, engine.memory.read("logits")[:rows])
        return Measured(
            configuration="default",
            backend=runtime.compiler,
            us=us,
            build_s=built,
            first_step_s=first,
            alone_us=statistics.median(alone),
            device_us=_queued(engine, given, len(us)),
            host_us=host,
            checks_us=_checks(engine, given),
            launch_us=launch,
            launches=len(given[0].launches),
            capture_ms=None if capture is None else capture * 1e3,
            experts=_experts(engine, given, model.config.moe.router.experts),
        )


def _timed(step: Callable[[], Any], goes_on: Callable[[list[float]], bool]) -> list[float]:
    """Microseconds of steps, each with its tokens in hand."""
    us: list[float] = []
    while goes_on(us):
        start = time.perf_counter()
        step()
        us.append((time.perf_counter() - start) * 1e6)
    return us


@contextlib.contextmanager
def watched(runtime: Runtime) -> Generator[defaultdict[str, float]]:
    """Seconds spent in a runtime's calls, by name, while the block runs; a call inside another one is part of that.

    ``"capture"`` is the time from the begin of the last capture to the end of its instantiation.
    """
    spent: defaultdict[str, float] = defaultdict(float)
    inside = False

    def watch(name: str) -> None:
        call = getattr(runtime, name)

        def timed(*given: Any, **more: Any) -> Any:
            nonlocal inside
            if inside:
                return call(*given, **more)
            inside, start = True, time.perf_counter()
            try:
                return call(*given, **more)
            finally:
                end, inside = time.perf_counter(), False
                spent[name] += end - start
                if name == "begin_capture":
                    spent["begun"] = start
                elif name == "instantiate":
                    spent["capture"] = end - spent["begun"]

        setattr(runtime, name, timed)

    names = (*LAUNCHES, *WAITS, *CAPTURES)
    for name in names:
        watch(name)
    try:
        yield spent
    finally:
        for name in names:
            delattr(runtime, name)


def _shares(engine: Engine) -> tuple[float, float]:
    """Median microseconds of a step without launches and waiting for the device, and of its launches.

    Apart from the steps whose time counts: with graphs off the clocks around every launch would count too.
    """
    host, launches = [], []
    with watched(engine.runtime) as spent:
        for _ in range(WATCHED):
            spent.clear()
            start = time.perf_counter()
            engine.step()
            whole = time.perf_counter() - start
            launch, wait = (sum(spent[name] for name in names) for names in (LAUNCHES, WAITS))
            launches.append(launch * 1e6)
            host.append((whole - launch - wait) * 1e6)
    return statistics.median(host), statistics.median(launches)


def arguments(engine: Engine) -> tuple[LaunchList, Certificate, ResourceTable]:
    """What the engine gives its store of graphs for the next step, which is made."""
    store, given = engine.graphs, []
    call = store.step

    def step(*arguments: Any, **options: Any) -> Outcome:
        given.append(arguments)
        return call(*arguments, **options)

    store.step = step  # type: ignore[method-assign]
    try:
        engine.step()
    finally:
        del store.step
    ((launches, certificate, table),) = given
    return launches, certificate, table


def graph_of(runtime: Runtime, stream: Any, calls: Sequence[tuple[Any, Sequence[int]]]) -> tuple[Any, Any]:
    """An executable of kernels, each with its addresses, and what it was made of; the caller destroys both."""
    with no_collection():
        capture = runtime.begin_capture(stream)
        for kernel, addresses in calls:
            runtime.launch(kernel, addresses, capture)
        captured = runtime.end_capture(capture)
    return runtime.instantiate(captured), captured


def _queued(engine: Engine, given: Any, steps: int) -> float:
    """Microseconds of a step where nobody reads tokens in between: the device's time, unless the host is slower."""
    store = engine.graphs
    store.drain()
    start = time.perf_counter()
    for _ in range(steps):
        store.step(*given)
    store.drain()
    return (time.perf_counter() - start) * 1e6 / steps


def _checks(engine: Engine, given: Any) -> float:
    """Microseconds of what decides on a step: the plan's lookup and every check."""
    times = []
    for _ in range(PROBES):
        start = time.perf_counter()
        engine.graphs.probe(*given)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def _experts(engine: Engine, given: Any, experts: int) -> float:
    """Distinct experts of a layer in the next step, which is launched kernel by kernel and read in between."""
    runtime, found = engine.runtime, []
    call = runtime.launch

    def launch(kernel: Any, addresses: Sequence[int], on: Any) -> None:
        call(kernel, addresses, on)
        spec = kernel.spec
        if spec.name == "route" and dict(spec.constexprs)["EXPERTS"] == experts:
            ids = next(i for i, argument in enumerate(spec.arguments) if argument.name == "ids_ptr")
            chosen = runtime.read(addresses[ids], spec.arguments[ids].dtype, spec.arguments[ids].shape, on)
            found.append(distinct(chosen, experts))

    engine.graphs.drain()
    direct = Graphs(runtime, engine.registry, mode="off")
    runtime.launch = launch  # type: ignore[method-assign]
    try:
        direct.step(*given)
        direct.drain()
    finally:
        del runtime.launch
        direct.close()
    return statistics.fmean(found)
