"""The next token of each row: greedy, or a draw with temperature, top-k and top-p. Three launches, no sort.

A draw is the argmax of logits plus Gumbel noise over the tokens that top-k and top-p keep. The first launch reads the
vocabulary once and bounds the logits that can be kept from below; the second gathers the few tokens over that bound;
the third draws among them: the best of all is taken, its place in the ranking is counted, and when it falls outside,
so do all that rank after it, and the search goes on among those before it. Counts and weights are integers and
comparisons have no ties (equal ones go by index), so neither the order of the work nor how tight the bound is changes
a token. docs/kernels-decode.md has the reasoning.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BIG = tl.constexpr(0x7FFFFFFF)
LOWEST = tl.constexpr(-(2**31))
# Weight of the most probable token: integers add up the same in any order.
SCALE = tl.constexpr(2.0**40)
# What a row's token comes from: it is known, a list of the tokens over a bound, every token.
SETTLED = tl.constexpr(0)
LISTED = tl.constexpr(1)
EVERY = tl.constexpr(2)


@triton.jit
def ordered(values):
    """f32 to int32 of the same order; 0.0 and -0.0 are equal, NaN is -inf."""
    bits = (tl.where(values == values, values, float("-inf")) + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def argmax(key, index):
    """Largest key and the lowest index that has it."""
    top = tl.max(key, 0)
    return top, tl.min(tl.where(key == top, index, BIG), 0)


@triton.jit
def four(x, y, a, b, c, d):
    x += y
    y = ((y << a) | (y >> (32 - a))) ^ x
    x += y
    y = ((y << b) | (y >> (32 - b))) ^ x
    x += y
    y = ((y << c) | (y >> (32 - c))) ^ x
    x += y
    y = ((y << d) | (y >> (32 - d))) ^ x
    return x, y


@triton.jit
def threefry(key0, key1, x, y):
    """Threefry-2x32 with 20 rounds (doi:10.1145/2063384.2063405) on uint32."""
    key2 = key0 ^ key1 ^ 0x1BD11BDA
    x, y = four(x + key0, y + key1, 13, 15, 26, 6)
    x, y = four(x + key1, y + key2 + 1, 17, 29, 16, 24)
    x, y = four(x + key2, y + key0 + 2, 13, 15, 26, 6)
    x, y = four(x + key0, y + key1 + 3, 17, 29, 16, 24)
    x, y = four(x + key1, y + key2 + 4, 13, 15, 26, 6)
    return x + key2, y + key0 + 5


@triton.jit
def gumbel(key0, key1, index):
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
def perturbed(logits, largest, temperature, key0, key1, index):
    """Order of the logits with their noise. The maximum goes to 0 first, so that a tiny temperature cannot overflow."""
    return ordered((logits - largest) / temperature + gumbel(key0, key1, index))


@triton.jit
def weight_of(logits, largest, temperature):
    """Probability relative to the most probable token, in units of 2**-40."""
    return (tl.exp((logits - largest) / temperature) * SCALE).to(tl.int64)


@triton.jit
def mass_of(logits, largest, temperature):
    """Probability relative to ``largest``; 0 where that is -inf, when nothing of these has any."""
    return tl.where(largest == float("-inf"), 0.0, tl.exp((logits - largest) / temperature))


@triton.jit
def sample_scan(
    logits_ptr,
    position_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    state_ptr,
    at_ptr,
    mass_ptr,
    top_ptr,
    unit_ptr,
    bound_ptr,
    way_ptr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_POW2: tl.constexpr,
    UNIT_SIZE: tl.constexpr,
    UNITS: tl.constexpr,
    OF_PART: tl.constexpr,
    PARTS_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    """Maxima of a chunk of a row and of its units; the last of a row to arrive says which way the row goes.

    See `sample.specs.sample_specs` for the arguments.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    way_row = way_ptr + row * 3
    if tl.load(position_ptr + row) < 0:
        if chunk == 0:
            tl.store(way_row, SETTLED)
            tl.store(way_row + 1, -1)
    else:
        temperature = tl.load(temperature_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        nucleus = (top_p >= 1.0) == 0
        unit = tl.arange(0, CHUNK // UNIT_SIZE)
        index = chunk * CHUNK + unit[:, None] * UNIT_SIZE + tl.arange(0, UNIT_SIZE)[None, :]
        value = tl.load(logits_ptr + row.to(tl.int64) * V + index, mask=index < V, other=float("-inf"))
        value = value.to(tl.float32)
        value = tl.where(value == value, value, float("-inf"))
        of_unit = tl.max(value, 1)
        top = tl.max(of_unit, 0)
        at = tl.min(tl.min(tl.where(value == top, index, BIG), 1), 0)
        unit += chunk * (CHUNK // UNIT_SIZE)
        tl.store(unit_ptr + row * UNITS + unit, of_unit, mask=unit < UNITS)
        tl.store(top_ptr + row * CHUNKS + chunk, top)
        tl.store(at_ptr + row * CHUNKS + chunk, at)
        if nucleus & (temperature > 0.0):
            tl.store(mass_ptr + row * CHUNKS + chunk, tl.sum(tl.sum(mass_of(value, top, temperature), 1), 0))
        tl.debug_barrier()
        if tl.atomic_add(state_ptr + row, 1, sem="acq_rel") == CHUNKS - 1:
            tl.debug_barrier()
            tl.store(state_ptr + row, 0)
            part = tl.arange(0, CHUNKS_POW2)
            is_part = part < CHUNKS
            tops = tl.load(top_ptr + row * CHUNKS + part, mask=is_part, other=float("-inf"), cache_modifier=".cg")
            largest = tl.max(tops, 0)
            keep = tl.load(top_k_ptr + row)
            keep = tl.where(keep <= 0, V, keep)
            tl.store(bound_ptr + row * 3, largest)
            if (temperature <= 0.0) | (largest == float("-inf")) | (largest == float("inf")):
                places = tl.load(at_ptr + row * CHUNKS + part, mask=is_part, other=BIG, cache_modifier=".cg")
                tl.store(way_row, SETTLED)
                tl.store(way_row + 1, tl.min(tl.where(tops == largest, places, BIG), 0))
            else:
                of_part = tl.arange(0, PARTS_POW2)[:, None] * OF_PART + tl.arange(0, OF_PART)[None, :]
                units = tl.load(
                    unit_ptr + row * UNITS + of_part, mask=of_part < UNITS, other=float("-inf"), cache_modifier=".cg"
                )
                low = tl.full([], LOWEST, tl.int64)
                if keep < UNITS:
                    # As many units as there are to be kept have a maximum over it, so no fewer tokens are. Any number
                    # with this property will do: the search ends when it is nearly the largest one.
                    keys = tl.where(of_part < UNITS, ordered(units), LOWEST)
                    high = ordered(largest).to(tl.int64) + 1
                    over = tl.full([], UNITS, tl.int32)
                    while (over > keep + keep // 4 + 8) & (high - low > 1):
                        middle = (low + high) >> 1
                        count = tl.sum(tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 1), 0)
                        low = tl.where(count >= keep, middle, low)
                        over = tl.where(count >= keep, count, over)
                        high = tl.where(count >= keep, high, middle)
                key = low.to(tl.int32)
                bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
                least = tl.where(low > LOWEST, bits.to(tl.float32, bitcast=True), float("-inf"))
                whole = tl.full([], 0.0, tl.float32)
                if nucleus:
                    masses = tl.load(mass_ptr + row * CHUNKS + part, mask=is_part, other=0.0, cache_modifier=".cg")
                    whole = tl.sum(tl.where(is_part, masses * mass_of(tops, largest, temperature), 0.0), 0)
                    # All that lie below it together have less than the rest of probability that is left out.
                    edge = largest + temperature * (tl.log((1.0 - top_p) * whole / V) - 0.01)
                    edge = tl.where(edge <= largest, edge, largest)
                    least = tl.maximum(least, edge)
                tl.store(bound_ptr + row * 3 + 1, least)
                tl.store(bound_ptr + row * 3 + 2, whole)
                tl.store(way_row, tl.where(least > float("-inf"), LISTED, EVERY))
                hits = tl.sum((tl.max(units, 1) >= least).to(tl.int32), 0)
                tl.store(way_row + 2, hits)


@triton.jit
def sample_gather(
    logits_ptr,
    unit_ptr,
    bound_ptr,
    way_ptr,
    state_ptr,
    found_ptr,
    list_ptr,
    V: tl.constexpr,
    UNIT_SIZE: tl.constexpr,
    UNITS: tl.constexpr,
    OF_PART: tl.constexpr,
    CAPACITY: tl.constexpr,
    COUNT_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """List of the tokens of a row that reach its bound, in any order. See `sample.specs.sample_specs`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    part = tl.program_id(1)
    way = tl.load(way_ptr + row * 3)
    hits = tl.load(way_ptr + row * 3 + 2)
    least = tl.load(bound_ptr + row * 3 + 1)
    unit = part * OF_PART + tl.arange(0, OF_PART)
    of_unit = tl.load(unit_ptr + row * UNITS + unit, mask=unit < UNITS, other=float("-inf"))
    if (way == LISTED) & (tl.max(of_unit, 0) >= least):
        index = unit[:, None] * UNIT_SIZE + tl.arange(0, UNIT_SIZE)[None, :]
        # Units without such a token are not read.
        mask = (of_unit >= least)[:, None] & (index < V)
        value = tl.load(logits_ptr + row.to(tl.int64) * V + index, mask=mask, other=float("-inf")).to(tl.float32)
        chosen = (value >= least).to(tl.int32)
        of_unit_count = tl.sum(chosen, 1)
        count = tl.sum(of_unit_count, 0)
        # Places in the list and arrivals of the row's parts in one number: who arrives last knows the length.
        claimed = tl.atomic_add(state_ptr + row, count + (1 << COUNT_BITS), sem="relaxed")
        first = claimed & ((1 << COUNT_BITS) - 1)
        before = tl.cumsum(of_unit_count, 0) - of_unit_count
        place = first + before[:, None] + tl.cumsum(chosen, 1) - chosen
        tl.store(list_ptr + row * CAPACITY + place, index, mask=(chosen > 0) & (place < CAPACITY))
        if (claimed >> COUNT_BITS) == hits - 1:
            tl.store(found_ptr + row, first + count)
            tl.store(state_ptr + row, 0)


@triton.jit
def tokens_of(row_ptr, list_ptr, length, tile, count, TILE: tl.constexpr):
    """A tile of a row's tokens, from its list or, when that has length 0, of all: index, logit, and which are there."""
    entry = tile * TILE + tl.arange(0, TILE)
    there = entry < count
    in_list = entry < length
    index = tl.where(in_list, tl.load(list_ptr + entry, mask=in_list, other=0), entry)
    value = tl.load(row_ptr + index, mask=there, other=float("-inf")).to(tl.float32)
    return index, tl.where(value == value, value, float("-inf")), there


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
    bound_ptr,
    way_ptr,
    found_ptr,
    list_ptr,
    state_ptr,
    noisy_ptr,
    noisy_at_ptr,
    token_ptr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of each row, from its list or all of the vocabulary. See `sample.specs.sample_specs`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    part = tl.program_id(1)
    way = tl.load(way_ptr + row * 3)
    found = tl.load(found_ptr + row)
    if way == SETTLED:
        if part == 0:
            tl.store(token_ptr + row, tl.load(way_ptr + row * 3 + 1))
    else:
        listed = (way == LISTED) & (found <= CAPACITY)
        length = tl.where(listed, found, 0)
        count = tl.where(listed, found, V)
        tiles = (count + (CHUNK - 1)) // CHUNK
        parts = tl.minimum(tiles, PARTS)
        if part < parts:
            row_ptr = logits_ptr + row.to(tl.int64) * V
            list_row = list_ptr + row * CAPACITY
            top_row = top_ptr + row * CHUNKS
            largest = tl.load(bound_ptr + row * 3)
            least = tl.load(bound_ptr + row * 3 + 1)
            temperature = tl.load(temperature_ptr + row)
            seed0 = tl.load(seed_ptr + row * 2).to(tl.uint32, bitcast=True)
            seed1 = tl.load(seed_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
            sequence = tl.load(sequence_ptr + row).to(tl.uint32, bitcast=True)
            position = tl.load(position_ptr + row).to(tl.uint32, bitcast=True)
            key0, key1 = threefry(seed0, seed1, sequence, position)
            best, token = tl.full([], LOWEST, tl.int32), tl.full([], BIG, tl.int32)
            for tile in range(part, tiles, parts):
                # A chunk whose largest logit does not reach the bound holds nothing that can be kept.
                if listed | (tl.load(top_row + tile, mask=listed == 0, other=0.0) >= least):
                    index, value, there = tokens_of(row_ptr, list_row, length, tile, count, CHUNK)
                    noise = perturbed(value, largest, temperature, key0, key1, index)
                    top, at = argmax(tl.where(there & (value >= least), noise, LOWEST), index)
                    better = (top > best) | ((top == best) & (at < token))
                    best = tl.where(better, top, best)
                    token = tl.where(better, at, token)
            last = parts == 1
            if parts > 1:
                tl.store(noisy_ptr + row * PARTS + part, best)
                tl.store(noisy_at_ptr + row * PARTS + part, token)
                tl.debug_barrier()
                last = tl.atomic_add(state_ptr + row, 1, sem="acq_rel") == parts - 1
                if last:
                    tl.debug_barrier()
                    tl.store(state_ptr + row, 0)
                    other = tl.arange(0, PARTS_POW2)
                    mask = other < parts
                    bests = tl.load(noisy_ptr + row * PARTS + other, mask=mask, other=LOWEST, cache_modifier=".cg")
                    ats = tl.load(noisy_at_ptr + row * PARTS + other, mask=mask, other=BIG, cache_modifier=".cg")
                    best, token = argmax(bests, ats)
            if last:
                keep = tl.load(top_k_ptr + row)
                keep = tl.where(keep <= 0, V, keep)
                top_p = tl.load(top_p_ptr + row)
                nucleus = (top_p >= 1.0) == 0
                # Weight that may stand before a token: none of it for the first, whatever top_p is.
                allowed = tl.full([], 2**62, tl.int64)
                if nucleus:
                    allowed = (top_p * tl.load(bound_ptr + row * 3 + 2) * SCALE).to(tl.int64)
                allowed = tl.maximum(allowed, 1)
                searching = nucleus | (keep < V)
                while searching:
                    logit = tl.load(row_ptr + token).to(tl.float32)
                    limit = ordered(logit)
                    before, weight = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
                    for tile in range(0, tiles):
                        # A chunk whose largest logit ranks behind holds nothing before the token.
                        if listed | (tl.load(top_row + tile, mask=listed == 0, other=0.0) >= logit):
                            index, value, there = tokens_of(row_ptr, list_row, length, tile, count, CHUNK)
                            key = ordered(value)
                            ahead = there & ((key > limit) | ((key == limit) & (index < token)))
                            before += tl.sum(ahead.to(tl.int32), 0)
                            weight += tl.sum(tl.where(ahead, weight_of(value, largest, temperature), 0), 0)
                    searching = (before >= keep) | (weight >= allowed)
                    if searching:
                        # Out, and with it all that rank behind it: the best of those before it.
                        best, at_best = tl.full([], LOWEST, tl.int32), tl.full([], BIG, tl.int32)
                        for tile in range(0, tiles):
                            if listed | (tl.load(top_row + tile, mask=listed == 0, other=0.0) >= logit):
                                index, value, there = tokens_of(row_ptr, list_row, length, tile, count, CHUNK)
                                key = ordered(value)
                                ahead = there & ((key > limit) | ((key == limit) & (index < token)))
                                noise = perturbed(value, largest, temperature, key0, key1, index)
                                top, at = argmax(tl.where(ahead, noise, LOWEST), index)
                                better = (top > best) | ((top == best) & (at < at_best))
                                best = tl.where(better, top, best)
                                at_best = tl.where(better, at, at_best)
                        token = at_best
                tl.store(token_ptr + row, token)
