"""How batch rows come into the shared memory of `mosaic_kernel`: in order, or gathered.

Rows in order are one tile for the tensor copy engine (TMA). That of sm_90 cannot gather, so rows that a table names
are copied by the threads of a whole warpgroup, 16 bytes at a time, to where the swizzle of the tile has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

DEPTH = 64
"""Reduced elements of a step: the 128 bytes of a swizzle. Steps of 32 took a sixth longer (H200)."""
PIECES = 8
"""Pieces of 16 bytes of a row's step, each a thread's."""
AT_ONCE = 16
"""Rows that a warpgroup copies at once. A multiple of the swizzle's 8, so a thread's rows are swizzled alike."""
AHEAD = 2
"""Gathered steps that are asked for after one before that is waited for and handed over."""


class Rows(Protocol):
    """Batch rows of a tile, step by step of the reduction. ``count`` is the number of steps before this one."""

    def begin(self, start: Any, height: Any) -> Any:
        """What `step` needs of a tile whose rows are the ``height`` places from ``start`` on."""

    def step(self, tile: Any, step: Any, slot: Any, count: Any) -> None:
        """Bring a step of the tile's rows into ``slot``."""

    def end(self, slot: Any, count: Any) -> None:
        """After the last step of the last tile; ``slot`` is the one after it."""


@dataclass(frozen=True)
class InOrder:
    """Rows that stand side by side in ``x`` ``[P, K]``. For one warp."""

    x: Any
    x_smem: Any
    full: Any

    def begin(self, start: Any, height: Any) -> Any:
        return start

    def step(self, tile: Any, step: Any, slot: Any, count: Any) -> None:
        rows = self.x.at[pl.ds(tile, self.x_smem.shape[1]), pl.ds(step * DEPTH, DEPTH)]
        plgpu.copy_gmem_to_smem(rows, self.x_smem.at[slot], self.full.at[slot])

    def end(self, slot: Any, count: Any) -> None:
        pass


@dataclass(frozen=True)
class Gathered:
    """Row ``pair[place] // top_k`` of ``x`` ``[T, K]`` for each place; zeros where ``pair`` is negative, and past the
    tile's height. For a whole warpgroup.
    """

    x: Any
    pair: Any
    x_smem: Any
    full: Any
    top_k: int
    interpreted: bool

    def begin(self, start: Any, height: Any) -> Any:
        if self.interpreted:
            return start, height
        return _tokens(self.pair, start, height, self.x_smem.shape[1], self.top_k)

    def step(self, tile: Any, step: Any, slot: Any, count: Any) -> None:
        if self.interpreted:
            start, height = tile
            self._copy_interpreted(start, height, step, slot)
        else:
            _copy(self.x, self.x_smem.at[slot], tile, step * DEPTH)
            _wait(AHEAD)
        # What threads have copied is made visible to the matrix unit, and all of them have.
        plgpu.commit_smem()
        self._hand_over(slot, count, AHEAD)

    def end(self, slot: Any, count: Any) -> None:
        if not self.interpreted:
            _wait(0)
        plgpu.commit_smem()
        for back in range(AHEAD, 0, -1):
            self._hand_over(slot, count, back)

    def _hand_over(self, slot: Any, count: Any, back: int) -> None:
        """The step that was ``back`` before this one is there, if there was one."""
        stages = self.x_smem.shape[0]

        @pl.when(count >= back)
        def _():
            plgpu.barrier_arrive(self.full.at[lax.rem(slot + jnp.int32(stages - back), jnp.int32(stages))])

    def _copy_interpreted(self, start: Any, height: Any, step: Any, slot: Any) -> None:
        """`_copy` for Pallas' interpreter, which knows no code below Pallas."""

        def one_row(row, _):
            pair = self.pair[lax.select(row < height, start + row, jnp.int32(0))]
            there = (row < height) & (pair >= 0)
            token = lax.max(lax.div(pair, jnp.int32(self.top_k)), jnp.int32(0))
            value = self.x[token, pl.ds(step * DEPTH, DEPTH)]
            self.x_smem[slot, row] = jnp.where(there, value, jnp.zeros_like(value))
            return _

        lax.fori_loop(0, self.x_smem.shape[1], one_row, 0)


