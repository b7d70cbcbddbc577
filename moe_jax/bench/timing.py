"""Times of chains on a CUDA device, and its two ceilings. The bench is given a `Timer`, so that it runs without one."""

from __future__ import annotations

import functools
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from moe_jax.bench.cases import Ceilings
from moe_jax.bench.contenders import Work

REPEATS = 25
SECONDS = 0.3  # that the repeats of one chain may take, warm-up and pauses left out
LEAST_REPEATS = 5
LONG_US = 1e4  # that a row of calls takes at least; its start and end take some 30
TIRING_US = 2000.0  # a chain as long as that lowers the chip's clock, if it runs again and again
SETTLING_WORDS = 2**26  # int32: 256 MiB


class Timing(NamedTuple):
    """Microseconds of each repeat of a chain, and what a reader should know of how they came about."""

    us: list[float]
    note: str | None = None


class Timer(Protocol):
    """How long a chain takes, and how fast the device could be.

    Attributes:
        l2_bytes: of the device's last cache.
    """

    l2_bytes: int

    def ceilings(self) -> Ceilings:
        """The device's rates, measured now."""
        ...

    def time(self, work: Work) -> Timing:
        """At least `LEAST_REPEATS` repeats of a chain that has run before."""
        ...


class Clock:
    """Seconds since it was made, against a limit."""

    def __init__(self, limit: float, now: Callable[[], float] = time.monotonic):
        self.limit, self._now = limit, now
        self._start = now()

    @property
    def spent(self) -> float:
        return self._now() - self._start

    @property
    def left(self) -> float:
        return self.limit - self.spent

    def part(self, share: float) -> Clock:
        """A clock that stops after a share of what is left."""
        return Clock(self.left * share, self._now)


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Median, and half the distance between the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, (high - low) / 2


def repeats_for(us: float) -> int:
    """Repeats of a chain of so many microseconds: `REPEATS`, or as many as `SECONDS` allow."""
    return max(LEAST_REPEATS, min(REPEATS, int(SECONDS * 1e6 / max(us, 1.0))))


def rest(us: float) -> None:
    """Before a chain of so many microseconds runs again: nothing, or as long a pause if it is a tiring one.

    At its power limit the chip lowers its clock by a tenth and more within some ten milliseconds of matrix products.
    With pauses a cell and the ceilings that it is compared with are of the same clock, whatever ran before.
    """
    if us >= TIRING_US:
        time.sleep(us * 1e-6)


