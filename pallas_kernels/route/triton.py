"""Routing of 8 rows a block in one launch: RMSNorm, router matmul, choice of experts and weights; or from logits.

A block's programs each take ``BLOCK_M`` experts and one of SPLIT parts of H; the last to arrive adds the parts in
ascending order and chooses. The block holds 8 rows at every number of rows, so a row's bits depend on (H, E, dtype)
only. docs/kernels-decode.md has the reasoning.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Below the key of -inf: for places that hold no expert, or one that is taken.
TAKEN = tl.constexpr(-(2**31))


@triton.jit
def ordered(values):
    """f32 to int32 of the same order; 0.0 and -0.0 are equal."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def best(key, index):
    """Place of the largest key along the last axis; of equal ones the first."""
    top = tl.max(key, 1)
    return tl.min(tl.where(key == top[:, None], index[None, :], 0x7FFFFFFF), 1)


@triton.jit
def best_groups(
    choice, valid, ROWS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, G: tl.constexpr, S: tl.constexpr
):
    """Which places belong to the KEPT groups with the best sum of two; ``[ROWS, G * S]``."""
    by_group = tl.where(valid[None, :], choice, float("-inf")).reshape(ROWS, G, S)
    key = ordered(by_group)
    place = tl.arange(0, S)[None, None, :]
    first = tl.max(key, 2)
    at = tl.min(tl.where(key == first[:, :, None], place, S), 2)
    score = tl.max(by_group, 2)
    if S > 1:
        score += tl.max(tl.where(place == at[:, :, None], float("-inf"), by_group), 2)
    score = tl.where(score == score, score, float("-inf"))  # inf and -inf in one group
    group = tl.arange(0, G)
    key = tl.where((group < GROUPS)[None, :], ordered(score), TAKEN)
    kept = tl.zeros([ROWS, G], tl.int32)
    for _ in tl.static_range(KEPT):
        here = group[None, :] == best(key, group)[:, None]
        kept = tl.where(here, 1, kept)
        key = tl.where(here, TAKEN, key)
    return tl.broadcast_to(kept[:, :, None], [ROWS, G, S]).reshape(ROWS, G * S) > 0


@triton.jit
def expert_of_place(EXPERTS: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr, S: tl.constexpr):
    """The expert of each of ``G * S`` places, and whether there is one.

    Experts go by group, each group at a power of two: ascending places are ascending experts.
    """
    place = tl.arange(0, G * S)
    of_group: tl.constexpr = EXPERTS // GROUPS
    return place // S * of_group + place % S, (place % S < of_group) & (place // S < GROUPS)


