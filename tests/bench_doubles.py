"""A timer and a clock for tests of the bench on a machine without a GPU."""

from __future__ import annotations

import jax

from moe_jax.bench.cases import Ceilings
from moe_jax.bench.contenders import Work
from moe_jax.bench.timing import Timing

SLOW = Ceilings(read_tbs=1.5e-6, matmul_tflops=800.0)  # of a device on which two toy steps are a long chain


class FakeTimer:
    """Runs every chain and says what the test wants it to have taken: ``us(work)`` for the whole chain."""

    l2_bytes = 1

    def __init__(self, us=lambda work: 100.0):
        self.us, self.works = us, []

    def ceilings(self) -> Ceilings:
        return SLOW

    def time(self, work: Work) -> Timing:
        jax.block_until_ready(work.run() if work.kind == "jit" else work.result())
        self.works.append(work)
        us = self.us(work)
        return Timing([us * f for f in (0.9, 1.0, 1.0, 1.0, 1.1)], "a note")


class FakeNow:
    """Time that passes only when it is asked for."""

    def __init__(self, step: float = 0.0):
        self.time, self.step = 0.0, step

    def __call__(self) -> float:
        self.time += self.step
        return self.time
