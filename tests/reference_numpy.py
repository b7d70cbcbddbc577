"""Routing and experts as plain per-token loops in NumPy f64: what the tests believe, sharing no code with the library.

Configurations are read by attribute only. Shapes: ``logits [T, E]``, ``x [T, H]``, ``ids [T, k]``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def f64(array: Any) -> np.ndarray:
    """Any array, bf16 too, as NumPy f64."""
    return np.asarray(array).astype(np.float64)


def scores(logits: Any, config: Any) -> np.ndarray:
    """Scores of all experts before selection, ``[T, E]``."""
    logits = f64(logits)
    if config.score == "softmax":
        e = np.exp(logits - logits.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)
    if config.score == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    return logits


def choice(logits: Any, config: Any, selection_bias: Any = None) -> np.ndarray:
    """What experts are chosen by, ``[T, E]``; -inf where a group was dropped."""
    values = scores(logits, config)
    if selection_bias is not None:
        values = values + f64(selection_bias)
    out = np.full_like(values, -np.inf)
    size = config.experts // config.groups
    for row, target in zip(values, out, strict=True):
        best_two = [sum(sorted(row[g * size : (g + 1) * size])[-2:]) for g in range(config.groups)]
        kept = sorted(range(config.groups), key=lambda g: (-best_two[g], g))[: config.groups_kept]
        for g in kept:
            target[g * size : (g + 1) * size] = row[g * size : (g + 1) * size]
    return out


def route(logits: Any, config: Any, selection_bias: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Weights and ids, both ``[T, k]``; equal scores go to the lower id."""
    values, plain = choice(logits, config, selection_bias), scores(logits, config)
    ids = np.argsort(-values, axis=1, kind="stable")[:, : config.top_k]
    return weights_of(plain, ids, config), ids


def weights_of(plain: np.ndarray, ids: Any, config: Any) -> np.ndarray:
    """Weights ``[T, k]`` of experts that have been chosen, from unbiased scores."""
    chosen = np.take_along_axis(plain, np.asarray(ids), axis=1)
    if config.score == "topk_softmax":
        chosen = np.exp(chosen - chosen.max(axis=1, keepdims=True))
        chosen = chosen / chosen.sum(axis=1, keepdims=True)
    if config.renormalize:
        chosen = chosen / chosen.sum(axis=1, keepdims=True)
    return chosen * config.scaling_factor


def activate_scalar(gate: float, up: float, activation: Any) -> float:
    """One element of an activation."""

    def sigmoid(v: float) -> float:
        return 1 / (1 + math.exp(-v)) if v >= 0 else math.exp(v) / (1 + math.exp(v))

    name, limit = activation.name, activation.limit
    if name == "relu2":
        return max(up, 0.0) ** 2
    if name == "geglu_tanh":
        return 0.5 * gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    if name == "geglu_erf":
        return 0.5 * gate * (1 + math.erf(gate / math.sqrt(2))) * up
    if limit is not None:
        up = min(max(up, -limit), limit)
    if name == "gpt_oss_swiglu":
        gate = min(gate, limit)
        return gate * sigmoid(activation.alpha * gate) * (up + 1)
    if limit is not None and not activation.limit_after:
        gate = min(gate, limit)
    value = gate * sigmoid(gate)
    if limit is not None and activation.limit_after:
        value = min(value, limit)
    return value * up


def activate(h: np.ndarray, activation: Any) -> np.ndarray:
    """An activation on one row of the first matmul's output."""
    n = len(h)
    if activation.name == "relu2":
        pairs = [(0.0, v) for v in h]
    elif activation.layout == "interleaved":
        pairs = [(h[2 * i], h[2 * i + 1]) for i in range(n // 2)]
    else:
        pairs = [(h[i], h[n // 2 + i]) for i in range(n // 2)]
    return np.array([activate_scalar(float(g), float(u), activation) for g, u in pairs])


def grouped_moe(x: Any, route_weights: Any, ids: Any, weights: Any, config: Any) -> np.ndarray:
    """The op, token by token and rank by rank, ``[T, H]`` f64. Ids outside 0..E-1 are skipped."""
    x, route_weights, ids = f64(x), f64(route_weights), np.asarray(ids)
    out = np.zeros(x.shape)
    for t in range(len(x)):
        for r in range(ids.shape[1]):
            e = int(ids[t, r])
            if not 0 <= e < config.router.experts:
                continue
            h = f64(weights.gate_up[e]) @ x[t]
            if weights.gate_up_bias is not None:
                h = h + f64(weights.gate_up_bias[e])
            y = f64(weights.down[e]) @ activate(h, config.activation)
            if weights.down_bias is not None:
                y = y + f64(weights.down_bias[e])
            out[t] += route_weights[t, r] * y
        if weights.shared is not None:
            y = f64(weights.shared.down) @ activate(f64(weights.shared.gate_up) @ x[t], config.activation)
            if weights.shared.gate is not None:
                y = y / (1 + np.exp(-(f64(weights.shared.gate)[0] @ x[t])))
            out[t] += y
    return out
