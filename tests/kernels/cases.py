"""Specs and random buffers shared by the kernel tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_jax.pallas_kernels.grouped_moe import Activation
from moe_jax.pallas_kernels.plan.reference import plan_blocks

ACTIVATIONS = (
    Activation(name="swiglu", layout="halves"),
    Activation(name="swiglu", layout="interleaved", limit=0.4, limit_after=False),
    Activation(name="swiglu", layout="halves", limit=0.4, limit_after=True),
    Activation(name="gpt_oss_swiglu", layout="interleaved", limit=0.5, alpha=1.702),
    Activation(name="geglu_tanh", layout="halves"),
    Activation(name="geglu_erf", layout="interleaved"),
    Activation(name="relu2", layout=None),
)


def routing(rng: np.random.Generator, tokens: int, experts: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows with k distinct experts each."""
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k].astype(np.int32)
    return ids, (rng.random((tokens, k)) + 0.1).astype(np.float32)


def buffers(
    spec, rng: np.random.Generator, ids: np.ndarray, scale: np.ndarray, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Random inputs in the spec's dtypes unless given, zero state, and outputs and scratch full of NaN."""
    made: dict[str, Any] = dict(given or {})
    for a in spec.arguments:
        if a.name in made:
            continue
        if a.role == "state":
            made[a.name] = np.zeros(a.shape, a.dtype)
        elif a.role != "in":
            made[a.name] = np.full(a.shape, np.nan, a.dtype)
        elif a.dtype == "int32":
            made[a.name] = np.zeros(a.shape, a.dtype)
        else:
            made[a.name] = (rng.standard_normal(a.shape) * 0.3).astype(a.dtype)
    made["ids_ptr"], made["scale_ptr"] = ids, scale
    constants, slots = dict(spec.constexprs), made["gate_up_ptr"].shape[0]
    experts = constants["EXPERTS"]
    place = rng.permutation(slots)[:experts].astype(np.int32) if constants["INDIRECT"] else None
    if ids.shape[0] > 1:
        plan = plan_blocks(ids, place, experts, constants["BLOCK_N"])
        made["used_ptr"], made["block_row_ptr"], made["block_pair_ptr"] = plan
    elif place is not None:
        made["weight_row_ptr"] = place
    return made
