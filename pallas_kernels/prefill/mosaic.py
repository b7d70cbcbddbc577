"""Experts' feed-forward block for many rows with Mosaic GPU kernels (sm_90), inside ``jax.jit``.

Plan, its table of blocks, gate-up with its activation, down, sum over a token's pairs: five launches or seven. Gate-up
gathers its rows by the plan; what it writes, down reads in order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from ..device import device_of, multiprocessors
from ..dispatch import OutOfScope
from ..grouped_moe.weights import ExpertWeights, MoEConfig
from ..in_jit import call
from ..plan.specs import power_of_two
from ..route import Routing
from ..spec import Argument, KernelSpec
from ..tuned import Chosen, choose
from .mosaic_kernel import DEPTH, STEP, MosaicTile, grouped_matmul
from .specs import MAX_PAIRS
from .steps import combine, plan

MIN_ROWS = 65


def blocks_spec(pairs: int, experts: int, tile: MosaicTile) -> KernelSpec:
    """The table of a tile's blocks.

    Input: ``units`` int32 ``[E]``, blocks of each expert in a plan with blocks of `STEP` places. Outputs: ``blocks``
    int32 ``[B, 5]`` as `grouped_matmul` takes them, of which ``used`` int32 ``[1]`` are written.
    """
    from .mosaic_blocks_triton import table_of_blocks

    blocks, at_once = table_size(pairs, experts, tile), 128
    return KernelSpec(
        name="prefill_blocks",
        function=table_of_blocks,
        arguments=(
            Argument("units_ptr", "int32", (experts,), "in"),
            Argument("blocks_ptr", "int32", (blocks, 5), "out"),
            Argument("used_ptr", "int32", (1,), "out"),
        ),
        constexprs=(
            ("EXPERTS", experts),
            ("EXPERTS_POW2", max(32, power_of_two(experts))),
            ("PER_BLOCK", tile.rows // STEP),
            ("GROUP", tile.group),
            ("BLOCKS", blocks),
            ("AT_ONCE", at_once),
        ),
        grid=(-(-blocks // at_once), 1, 1),
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=False,
        pdl=False,
        reference=functools.partial(reference_blocks, pairs=pairs, tile=tile),
    )


def table_size(pairs: int, experts: int, tile: MosaicTile) -> int:
    """Most blocks of at most ``tile.rows`` places that the pairs of all experts fill, in groups."""
    most, at_once = max(1, min(pairs, experts)), tile.rows * tile.group
    return tile.group * ((pairs + most * STEP) // at_once + most)


def reference_blocks(units: Int32[Array, " E"], *, pairs: int, tile: MosaicTile) -> tuple[Array, Array]:
    """`blocks_spec` in `jax.numpy`; what the kernel leaves unwritten is 0 here."""
    units = jnp.asarray(units)
    experts = units.shape[0]
    count = tile.group * -(-units // (tile.rows // STEP * tile.group))
    last = jnp.cumsum(count)
    size = table_size(pairs, experts, tile)
    owner = (last[None, :] <= jnp.arange(size)[:, None]).sum(1, dtype=jnp.int32)
    at = jnp.minimum(owner, experts - 1)
    table = jnp.stack([at, (last - count)[at], count[at], (jnp.cumsum(units) - units)[at], units[at]], 1)
    table = jnp.where((owner < experts)[:, None], table, 0).astype(jnp.int32)
    return table, last[-1:].astype(jnp.int32)


def mosaic_tile_for(pairs: int, experts: int) -> MosaicTile:
    """The tile for a launch: the best of those measured on an H200 at `benchmarks/mosaic_sweep.py`'s shapes.

    Two programs share weights where an expert has rows for two tiles.
    """
    return MosaicTile(rows=144, sizes=(32, 64, 96, 112, 120, 128, 136, 144), share=pairs > 144 * experts)


def candidates(shape: Sequence[int], tokens: int) -> list[MosaicTile]:
    """Tiles to try for (H, I, E, k), the heuristic's first."""
    _, _, experts, top_k = shape
    base = mosaic_tile_for(tokens * top_k, experts)
    narrow = replace(base, rows=128, sizes=tuple(size for size in base.sizes if size <= 128))
    return [replace(tile, share=share) for tile in (base, narrow) for share in (base.share, not base.share)]