_scalar = plgpu.Layout.WG_SPLAT(())


def _constant(value: int) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, value)


def _thread() -> tuple[Any, Any]:
    """Of this thread's place in its warpgroup: the first row that it copies, and its piece."""
    thread = arith.remui(mgpu.utils.thread_idx(), _constant(PIECES * AT_ONCE))
    return arith.divui(thread, _constant(PIECES)), arith.remui(thread, _constant(PIECES))


def _tokens(pair: Any, start: Any, height: Any, rows: int, top_k: int) -> Any:
    """The batch row of each row of a tile, once for each of its pieces: int32 ``[rows * PIECES]``; -1: none.

    Of this layout a thread holds one for each row that it copies.
    """
    layout = plgpu.Layout.WG_STRIDED((rows * PIECES,), vec_size=1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _scalar, _scalar),
        return_type=plgpu.ShapeDtypeStruct((rows * PIECES,), jnp.int32, layout=layout),
    )
    def look_up(_, pair, start, height):
        i32 = ir.IntegerType.get_signless(32)
        start, height = start.registers.item(), height.registers.item()
        line, _ = _thread()
        table, zero, none = mgpu.utils.memref_ptr(pair), _constant(0), _constant(-1)
        found = []
        for first in range(0, rows, AT_ONCE):
            row = arith.addi(line, _constant(first))
            inside = arith.cmpi(arith.CmpIPredicate.slt, row, height)
            at = arith.select(inside, arith.addi(start, row), zero)
            number = llvm.load(i32, mgpu.utils.getelementptr(table, [at], i32))
            there = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.sge, number, zero))
            token = arith.select(there, arith.divui(number, _constant(top_k)), none)
            found.append(vector.broadcast(ir.VectorType.get((1,), i32), token))
        return mgpu.FragmentedArray(_registers=np.array(found, dtype=object), _layout=layout.to_mgpu(), _is_signed=True)

    return look_up(pair, start, height)


def _copy(x: Any, target: Any, tokens: Any, column: Any) -> None:
    """A step of gathered rows into a swizzled tile ``[rows, DEPTH]``; a group of asynchronous copies."""
    hidden = x.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.RefType((plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(128))),
            plgpu.Layout.WG_STRIDED(tokens.shape, vec_size=1),
            _scalar,
        )
    )
    def copy(_, x, target, tokens, column):
        element = ir.MemRefType(x.type).element_type
        i8, i64 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(64)
        line, piece = _thread()
        # A row is 128 bytes; piece p of row r stands at p ^ r % 8.
        swizzled = arith.xori(piece, arith.remui(line, _constant(8)))
        offset = arith.addi(arith.muli(line, _constant(128)), arith.muli(swizzled, _constant(16)))
        into = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(target), [offset], i8)
        column = arith.addi(column.registers.item(), arith.muli(piece, _constant(8)))
        column = arith.extsi(i64, column)
        source = llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(x))
        stride = arith.constant(i64, hidden)
        for number, register in enumerate(tokens.registers.flat):
            token = vector.extract(register, [], [0])
            there = arith.cmpi(arith.CmpIPredicate.sge, token, _constant(0))
            row = arith.extsi(i64, arith.select(there, token, _constant(0)))
            at = arith.addi(arith.muli(row, stride), column)
            nvvm.cp_async_shared_global(
                mgpu.utils.getelementptr(into, [number * AT_ONCE * 128], i8),
                mgpu.utils.getelementptr(source, [at], element),
                16,
                nvvm.LoadCacheModifierKind.CG,
                cp_size=arith.select(there, _constant(16), _constant(0)),
            )
        nvvm.cp_async_commit_group()

    copy(x, target, tokens, column)


def _wait(groups: int) -> None:
    """Until all but the last ``groups`` groups of this thread's copies are there."""

    @plgpu.inline_mgpu()
    def wait(_):
        nvvm.cp_async_wait_group(groups)

    wait()