@triton.jit
def choose(
    logits,
    selection_bias_ptr,
    row,
    live,
    present,
    scale_ptr,
    ids_ptr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_POW2: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALING: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    SELECTION_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Write experts and weights of a block's rows from their logits, ``[BLOCK_ROWS, places]`` (`expert_of_place`).

    Rows that are not ``present`` get ids -1 and weights 0.
    """
    expert, valid = expert_of_place(EXPERTS, GROUPS, GROUPS_POW2, GROUP_POW2)
    OF_GROUP: tl.constexpr = EXPERTS // GROUPS
    if SCORE == "softmax":
        largest = tl.max(tl.where(valid[None, :], logits, float("-inf")), 1)
        scores = tl.where(valid[None, :], tl.exp(logits - largest[:, None]), 0.0)
        scores = scores / tl.sum(scores, 1)[:, None]
    elif SCORE == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = logits
    choice = scores
    if SELECTION_BIAS:
        choice += tl.load(selection_bias_ptr + expert, mask=valid, other=0.0)[None, :]
    # NaN never wins a place: such a row falls back to the lowest ids, distinct and in range.
    choice = tl.where(choice == choice, choice, float("-inf"))
    if GROUPS_KEPT < GROUPS:
        kept = best_groups(choice, valid, BLOCK_ROWS, GROUPS, GROUPS_KEPT, GROUPS_POW2, GROUP_POW2)
        choice = tl.where(kept, choice, float("-inf"))
    place = tl.arange(0, GROUPS_POW2 * GROUP_POW2)
    key = tl.where(valid[None, :], ordered(choice), TAKEN)
    rank = tl.arange(0, TOP_K_POW2)
    ids = tl.zeros([BLOCK_ROWS, TOP_K_POW2], tl.int32)
    scale = tl.zeros([BLOCK_ROWS, TOP_K_POW2], tl.float32)
    for r in tl.static_range(TOP_K):
        winner = best(key, place)
        here = place[None, :] == winner[:, None]
        key = tl.where(here, TAKEN, key)
        is_rank = (rank == r)[None, :]
        chosen = winner // GROUP_POW2 * OF_GROUP + winner % GROUP_POW2
        ids = tl.where(is_rank, chosen[:, None], ids)
        # From the scores themselves: (score + bias) - bias loses small scores to rounding.
        scale = tl.where(is_rank, tl.sum(tl.where(here, scores, 0.0), 1)[:, None], scale)
    of_rank = (rank < TOP_K)[None, :]
    if SCORE == "topk_softmax":
        largest = tl.max(tl.where(of_rank, scale, float("-inf")), 1)
        scale = tl.where(of_rank, tl.exp(scale - largest[:, None]), 0.0)
        scale = scale / tl.sum(scale, 1)[:, None]
    if RENORMALIZE:
        scale = scale / (tl.sum(tl.where(of_rank, scale, 0.0), 1) + 1e-20)[:, None]
    scale *= SCALING
    ids = tl.where(present[:, None], ids, -1)
    scale = tl.where(present[:, None], scale, 0.0)
    wanted = live[:, None] & of_rank
    at = row.to(tl.int64)[:, None] * TOP_K + rank[None, :]
    tl.store(ids_ptr + at, ids, mask=wanted)
    tl.store(scale_ptr + at, scale, mask=wanted)


@triton.jit
def route(
    x_ptr,
    gain_ptr,
    w_ptr,
    bias_ptr,
    selection_bias_ptr,
    position_ptr,
    state_ptr,
    partial_ptr,
    scale_ptr,
    ids_ptr,
    normed_ptr,
    ROWS: tl.constexpr,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_POW2: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALING: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    BIAS: tl.constexpr,
    SELECTION_BIAS: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PART: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """See `route.specs.route_spec` for the arguments."""
    if PDL:
        gdc_launch_dependents()
    block = tl.program_id(0)
    chunk = tl.program_id(1)
    part = tl.program_id(2)
    expert = chunk * BLOCK_M + tl.arange(0, BLOCK_M)
    is_expert = expert < EXPERTS
    k = part * PART + tl.arange(0, BLOCK_K)
    w_at = w_ptr + expert[:, None] * HIDDEN + k[None, :]
    # Weights and positions do not change while a step runs: they may be read before the wait.
    w = tl.load(w_at, mask=is_expert[:, None] & (k < HIDDEN)[None, :], other=0.0)
    gain = tl.load(gain_ptr + k, mask=k < HIDDEN, other=0.0) if NORM else w
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < ROWS
    present = live
    if MASKED:
        present = tl.load(position_ptr + row, mask=live, other=-1) >= 0
    if PDL:
        gdc_wait()
    x_row = x_ptr + row.to(tl.int64)[:, None] * HIDDEN
    shrink = tl.full([BLOCK_ROWS], 1.0, tl.float32)
    if NORM:
        squares = tl.zeros([BLOCK_ROWS, CHUNK], tl.float32)
        column = tl.arange(0, CHUNK)
        for start in tl.static_range(0, HIDDEN, CHUNK):
            at = start + column
            wide = tl.load(x_row + at[None, :], mask=live[:, None] & (at < HIDDEN)[None, :], other=0.0).to(tl.float32)
            squares += wide * wide
        shrink = tl.rsqrt(tl.sum(squares, 1) / HIDDEN + EPS)
    total = tl.zeros([BLOCK_M, BLOCK_ROWS], tl.float32)
    for step in tl.static_range(PART // BLOCK_K):
        at = k + step * BLOCK_K
        there = at < HIDDEN
        if step > 0:
            w = tl.load(w_at + step * BLOCK_K, mask=is_expert[:, None] & there[None, :], other=0.0)
            if NORM:
                gain = tl.load(gain_ptr + at, mask=there, other=0.0)
        mask = live[:, None] & there[None, :]
        x = tl.load(x_row + at[None, :], mask=mask, other=0.0)
        if NORM:
            # Rounded twice, as the models do: after the division and after the gain.
            x = (x.to(tl.float32) * shrink[:, None]).to(x_ptr.dtype.element_ty)
            x = (x.to(tl.float32) * gain.to(tl.float32)[None, :]).to(x_ptr.dtype.element_ty)
            if chunk == 0:
                tl.store(normed_ptr + row.to(tl.int64)[:, None] * HIDDEN + at[None, :], x, mask=mask)
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    partial_row = partial_ptr + row * EXPERTS
    OF_PART: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS * EXPERTS
    tl.store(partial_row[None, :] + part * OF_PART + expert[:, None], total, mask=is_expert[:, None] & live[None, :])
    tl.debug_barrier()
    if tl.atomic_add(state_ptr + block, 1, sem="acq_rel") == CHUNKS * SPLIT - 1:
        tl.debug_barrier()
        tl.store(state_ptr + block, 0)
        of_place, valid = expert_of_place(EXPERTS, GROUPS, GROUPS_POW2, GROUP_POW2)
        known = live[:, None] & valid[None, :]
        logits = tl.zeros([BLOCK_ROWS, GROUPS_POW2 * GROUP_POW2], tl.float32)
        for p in tl.static_range(SPLIT):
            source = partial_row[:, None] + p * OF_PART + of_place[None, :]
            logits += tl.load(source, mask=known, other=0.0, cache_modifier=".cg")
        if BIAS:
            logits += tl.load(bias_ptr + of_place, mask=valid, other=0.0).to(tl.float32)[None, :]
        choose(
            logits, selection_bias_ptr, row, live, present, scale_ptr, ids_ptr,
            EXPERTS, TOP_K, TOP_K_POW2, SCORE, RENORMALIZE, SCALING,
            GROUPS, GROUPS_KEPT, GROUPS_POW2, GROUP_POW2, SELECTION_BIAS, BLOCK_ROWS,
        )  # fmt: skip


@triton.jit
def route_logits(
    logits_ptr,
    selection_bias_ptr,
    scale_ptr,
    ids_ptr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_POW2: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALING: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    SELECTION_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """See `route.specs.route_logits_spec` for the arguments."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < ROWS
    expert, valid = expert_of_place(EXPERTS, GROUPS, GROUPS_POW2, GROUP_POW2)
    at = row.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    logits = tl.load(logits_ptr + at, mask=live[:, None] & valid[None, :], other=0.0)
    choose(
        logits, selection_bias_ptr, row, live, live, scale_ptr, ids_ptr,
        EXPERTS, TOP_K, TOP_K_POW2, SCORE, RENORMALIZE, SCALING,
        GROUPS, GROUPS_KEPT, GROUPS_POW2, GROUP_POW2, SELECTION_BIAS, BLOCK_ROWS,
    )  # fmt: skip