def chosen_tile(x: Float[Array, "T H"], routing: Routing, sizes: tuple[int, ...]) -> Chosen[MosaicTile]:
    """The tile of a call, tuned or `mosaic_tile_for`'s, and which of the two.

    Args:
        sizes: experts E, hidden H, intermediate I.
    """
    (tokens, top_k), (experts, hidden, inner) = routing.ids.shape, sizes
    device = device_of(x)
    return _chosen(
        tokens, top_k, experts, hidden, inner, x.dtype.name, device.device_kind, multiprocessors(device)
    )  # fmt: skip


@functools.cache
def _chosen(
    tokens: int, top_k: int, experts: int, hidden: int, inner: int, dtype: str, device_kind: str, programs: int
) -> Chosen[MosaicTile]:
    base = mosaic_tile_for(tokens * top_k, experts)
    base = replace(base, programs=max(base.group, programs // base.group * base.group))
    return choose("prefill_mosaic", base, (hidden, inner, experts, top_k), tokens, dtype, device_kind)


def ffn(
    x: Float[Array, "T H"],
    routing: Routing,
    weights: ExpertWeights,
    config: MoEConfig,
    residual: Float[Array, "T H"] | None = None,
    *,
    tile: MosaicTile | None = None,
) -> Float[Array, "T H"]:
    """Every pair through its expert; a token's pairs weighted and added in rank order, then ``residual``.

    A pair's vector is rounded to the dtype of ``x`` before the sum, which is f32. Its bits depend on its row and its
    expert alone, not on what else the call holds.

    Args:
        x: bf16 or f16, T at least 1; H and I multiples of 64.
        routing: f32 weights and int32 ids ``[T, k]``; an id of -1 or E adds exactly 0.
        tile: by default `chosen_tile`.

    Raises:
        InvalidArgument: more than `MAX_PAIRS` pairs.
    """
    tokens = x.shape[0]
    experts = weights.down.shape[0]
    top_k = routing.ids.shape[1]
    tile = tile or chosen_tile(x, routing, weights.down.shape).tile
    planned = plan(routing.ids, experts, STEP)
    blocks, used = call(_blocks_spec(tokens * top_k, experts, tile), (planned.blocks,))
    inner_rows = grouped_matmul(
        x, weights.gate_up, weights.gate_up_bias, blocks, used,
        activation=config.activation, tile=tile, pair=planned.block_pair.reshape(-1), top_k=top_k,
    )  # fmt: skip
    pair = grouped_matmul(inner_rows, weights.down, weights.down_bias, blocks, used, activation=None, tile=tile)
    return combine(pair, planned.place, routing.weights, residual)


_blocks_spec = functools.cache(blocks_spec)


def refusal(x: Any, routing: Any, weights: Any, config: MoEConfig) -> str | None:
    """Why `ffn` cannot serve a call, or None, as far as shapes and dtypes go."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return OutOfScope(f"{x.dtype.name} rows: the kernels take bfloat16 and float16")
    tokens, hidden = x.shape
    inner = weights.down.shape[2]
    if tokens < MIN_ROWS:
        return OutOfScope(f"{tokens} rows: the kernels are made for {MIN_ROWS} and more")
    if routing.ids.size > MAX_PAIRS:
        return OutOfScope(f"{routing.ids.size} pairs of row and expert: the kernels take {MAX_PAIRS} at most")
    if hidden % DEPTH or inner % DEPTH:
        return OutOfScope(f"H={hidden} and I={inner}: the kernels take multiples of {DEPTH}")
    return None
