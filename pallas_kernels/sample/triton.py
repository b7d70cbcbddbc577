"""The next token of each row: greedy, or a draw with temperature, top-k and top-p. Two launches over the vocabulary.

A draw is the argmax of logits plus Gumbel noise over the tokens that top-k and top-p keep. It is found without a
sort: the best token of all is taken, its place in the ranking is counted, and when it falls outside, so do all that
rank after it, and the search goes on among those before it. Counts and sums are integers, comparisons have no ties
(equal ones go by index), so the order of the work changes nothing. docs/kernels-decode.md has the reasoning.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BIG = tl.constexpr(0x7FFFFFFF)
LOWEST = tl.constexpr(-(2**31))


@triton.jit
def _ordered(values):
    """f32 to int32 of the same order; 0.0 and -0.0 are equal, NaN is -inf."""
    bits = (tl.where(values == values, values, float("-inf")) + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _argmax(key, index):
    """Largest key and the lowest index that has it."""
    top = tl.max(key, 0)
    return top, tl.min(tl.where(key == top, index, BIG), 0)


@triton.jit
def _rotate(x, BY: tl.constexpr):
    return (x << BY) | (x >> (32 - BY))


@triton.jit
def _four(x, y, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    x += y
    y = _rotate(y, A) ^ x
    x += y
    y = _rotate(y, B) ^ x
    x += y
    y = _rotate(y, C) ^ x
    x += y
    y = _rotate(y, D) ^ x
    return x, y


@triton.jit
def threefry(key0, key1, x, y):
    """Threefry-2x32 with 20 rounds (doi:10.1145/2063384.2063405) on uint32."""
    key2 = key0 ^ key1 ^ 0x1BD11BDA
    x, y = _four(x + key0, y + key1, 13, 15, 26, 6)
    x, y = _four(x + key1, y + key2 + 1, 17, 29, 16, 24)
    x, y = _four(x + key2, y + key0 + 2, 13, 15, 26, 6)
    x, y = _four(x + key0, y + key1 + 3, 17, 29, 16, 24)
    x, y = _four(x + key1, y + key2 + 4, 13, 15, 26, 6)
    return x + key2, y + key0 + 5


@triton.jit
def _gumbel(key0, key1, index):
    """Gumbel noise of a token, from 64 random bits: fine near 0, where improbable tokens are drawn."""
    high, low = threefry(key0, key1, tl.zeros_like(index).to(tl.uint32), index.to(tl.uint32))
    # 24 bits at a time, so that no conversion rounds up to 1.
    uniform = (high >> 8).to(tl.float32) * (2.0**-24)
    uniform += ((high & 0xFF).to(tl.float32) + ((low >> 8).to(tl.float32) + 0.5) * (2.0**-24)) * (2.0**-32)
    uniform = tl.minimum(uniform, 1.0 - 2.0**-24)
    # log1p(-u): exact difference of the rounded 1 - u corrects the rounding.
    rest = 1.0 - uniform
    lost = 1.0 - rest
    exponential = tl.where(lost == 0.0, uniform, -tl.log(rest) * (uniform / tl.where(lost == 0.0, 1.0, lost)))
    return -tl.log(exponential)


@triton.jit
def _load(row_ptr, index, V: tl.constexpr):
    value = tl.load(row_ptr + index, mask=index < V, other=float("-inf")).to(tl.float32)
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def _perturbed(logits, largest, temperature, key0, key1, index):
    """Order of the logits with their noise. The maximum goes to 0 first, so that a tiny temperature cannot overflow."""
    return _ordered((logits - largest) / temperature + _gumbel(key0, key1, index))


@triton.jit
def _weight(logits, largest, temperature):
    """Probability relative to the most probable token, in units of 2**-32: integers add up the same in any order."""
    return (tl.exp((logits - largest) / temperature) * 4294967296.0).to(tl.int64)


@triton.jit
def sample_scan(
    logits_ptr,
    position_ptr,
    top_ptr,
    at_ptr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Largest logit of a chunk of a row and its place. See `sample.specs.sample_specs`."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(position_ptr + row) >= 0:
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        value = _load(logits_ptr + row.to(tl.int64) * V, index, V)
        _, at = _argmax(tl.where(index < V, _ordered(value), LOWEST), index)
        tl.store(top_ptr + row * CHUNKS + chunk, tl.max(value, 0))
        tl.store(at_ptr + row * CHUNKS + chunk, at)


@triton.jit
def sample_draw(
    logits_ptr,
    position_ptr,
    sequence_ptr,
    seed_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    top_ptr,
    at_ptr,
    noisy_ptr,
    noisy_at_ptr,
    sum_ptr,
    state_ptr,
    token_ptr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    """See `sample.specs.sample_specs` for the arguments."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    position = tl.load(position_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    part = tl.arange(0, CHUNKS_POW2)
    is_part = part < CHUNKS
    tops = tl.load(top_ptr + row * CHUNKS + part, mask=is_part, other=float("-inf"))
    largest = tl.max(tops, 0)
    greedy = (temperature <= 0.0) | (largest == float("-inf")) | (largest == float("inf"))
    if position < 0:
        if chunk == 0:
            tl.store(token_ptr + row, -1)
    elif greedy:
        if chunk == 0:
            places = tl.load(at_ptr + row * CHUNKS + part, mask=is_part, other=0)
            _, winner = _argmax(tl.where(is_part, _ordered(tops), LOWEST), part)
            tl.store(token_ptr + row, tl.sum(tl.where(part == winner, places, 0), 0))
    else:
        row_ptr = logits_ptr + row.to(tl.int64) * V
        seed0 = tl.load(seed_ptr + row * 2).to(tl.uint32, bitcast=True)
        seed1 = tl.load(seed_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
        sequence = tl.load(sequence_ptr + row).to(tl.uint32, bitcast=True)
        key0, key1 = threefry(seed0, seed1, sequence, position.to(tl.uint32, bitcast=True))
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        logits = _load(row_ptr, index, V)
        noisy = _perturbed(logits, largest, temperature, key0, key1, index)
        top, at = _argmax(tl.where(index < V, noisy, LOWEST), index)
        # int64 sums kept in an int32 buffer.
        sums = (sum_ptr + row * (2 * CHUNKS)).to(tl.pointer_type(tl.int64))
        tl.store(noisy_ptr + row * CHUNKS + chunk, top)
        tl.store(noisy_at_ptr + row * CHUNKS + chunk, at)
        tl.store(sums + chunk, tl.sum(_weight(logits, largest, temperature), 0))
        tl.debug_barrier()
        if tl.atomic_add(state_ptr + row, 1, sem="acq_rel") == CHUNKS - 1:
            tl.debug_barrier()
            tl.store(state_ptr + row, 0)
            best = tl.load(noisy_ptr + row * CHUNKS + part, mask=is_part, other=LOWEST, cache_modifier=".cg")
            best_at = tl.load(noisy_at_ptr + row * CHUNKS + part, mask=is_part, other=BIG, cache_modifier=".cg")
            whole = tl.sum(tl.load(sums + part, mask=is_part, other=0, cache_modifier=".cg"), 0)
            keep = tl.load(top_k_ptr + row)
            keep = tl.where(keep <= 0, V, keep)
            top_p = tl.load(top_p_ptr + row)
            # Weight that may stand before a token: none of it for the first, whatever top_p is.
            allowed = tl.where(top_p >= 1.0, whole, (top_p * whole.to(tl.float32)).to(tl.int64))
            allowed = tl.maximum(allowed, 1)
            bound = (top_p < 1.0) | (keep < V)
            _, token = _argmax(best, best_at)
            # Fewer values at a time than above: more is live here.
            STEP: tl.constexpr = CHUNK if CHUNK < 1024 else 1024
            searching = bound
            while searching:
                limit = _ordered(tl.load(row_ptr + token).to(tl.float32))
                before, weight = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
                for c in range(0, CHUNKS * (CHUNK // STEP)):
                    # A chunk whose largest logit ranks behind holds nothing before the token.
                    if _ordered(tl.load(top_ptr + row * CHUNKS + c // (CHUNK // STEP))) >= limit:
                        places = c * STEP + tl.arange(0, STEP)
                        some = _load(row_ptr, places, V)
                        key = _ordered(some)
                        ahead = (key > limit) | ((key == limit) & (places < token))
                        ahead = ahead & (places < V)
                        before += tl.sum(ahead.to(tl.int32), 0)
                        weight += tl.sum(tl.where(ahead, _weight(some, largest, temperature), 0), 0)
                searching = (before >= keep) | (weight >= allowed)
                if searching:
                    # Out, and with it all that rank behind it: the best of those before it.
                    found, found_at = tl.full([], LOWEST, tl.int32), tl.full([], BIG, tl.int32)
                    for c in range(0, CHUNKS * (CHUNK // STEP)):
                        if _ordered(tl.load(top_ptr + row * CHUNKS + c // (CHUNK // STEP))) >= limit:
                            places = c * STEP + tl.arange(0, STEP)
                            some = _load(row_ptr, places, V)
                            key = _ordered(some)
                            ahead = ((key > limit) | ((key == limit) & (places < token))) & (places < V)
                            noise = _perturbed(some, largest, temperature, key0, key1, places)
                            top, at = _argmax(tl.where(ahead, noise, LOWEST), places)
                            better = (top > found) | ((top == found) & (at < found_at))
                            found = tl.where(better, top, found)
                            found_at = tl.where(better, at, found_at)
                    token = found_at
            tl.store(token_ptr + row, token)