def time_calls(work: Work) -> Timing:
    """Calls in a row, waited for together, by the host's clock.

    A row takes longer than its calls: until the first has reached the device, and until the host has seen the last one
    end. So a time is that of a row beyond one of half as many calls, for each call more. A call of `LONG_US` is taken
    alone: its start and end do not count, and a second call would find the chip tired by the first, which no replay of
    a graph does.
    """

    def row(calls: int, pause: float = 0.0) -> tuple[float, float]:
        rest(pause)
        start = time.perf_counter()
        outs = None
        for _ in range(calls):
            outs = work.run()
        queued = time.perf_counter()
        jax.block_until_ready(outs)
        return (time.perf_counter() - start) * 1e6, (queued - start) * 1e6

    row(1)
    once, _ = row(1)
    if once >= LONG_US:
        return Timing([row(1, once)[0] for _ in range(repeats_for(once))])
    calls = min(50, math.ceil(LONG_US / once))
    times, shares = [], []
    for _ in range(max(LEAST_REPEATS, repeats_for(once * calls) // 2)):
        short, _ = row(calls, once * calls)
        long, queued = row(2 * calls, 2 * once * calls)
        times.append((long - short) / calls)
        shares.append(queued / long)
    return Timing(times, "the host's launches take as long" if statistics.median(shares) > 0.9 else None)


class CudaTimer:
    """Times on a CUDA device: graph replays between events where that can be, else by the host's clock.

    Args:
        folder: of cubins for the read rate; None: compiled here.
    """

    def __init__(self, device: jax.Device, folder: Path | None, capability: int):
        from cuda.core import Device

        self.device, self.folder, self.capability = device, folder, capability
        jax.block_until_ready(jax.device_put(jnp.zeros(1), device))  # JAX makes the context that is used here too
        cuda = Device(device.local_hardware_id)
        cuda.set_current()
        self.stream = cuda.create_stream()
        self.l2_bytes = cuda.properties.l2_cache_size

    def time(self, work: Work) -> Timing:
        self._settle()
        return {"launches": self._launches, "torch": self._torch, "jit": time_calls}[work.kind](work)

    def _settle(self) -> None:
        """Pass over memory, as the read rate's kernels do.

        What XLA ran last changes the time of launches that follow, by up to 3 % and for as long as nothing else runs:
        after a contender's result was checked they are slower than after any pass over memory. Why is not known
        (benchmarks/settling.py shows it). So every chain follows the same.
        """
        jax.block_until_ready(self._pass())

    @functools.cached_property
    def _pass(self) -> Callable[[], jax.Array]:
        """Made when the first chain is timed: ceilings alone need none."""
        words = jnp.zeros(SETTLING_WORDS, jnp.int32, device=self.device)
        return functools.partial(jax.jit(jnp.sum), words)

    def _launches(self, work: Work) -> Timing:
        from moe_jax.pallas_kernels.launcher import capture, replay_times

        graph = capture(self.stream, work.run)
        try:
            once = replay_times(graph, self.stream, 1)[0]
            if once < TIRING_US:
                return Timing(replay_times(graph, self.stream, repeats_for(once), warmup=1))
            times = []
            for _ in range(repeats_for(once)):
                rest(once)
                times += replay_times(graph, self.stream, 1, warmup=0)
            return Timing(times)
        finally:
            graph.close()

    def _torch(self, work: Work) -> Timing:
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work.run()

        def replay(pause: float = 0.0) -> float:
            rest(pause)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            return begin.elapsed_time(end) * 1e3

        once = [replay() for _ in range(3)][-1]
        return Timing([replay(once) for _ in range(repeats_for(once))])

    def ceilings(self) -> Ceilings:
        return Ceilings(self._read_tbs(), self._matmul_tflops())

    def _read_tbs(self) -> float:
        from moe_jax.bench.launches import kernel_of
        from moe_jax.bench.read import WORDS, read_specs
        from moe_jax.pallas_kernels.launcher import capture, load_kernel, replay_times

        data = jax.device_put(jax.random.key(0), self.device)
        data = jax.lax.bitcast_convert_type(jax.random.bits(data, (WORDS,), jnp.uint32), jnp.int32)
        sink = jax.device_put(jnp.zeros(1, jnp.int32), self.device)
        addresses = [array.unsafe_buffer_pointer() for array in jax.block_until_ready((data, sink))]
        times = []
        for spec in read_specs():
            kernel = load_kernel(spec, kernel_of(spec, self.folder, self.capability))
            graph = capture(self.stream, lambda builder, kernel=kernel: kernel.launch(builder, addresses))
            times.append(statistics.median(replay_times(graph, self.stream, REPEATS)))
            graph.close()
        return WORDS * 4 / min(times) / 1e6

    def _matmul_tflops(self) -> float:
        """The fastest of XLA's product, of that with the second operand transposed, and of PyTorch's where it is."""
        size = 8192
        keys = jax.random.split(jax.device_put(jax.random.key(1), self.device))
        a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
        times = []
        for contract in (0, 1):
            dimensions = (((1,), (contract,)), ((), ()))
            multiply = jax.jit(functools.partial(jax.lax.dot_general, dimension_numbers=dimensions))
            run = functools.partial(multiply, a, b)
            jax.block_until_ready(run())
            times.append(statistics.median(time_calls(Work("", "jit", run, run)).us))
        if importlib.util.find_spec("torch") is not None:
            import torch

            if torch.cuda.is_available():
                x, y = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
                run = functools.partial(torch.matmul, x, y)
                run()
                times.append(statistics.median(self._torch(Work("", "torch", run, run)).us))
        return 2 * size**3 / min(times) / 1e6
