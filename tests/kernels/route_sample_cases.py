"""Random inputs of the routing and sampling kernels, shared by their tests."""

from __future__ import annotations

import numpy as np

from moe_jax.pallas_kernels.route import RouterConfig
from moe_jax.pallas_kernels.sample import Cut

# H, router, options of the spec
ROUTERS = {
    "qwen3": (2048, RouterConfig(experts=128, top_k=8, renormalize=True), {}),
    "mixtral": (4096, RouterConfig(experts=8, top_k=2, renormalize=True), {}),
    "gpt-oss": (2880, RouterConfig(experts=32, top_k=4, score="topk_softmax"), {"bias": "bfloat16"}),
    "deepseek-v3": (
        7168,
        RouterConfig(
            experts=256, top_k=8, score="sigmoid", renormalize=True, scaling_factor=2.5, groups=8, groups_kept=4
        ),
        {"selection_bias": True},
    ),
    "largest": (1024, RouterConfig(experts=512, top_k=10), {}),
}
KINDS = ("greedy", "plain", "top_k", "top_p", "both")
# Several chunks, units, parts and tiles of a list even in a small vocabulary.
SMALL_CUT = Cut(chunk=64, chunk_warps=4, unit=8, part=128, capacity=1024, parts=3)


def sample_case(rng: np.random.Generator, rows: int, vocabulary: int, kind: str) -> dict[str, np.ndarray]:
    """Inputs of sampling by argument name, in the reference's order; of more than two rows one is not there."""
    with_k, with_p = kind in ("top_k", "both"), kind in ("top_p", "both")
    position = rng.integers(0, 1000, rows).astype(np.int32)
    if rows > 2:
        position[2] = -1
    temperature = np.zeros(rows) if kind == "greedy" else rng.uniform(0.3, 1, rows)
    return {
        "logits_ptr": (3 * rng.standard_normal((rows, vocabulary))).astype(np.float32),
        "position_ptr": position,
        "sequence_ptr": rng.integers(0, 1000, rows).astype(np.int32),
        "seed_ptr": rng.integers(-(2**31), 2**31, (rows, 2)).astype(np.int32),
        "temperature_ptr": temperature.astype(np.float32),
        "top_k_ptr": rng.integers(1, 30, rows).astype(np.int32) if with_k else np.zeros(rows, np.int32),
        "top_p_ptr": rng.uniform(0.05, 0.95, rows).astype(np.float32) if with_p else np.ones(rows, np.float32),
    }


def peaked(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same inputs with logits as a language model's: a few tokens hold most of the probability."""
    given["logits_ptr"][:, ::997] += 8
    return given


def route_oracle(config: RouterConfig, given, normed, ids) -> tuple[np.ndarray, np.ndarray]:
    """From normed rows, f64: what experts are chosen by, ``[T, E]``, and the weights of chosen ones, ``[T, k]``."""
    exact = {name: np.asarray(value).astype(np.float64) for name, value in given.items()}
    logits = np.asarray(normed).astype(np.float64) @ exact["w_ptr"].T
    if exact["bias_ptr"].shape != (1,):
        logits = logits + exact["bias_ptr"]
    largest = logits.max(axis=1, keepdims=True)
    if config.score == "softmax":
        scores = np.exp(logits - largest) / np.exp(logits - largest).sum(axis=1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-logits)) if config.score == "sigmoid" else logits
    choice = scores + exact["selection_bias_ptr"] if exact["selection_bias_ptr"].shape != (1,) else scores
    if config.groups_kept < config.groups:
        by_group = choice.reshape(len(choice), config.groups, -1)
        rank = np.argsort(-np.sort(by_group, axis=2)[:, :, -2:].sum(axis=2), axis=1)
        kept = np.zeros(by_group.shape[:2], bool)
        np.put_along_axis(kept, rank[:, : config.groups_kept], True, axis=1)
        choice = np.where(kept[:, :, None], by_group, -np.inf).reshape(choice.shape)
    weights = np.take_along_axis(scores, ids, axis=1)
    if config.score == "topk_softmax":
        weights = np.exp(weights - weights.max(axis=1, keepdims=True))
        weights = weights / weights.sum(axis=1, keepdims=True)
    if config.renormalize:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return choice, weights * config.scaling_factor
