"""Grouped matmul of sorted rows with TMA and wgmma (sm_90), an activation fused into its end.

Weights are the M operand and batch rows the N operand: wgmma takes any multiple of 8 as N, so a tile is cut to the
rows its expert has. One warpgroup loads, two multiply; each of those holds 64 weight rows of two slabs, so that gate
and up of an output stand in the same registers. Two programs of a cluster may take two blocks of one expert and load
its weights once for both. How batch rows are loaded is in `mosaic_rows`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from ..errors import InvalidArgument
from ..grouped_moe.activation import Activation
from .mosaic_rows import AHEAD, AT_ONCE, DEPTH, Gathered, InOrder, Rows

SLAB = 128
"""Weight rows of a slab; a tile has two slabs."""
STEP = 8
"""Batch rows of a unit, the finest cut that wgmma knows."""
CONSUMERS = 2


@dataclass(frozen=True, kw_only=True)
class MosaicTile:
    """How a launch is cut and fed. Nothing here changes the order in which a product is added up.

    Attributes:
        rows: most batch rows of a tile, a multiple of `mosaic_rows.AT_ONCE`; accumulators take as many registers of a
            thread.
        sizes: ascending numbers of batch rows that tiles are compiled for; the last is ``rows``.
        stages: steps of the reduction in shared memory, more than `mosaic_rows.AHEAD`.
        chunk: batch rows written out at a time, a multiple of `STEP`.
        buffers: chunks being written out at once.
        share: whether two programs share the weights of an expert, whose blocks then come in twos.
        programs: programs that share the tiles, one for each multiprocessor.

    Raises:
        InvalidArgument: another number of rows or stages.
    """

    rows: int
    sizes: tuple[int, ...]
    stages: int = 4
    chunk: int = 48
    buffers: int = 2
    share: bool = False
    programs: int = 132

    def __post_init__(self) -> None:
        if self.rows < AT_ONCE or self.rows % AT_ONCE:
            raise InvalidArgument("rows", where="MosaicTile", got=self.rows, wanted=f"a multiple of {AT_ONCE}")
        if self.stages <= AHEAD:  # a step would wait for one that is handed over only after it
            raise InvalidArgument("stages", where="MosaicTile", got=self.stages, wanted=f"{AHEAD + 1} or more")

    @property
    def group(self) -> int:
        """Blocks that a cluster takes at a time, and programs that it has."""
        return 2 if self.share else 1


def slabs(weight: Float[Array, "S R K"], activation: Activation | None) -> tuple[Array, str]:
    """The stack as the kernel addresses it (a reshape, no copy), and how a tile's two slabs stand in it.

    Of ``"halves"`` and ``"pairs"`` one copy takes both slabs, of ``"interleaved"`` and ``"rows"`` one takes each.
    """
    stack, rows, depth = weight.shape
    if activation is not None and activation.gated:
        if activation.layout == "halves":
            return weight.reshape(stack * 2, rows // 2, depth), "halves"
        return weight.reshape(stack, rows // 2, 2, depth), "interleaved"
    if rows % SLAB:
        return weight, "rows"
    return weight.reshape(stack * (rows // SLAB), SLAB, depth), "pairs"


def grouped_matmul(
    x: Float[Array, "P K"],
    weight: Float[Array, "S R K"],
    bias: Float[Array, "S R"] | None,
    blocks: Int32[Array, "B 5"],
    used: Int32[Array, " 1"],
    *,
    activation: Activation | None,
    tile: MosaicTile,
    pair: Int32[Array, " P"] | None = None,
    top_k: int = 1,
    interpret: Any = False,
) -> Float[Array, "P O"]:
    """``activation(x @ weight[row].T + bias[row])`` of each block's rows, in the dtype of ``x``; sums are f32.

    Args:
        x: bf16 or f16 rows, K a multiple of `DEPTH`. Without ``pair``, ``[P, K]``, grouped by expert, each expert's
            from a multiple of `STEP` on.
        blocks: for each block of at most ``tile.rows`` rows: row of the weight stack; number of the expert's first
            block; blocks, first unit and units of the expert, whose units are dealt evenly to its blocks. With
            ``tile.share`` an expert has an even number of blocks.
        used: number of blocks.
        activation: fused; None for the plain product.
        pair: places grouped like that, and ``x`` is ``[T, K]``: place p is row ``pair[p] // top_k``; zeros where
            ``pair[p]`` is negative.
        interpret: a `plgpu.InterpretGPUParams`, to run without a GPU.

    Returns:
        ``[P, I]`` with a gated activation, else ``[P, R]``; a multiple of `DEPTH` columns. Rows of no block are not
        written.
    """
    stack, form = slabs(weight, activation)
    gated_form = form in ("halves", "interleaved")
    outputs = weight.shape[1] // 2 if gated_form else weight.shape[1]
    span = SLAB if gated_form else 2 * SLAB  # outputs of a tile
    columns = -(-outputs // span)
    operands = {"x": x, "weight": stack, "blocks": blocks, "used": used}
    if pair is not None:
        operands["pair"] = pair
    if bias is not None:
        lines = bias.astype(jnp.float32)
        if form == "interleaved":
            lines = jnp.moveaxis(lines.reshape(-1, outputs, 2), 2, 1)
        lines = lines.reshape(-1, 2 if gated_form else 1, outputs)
        operands["bias"] = jnp.pad(lines, ((0, 0), (0, 0), (0, columns * span - outputs)))
    body = functools.partial(
        _body, activation=activation, form=form, tile=tile, outputs=outputs, columns=columns, span=span,
        steps=x.shape[1] // DEPTH, last=blocks.shape[0] - 1, top_k=top_k, interpreted=bool(interpret),
    )  # fmt: skip
    names = (*operands, "out")
    swizzled = (plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(128))

    def smem(*shape: int) -> Any:
        return plgpu.SMEM(shape, x.dtype, transforms=swizzled)

    if tile.share:
        empty = plgpu.ClusterBarrier(collective_axes=("pair",), num_arrivals=CONSUMERS, num_barriers=tile.stages)
    else:
        empty = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tile.stages)
    kernel = plgpu.kernel(
        lambda *refs, **scratch: body(**dict(zip(names, refs, strict=True)), **scratch),
        out_type=jax.ShapeDtypeStruct((x.shape[0] if pair is None else pair.shape[0], outputs), x.dtype),
        grid=(tile.programs // tile.group,),
        grid_names=("cluster",),
        cluster=(tile.group,),
        cluster_names=("pair",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        scratch_types=dict(
            weight_smem=smem(tile.stages, 2, SLAB, DEPTH),
            x_smem=smem(tile.stages, tile.rows, DEPTH),
            out_smem=smem(CONSUMERS, tile.buffers, tile.chunk, 64),
            full=plgpu.Barrier(num_arrivals=2 if form in ("halves", "pairs") else 3, num_barriers=tile.stages),
            empty=empty,
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup, unsafe_no_auto_barriers=True
        ),
        kernel_name="prefill_down" if activation is None else "prefill_gate_up",
        interpret=interpret,
    )
    return kernel(*operands.values())


def _body(
    x, weight, blocks, used, out, *, weight_smem, x_smem, out_smem, full, empty,
    activation, form, tile, outputs, columns, span, steps, last, top_k, interpreted,
    pair: Any = None, bias: Any = None,
):  # fmt: skip
    cluster, rank, me = lax.axis_index("cluster"), lax.axis_index("pair"), lax.axis_index("wg")
    clusters, group, stages = tile.programs // tile.group, jnp.int32(tile.group), tile.stages
    mine = lax.div(lax.div(used[0], group) * columns - cluster + (clusters - 1), jnp.int32(clusters))

    def find(turn):
        """Weight row and column tile, first unit and units of this program's ``turn``-th tile, in two integers."""
        number = cluster + turn * clusters
        line = lax.min(lax.div(number, jnp.int32(columns)) * group, jnp.int32(last))
        row, first, count, unit, units = (blocks[line, i] for i in range(5))
        count = lax.max(count, group)
        # Blocks of an expert go fastest: programs that run together share its weights in L2.
        local, groups = number - lax.div(first, group) * columns, lax.div(count, group)
        column = lax.div(local, groups)
        block = (local - column * groups) * group + rank
        share, over = lax.div(units, count), lax.rem(units, count)
        start = unit + block * share + lax.min(block, over)
        # The multiplying warpgroups carry this through a tile and have few registers to spare.
        return row * 65536 + column, start * 32 + share + (block < over).astype(jnp.int32)

    def elements(found):
        """`find`'s answer in elements. Unpacked after a loop carried it: what divides an index is seen only here."""
        where, extent = found
        start, units = lax.shift_right_logical(extent, 5), extent & 31
        return lax.shift_right_logical(where, 16), (where & 65535) * span, start * STEP, units * STEP

    def advance(slot):
        return lax.select(slot == stages - 1, jnp.int32(0), slot + 1)

    def load(rows: Rows):
        axes = "pair" if tile.share else None

        def one_tile(turn, carry):
            slot, found = carry
            row, output, start, height = elements(found)
            batch = rows.begin(start, height)

            def one_step(step, slot):
                k, target, ready = pl.ds(step * DEPTH, DEPTH), weight_smem.at[slot], full.at[slot]
                plgpu.barrier_wait(empty.at[slot])
                if form == "halves":
                    plgpu.copy_gmem_to_smem(
                        weight.at[pl.ds(row * 2, 2), pl.ds(output, SLAB), k], target, ready, collective_axes=axes
                    )
                elif form == "pairs":
                    # An expert's last tile may take a slab of the next expert. What comes of it lies beyond the last
                    # column.
                    at = pl.ds(row * (outputs // SLAB) + lax.div(output, jnp.int32(SLAB)), 2)
                    plgpu.copy_gmem_to_smem(weight.at[at, :, k], target, ready, collective_axes=axes)
                for slab in range(0 if form in ("halves", "pairs") else 2):
                    part = weight.at[row, pl.ds(output + slab * SLAB, SLAB), k]
                    if form == "interleaved":
                        part = weight.at[row, pl.ds(output, SLAB), slab, k]
                    plgpu.copy_gmem_to_smem(part, target.at[slab], ready, collective_axes=axes)
                rows.step(batch, step, slot, turn * steps + step)
                return advance(slot)

            return lax.fori_loop(0, steps, one_step, slot), find(turn + 1)

        slot, _ = lax.fori_loop(0, mine, one_tile, (jnp.int32(0), find(0)))
        rows.end(slot, mine * steps)
        # Also keeps this program's memory in place until the other of its cluster has finished with it.
        for slot in range(stages):
            plgpu.barrier_wait(empty.at[slot])

    @pl.when(me == CONSUMERS)
    def _load():
        plgpu.set_max_registers(40, action="decrease")
        if pair is None:
            # One warp: every thread of those that start a copy arrives at its barrier.
            plgpu.warp_map(lambda warp: pl.when(warp == 0)(lambda: load(InOrder(x, x_smem, full))))
        else:
            load(Gathered(x, pair, x_smem, full, top_k, interpreted))

    @pl.when(me < CONSUMERS)
    def _multiply():
        plgpu.set_max_registers(232, action="increase")
        for slot in range(stages):
            plgpu.barrier_arrive(empty.at[slot])

        def multiply(rows, slot, first, second):
            def one_step(_, slot):
                plgpu.barrier_wait(full.at[slot])
                batch = x_smem.at[slot, pl.ds(0, rows)].transpose((1, 0))
                for slab, sums in enumerate((first, second)):
                    plgpu.wgmma(sums, weight_smem.at[slot, slab, pl.ds(me * 64, 64)], batch)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(empty.at[slot])
                return advance(slot)

            lax.fori_loop(0, steps, one_step, slot)
            return first[...], second[...]

        def add_bias(sums, row, slab, output):
            line = bias.at[row, slab, pl.ds(output + me * 64, 64)]
            line = plgpu.load(line, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            return sums + lax.broadcast_in_dim(line, sums.shape, (0,))

        def write(value, output, start, rows, limit, done):
            """``value`` of slices of the rows to ``out[start : start + limit]``, its 64 columns from ``output`` on."""
            if outputs == DEPTH:
                # A copy drops the number of the column block where there is one only: what lies beyond the last
                # column, elsewhere left out by the copy engine, would be written over the first.
                limit = lax.select(output < outputs, limit, jnp.int32(0))
            for at in range(0, rows, tile.chunk):
                size = min(tile.chunk, rows - at)
                buffer = out_smem.at[me, done % tile.buffers]
                # What the tile before wrote last may have gone through the same buffer.
                plgpu.wait_smem_to_gmem(tile.buffers - 1 if done else 0, wait_read_only=True)
                done += 1
                buffer.at[pl.ds(0, size)].transpose((1, 0))[...] = value(slice(at, at + size)).astype(x.dtype)
                plgpu.commit_smem()

                def put(unit, height, at=at, buffer=buffer):
                    target = out.at[pl.ds(start + at + unit, height), pl.ds(output, 64)]
                    plgpu.copy_smem_to_gmem(buffer.at[pl.ds(unit, height)], target, commit_group=False)

                whole = at + size <= limit
                pl.when(whole)(functools.partial(put, 0, size))

                @pl.when(jnp.logical_not(whole))
                def _(size=size, at=at, put=put):
                    for unit in range(0, size, STEP):
                        pl.when(at + unit < limit)(functools.partial(put, unit, STEP))

                plgpu.commit_smem_to_gmem_group()
            return done

        def of_size(index, rows, row, output, start, limit, slot):
            sums = plgpu.ACC((64, rows), jnp.float32)
            first, second = pl.run_scoped(functools.partial(multiply, rows, slot), sums, sums)
            column = output + me * 64
            # Finished chunk by chunk, so that few registers hold what is not yet written.
            if form in ("halves", "interleaved"):
                if bias is not None:
                    first, second = add_bias(first, row, 0, output), add_bias(second, row, 1, output)
                write(lambda at: gated(first[:, at], second[:, at], activation), column, start, rows, limit, 0)
            else:
                if bias is not None:
                    first, second = add_bias(first, row, 0, output), add_bias(second, row, 0, output + SLAB)
                finish = squared_relu if activation is not None else lambda h: h
                done = write(lambda at: finish(first[:, at]), column, start, rows, limit, 0)
                write(lambda at: finish(second[:, at]), column + SLAB, start, rows, limit, done)
            # A different last instruction in every size keeps the compiler from merging their ends, which would move
            # accumulators between registers and serialise wgmma. The wait itself is for nothing.
            plgpu.wait_smem_to_gmem(index + tile.buffers, wait_read_only=True)

        def one_tile(turn, carry):
            slot, found = carry
            row, output, start, limit = elements(found)
            following = find(turn + 1)
            which = sum(((limit > size).astype(jnp.int32) for size in tile.sizes[:-1]), jnp.int32(0))
            branches = [functools.partial(of_size, index, size) for index, size in enumerate(tile.sizes)]
            lax.switch(which, branches, row, output, start, limit, slot)
            return lax.rem(slot + steps, jnp.int32(stages)), following

        lax.fori_loop(0, mine, one_tile, (jnp.int32(0), find(0)))
        plgpu.wait_smem_to_gmem(0)


def squared_relu(h: Any) -> Any:
    """``relu(h)**2``."""
    h = jnp.maximum(h, 0.0)
    return h * h


def one_plus_erf(z: Any) -> Any:
    """``1 + erf(z)`` to 2e-7: Abramowitz and Stegun, 7.1.26. Mosaic GPU has no erf for arrays of a warpgroup."""
    root = lax.rsqrt(1.0 + 0.3275911 * jnp.abs(z))
    t = root * root
    series = 0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    tail = t * series * jnp.exp(-z * z)
    return jnp.where(z < 0.0, tail, 2.0 - tail)


def gated(gate: Any, up: Any, activation: Activation) -> Any:
    """The gated activations on f32 arrays, in primitives that a Mosaic GPU kernel has."""
    limit, alpha = activation.limit, activation.alpha

    def logistic(value):
        root = lax.rsqrt(1.0 + jnp.exp(-value))  # two instructions; a division takes many
        return root * root

    match activation.name:
        case "gpt_oss_swiglu":
            assert limit is not None
            assert alpha is not None
            gate = jnp.minimum(gate, limit)
            return gate * logistic(alpha * gate) * (jnp.clip(up, -limit, limit) + 1.0)
        case "geglu_tanh":
            # (1 + tanh(z)) / 2 = logistic(2 z), without the error of the device's tanh
            return gate * logistic(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
        case "geglu_erf":
            return 0.5 * gate * one_plus_erf(gate * 0.7071067811865476) * up
    if limit is None:
        return gate * logistic(gate) * up
    up = jnp.clip(up, -limit, limit)
    if activation.limit_after:
        return jnp.minimum(gate * logistic(gate), limit) * up
    gate = jnp.minimum(gate, limit)
    return gate * logistic(gate) * up
