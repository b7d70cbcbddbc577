"""What takes part in a measurement, and the back ends of `grouped_moe` as such."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Float

from moe_jax.bench.layer import Layer, Step
from moe_jax.pallas_kernels.grouped_moe import explain, grouped_moe
from moe_jax.pallas_kernels.grouped_moe.api import GROUPED_MOE
from moe_jax.pallas_kernels.route import Routing


class Work(NamedTuple):
    """A chain of steps, ready to run.

    Attributes:
        configuration: what tells it from the contender's other ones.
        kind: how it is timed. ``"launches"``: ``run(builder)`` records kernel launches into a graph; ``"torch"``:
            ``run()`` is captured by PyTorch; ``"jit"``: ``run()`` gives JAX arrays, timed by the host's clock.
        run: starts the chain.
        result: runs it once and gives the last step's output; buffers that can be are poisoned before.
        builder: what compiled the kernels, where that is a choice.
    """

    configuration: str
    kind: Literal["launches", "torch", "jit"]
    run: Callable[..., Any]
    result: Callable[[], Any]
    builder: str | None = None


class Contender(NamedTuple):
    """Something that computes the whole layer, sorting left out for peers (see docs/benchmarks.md).

    Attributes:
        prepare: gives its configurations for a chain, each made when it is asked for. Raises `CannotServe` where it
            cannot take part.
    """

    name: str
    ours: bool
    prepare: Callable[[Layer, Sequence[Step]], Iterator[Work]]


def chain[Inputs](
    one: Callable[[Float[Array, "T H"], Inputs], Float[Array, "T H"]], rows: Sequence[Array], inputs: Sequence[Inputs]
) -> tuple[Callable[[], list[Array]], Callable[[], Array]]:
    """`Work.run` and `Work.result` of a JAX function: all steps in one ``jit``, one after the other."""
    once = jax.jit(one)  # traced and lowered for the first step, which for some kernels takes seconds

    @jax.jit
    def together(rows, inputs):
        outs: list[Array] = []
        for x, given in zip(rows, inputs, strict=True):
            if outs:
                x, _ = lax.optimization_barrier((x, outs[-1]))
            outs.append(once(x, given))
        return outs

    rows, inputs = list(rows), list(inputs)
    return lambda: together(rows, inputs), lambda: together(rows, inputs)[-1]


def back_ends() -> list[Contender]:
    """The back ends of `grouped_moe` inside ``jit``, best first."""
    return [
        Contender(f"jit: {backend.name}", True, lambda layer, steps, name=backend.name: _back_end(name, layer, steps))
        for backend in GROUPED_MOE.backends
    ]


def _back_end(name: str, layer: Layer, steps: Sequence[Step]) -> Iterator[Work]:
    given = [(Routing(step.scale, step.ids), layer.weights(i)) for i, step in enumerate(steps)]
    explain(steps[0].x, *given[0], layer.config, backend=name)  # raises where it declines

    def one(x, given):
        routing, weights = given
        return grouped_moe(x, routing, weights, layer.config, backend=name)

    yield Work("default", "jit", *chain(one, [step.x for step in steps], given))
