"""The layer's kernels launched raw into a CUDA graph, as an engine runs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from moe_jax.bench.cases import Shape
from moe_jax.bench.contenders import Contender, Work
from moe_jax.bench.layer import SWIGLU, Layer, Step
from moe_jax.pallas_kernels import compiled
from moe_jax.pallas_kernels.experts import MAX_ROWS, Tile, expert_ffn_spec
from moe_jax.pallas_kernels.plan import plan_spec
from moe_jax.pallas_kernels.prefill import (
    PrefillTile,
    combine_spec,
    down_spec,
    gate_up_spec,
    plan_specs,
)
from moe_jax.pallas_kernels.prefill import triton as prefill
from moe_jax.pallas_kernels.spec import Argument, KernelSpec
from moe_jax.pallas_kernels.tuned import tuned_tile_for

NAME = "device graph"
DTYPE = "bfloat16"


class Launch(NamedTuple):
    """A kernel, and which buffer each argument is that does not bear the buffer's name."""

    spec: KernelSpec
    names: Mapping[str, str] = {}

    def buffer(self, argument: Argument) -> str:
        return self.names.get(argument.name, argument.name)


def layer_launches(shape: Shape, tokens: int, tile: Tile | PrefillTile, *, pdl: bool = False) -> list[Launch]:
    """The launches of one layer.

    Args:
        tile: its kind says by which kernels: those for at most 64 rows, or those for many.
        pdl: with programmatic dependent launch; the kernels for many rows have none.
    """
    hidden, inner, experts, k = shape
    size = (tokens, k, experts, hidden, inner)
    if isinstance(tile, Tile):
        ffn = Launch(expert_ffn_spec(*size, dtype=DTYPE, activation=SWIGLU, tile=tile, pdl=pdl))
        return [ffn] if tokens == 1 else [Launch(plan_spec(tokens, k, experts, tile.block_n, pdl=pdl)), ffn]
    down = down_spec(*size, dtype=DTYPE, tile=tile)
    places = down.outputs[0].shape[0]
    return [
        *map(Launch, plan_specs(tokens, k, experts, tile.block)),
        Launch(
            gate_up_spec(*size, dtype=DTYPE, activation=SWIGLU, tile=tile),
            {"weight_ptr": "gate_up_ptr", "out_ptr": "inner_ptr"},
        ),
        Launch(down, {"x_ptr": "inner_ptr", "weight_ptr": "down_ptr", "out_ptr": "pair_ptr"}),
        Launch(combine_spec(tokens, k, places, hidden, dtype=DTYPE)),
    ]


def shipped_tile(shape: Shape, tokens: int, device_kind: str, capability: int) -> tuple[Tile | PrefillTile, str]:
    """The tile that a call takes on a device, and where it comes from."""
    hidden, inner, experts, k = shape
    size = (tokens, k, experts, hidden, inner, DTYPE)
    if tokens <= MAX_ROWS:
        return tuned_tile_for(*size, device_kind, capability=capability)
    return prefill.tuned_tile_for(*size, capability, device_kind)


def contender(folder: Path | None, capability: int) -> Contender:
    """The shipped tile, with programmatic dependent launch and without.

    Args:
        folder: of cubins; None: compiled here.
        capability: 90 for 9.0.
    """

    def prepare(layer: Layer, steps: Sequence[Step]) -> Iterator[Work]:
        tokens = steps[0].x.shape[0]
        tile, source = shipped_tile(layer.shape, tokens, layer.device.device_kind, capability)
        for pdl in (False, True) if tokens <= MAX_ROWS and capability >= 90 else (False,):
            label = f"{'with' if pdl else 'without'} programmatic dependent launch; tile: {source}"
            yield work(layer, steps, layer_launches(layer.shape, tokens, tile, pdl=pdl), folder, capability, label)

    return Contender(NAME, True, prepare)


def work(
    layer: Layer, steps: Sequence[Step], launches: Sequence[Launch], folder: Path | None, capability: int, label: str
) -> Work:
    """A chain of layers by the launches given.

    Raises:
        InvalidArgument: a cubin is missing in the folder, or of another source.
        CannotServe: the device cannot run it.
    """
    from cuda.core import Device

    from moe_jax.pallas_kernels.launcher import load_kernel

    loaded = [(one, load_kernel(one.spec, kernel_of(one.spec, folder, capability))) for one in launches]
    buffers: dict[str, Array] = {}

    def poison() -> None:
        for one in launches:
            for a in one.spec.arguments:
                name = one.buffer(a)
                if a.role in ("out", "scratch"):
                    worst = np.nan if jnp.issubdtype(a.dtype, jnp.floating) else -7
                    buffers[name] = jax.device_put(jnp.full(a.shape, worst, a.dtype), layer.device)
                elif a.role == "state" and name not in buffers:
                    buffers[name] = jax.device_put(jnp.zeros(a.shape, a.dtype), layer.device)
        jax.block_until_ready(buffers)

    def record(stream: Any) -> None:
        for i, step in enumerate(steps):
            weights = layer.weights(i)
            given = {"x_ptr": step.x, "ids_ptr": step.ids, "scale_ptr": step.scale}
            given |= {"gate_up_ptr": weights.gate_up, "down_ptr": weights.down} | buffers
            for one, kernel in loaded:
                # An absent optional argument may be any address.
                arrays = [given.get(one.buffer(a), step.x) for a in one.spec.arguments]
                kernel.launch(stream, [array.unsafe_buffer_pointer() for array in arrays])

    def result() -> Array:
        poison()
        stream = Device().create_stream()
        record(stream)
        stream.sync()
        return buffers["out_ptr"].copy()

    poison()
    return Work(label, "launches", record, result, loaded[-1][1].compiled.builder)


def kernel_of(spec: KernelSpec, folder: Path | None, capability: int) -> compiled.CompiledKernel:
    """A kernel from a folder of cubins, or compiled here once."""
    if folder is not None:
        return compiled.load(folder, spec, capability)
    if (spec.key, capability) not in _compiled:
        _compiled[spec.key, capability] = compiled.compile_spec(spec, capability)
    return _compiled[spec.key, capability]


_compiled: dict[tuple[str, int], compiled.CompiledKernel] = {}
