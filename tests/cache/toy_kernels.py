"""The kernels of the toy model for a CUDA device; `toy_step` has the same functions in NumPy, and says what they do.

All numbers are integers below 2**24 in size, so no order of a sum and no contraction changes a bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wrap(value):
    return value - 256.0 * tl.floor(value * 0.00390625)


@triton.jit
def modulo(value, n):
    """As NumPy's, never negative."""
    rest = value % n
    return tl.where(rest < 0, rest + n, rest)


@triton.jit
def embed(
    tokens, adapter, live, embedding, adapters, x, TOKENS: tl.constexpr, ADAPTERS: tl.constexpr, HIDDEN: tl.constexpr
):
    row, at = tl.program_id(0), tl.arange(0, HIDDEN)
    token, own = modulo(tl.load(tokens + row), TOKENS), modulo(tl.load(adapter + row), ADAPTERS)
    value = wrap(tl.load(embedding + token * HIDDEN + at) + tl.load(adapters + own * HIDDEN + at))
    tl.store(x + row * HIDDEN + at, tl.where(tl.load(live + row) > 0, value, 0.0))


@triton.jit
def route(
    x, router, ids, scores, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, HIDDEN: tl.constexpr
):
    row, at, expert = tl.program_id(0), tl.arange(0, HIDDEN), tl.arange(0, BLOCK)
    there = expert < EXPERTS
    weight = tl.load(router + expert[:, None] * HIDDEN + at[None, :], mask=there[:, None], other=0.0)
    logits = tl.where(there, tl.sum(weight * tl.load(x + row * HIDDEN + at)[None, :], 1), -1e30)
    for k in tl.static_range(TOP_K):
        best = tl.max(logits, 0)
        choice = tl.min(tl.where(logits == best, expert, BLOCK), 0)
        tl.store(ids + row * TOP_K + k, choice)
        tl.store(scores + row * TOP_K + k, 1.0 + wrap(best))
        logits = tl.where(expert == choice, -1e30, logits)


@triton.jit
def experts(
    x,
    ids,
    scores,
    slot_of,
    gate_up,
    down,
    y,
    hidden,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    APART: tl.constexpr,
):
    row, at, inner = tl.program_id(0), tl.arange(0, HIDDEN), tl.arange(0, WIDTH)
    given = tl.load(x + row * HIDDEN + at)
    total = given
    for k in tl.static_range(TOP_K):
        expert = modulo(tl.load(ids + row * TOP_K + k), EXPERTS)
        slot = modulo(tl.load(slot_of + expert), SLOTS)
        bank = gate_up + slot * 2 * WIDTH * HIDDEN + inner[:, None] * HIDDEN + at[None, :]
        gate = wrap(tl.sum(tl.load(bank) * given[None, :], 1))
        up = wrap(tl.sum(tl.load(bank + WIDTH * HIDDEN) * given[None, :], 1))
        own = hidden + (row * TOP_K + k) * WIDTH + inner
        tl.store(own, wrap(gate * up))
        tl.debug_barrier()
        bank = down + slot * APART * HIDDEN * WIDTH + at[:, None] * WIDTH + inner[None, :]
        pair = wrap(tl.sum(tl.load(bank) * tl.load(own)[None, :], 1))
        total += tl.load(scores + row * TOP_K + k) * pair
    tl.store(y + row * HIDDEN + at, wrap(total))


@triton.jit
def append(y, position, sequence, live, kv, SEQUENCES: tl.constexpr, POSITIONS: tl.constexpr, HIDDEN: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, HIDDEN)
    place = modulo(tl.load(sequence + row), SEQUENCES) * POSITIONS + modulo(tl.load(position + row), POSITIONS)
    if tl.load(live + row) != 0:
        tl.store(kv + place * HIDDEN + at, tl.load(y + row * HIDDEN + at))


@triton.jit
def attend(y, position, sequence, kv, x, SEQUENCES: tl.constexpr, POSITIONS: tl.constexpr, HIDDEN: tl.constexpr):
    row, at, past = tl.program_id(0), tl.arange(0, HIDDEN), tl.arange(0, POSITIONS)
    first = modulo(tl.load(sequence + row), SEQUENCES) * POSITIONS
    seen = past <= modulo(tl.load(position + row), POSITIONS)
    values = tl.load(kv + (first + past)[:, None] * HIDDEN + at[None, :], mask=seen[:, None], other=0.0)
    tl.store(x + row * HIDDEN + at, wrap(tl.load(y + row * HIDDEN + at) + tl.sum(values, 0)))


@triton.jit
def head(x, out_weights, logits, next, TOKENS: tl.constexpr, HIDDEN: tl.constexpr):
    row, at, token = tl.program_id(0), tl.arange(0, HIDDEN), tl.arange(0, TOKENS)
    weight = tl.load(out_weights + token[:, None] * HIDDEN + at[None, :])
    values = tl.sum(weight * tl.load(x + row * HIDDEN + at)[None, :], 1) + 0.0
    tl.store(logits + row * TOKENS + token, values)
    tl.store(next + row, tl.min(tl.where(values == tl.max(values, 0), token, TOKENS), 0))


@triton.jit
def count(live, counter, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    tl.store(counter, tl.load(counter) + tl.sum(tl.load(live + row, mask=row < ROWS, other=0), 0))
