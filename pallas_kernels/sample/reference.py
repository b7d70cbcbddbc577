"""Sampling in plain `jax.numpy`: the definition the kernels are held against."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, Float32, Int32


def sample(
    logits: Float[Array, "T V"],
    position: Int32[Array, " T"],
    sequence: Int32[Array, " T"],
    seed: Int32[Array, "T 2"],
    temperature: Float32[Array, " T"],
    top_k: Int32[Array, " T"],
    top_p: Float32[Array, " T"],
) -> Int32[Array, " T"]:
    """One token for each row, -1 for rows that are not there; equal values go to the lower index.

    A token may be drawn when fewer than ``top_k`` tokens (0: any number) rank before it, and those before it have less
    than ``top_p`` of all probability (nucleus sampling, arXiv:1904.09751); the first may always. NaN counts as -inf. A
    row with an infinite largest logit takes the first of these.
    """
    temperature, vocabulary = temperature[:, None], logits.shape[1]
    logits = logits.astype(jnp.float32)
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    greedy = (temperature <= 0) | jnp.isinf(largest)
    # The maximum goes to 0 first, so that a tiny temperature cannot overflow.
    scaled = jnp.where(greedy, 0, (logits - jnp.where(greedy, 0, largest)) / jnp.where(greedy, 1, temperature))
    index = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    _, order = lax.sort((-logits, index), dimension=-1, is_stable=True, num_keys=1)
    probability = jax.nn.softmax(jnp.take_along_axis(scaled, order, axis=1), axis=-1)
    # Probability before each token: shifted, not subtracted, so that the first is exactly 0 and always kept.
    before = jnp.pad(jnp.cumsum(probability, axis=-1)[:, :-1], ((0, 0), (1, 0)))
    limit = jnp.where(top_k <= 0, vocabulary, top_k)[:, None]
    share = top_p[:, None]
    kept = ((index < limit) & ((before < share) | (share >= 1))) | (index == 0)
    rows = lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    kept = jnp.zeros(logits.shape, bool).at[rows, order].set(kept, unique_indices=True)
    drawn = jnp.argmax(jnp.where(kept, scaled + _noise(vocabulary, sequence, position, seed), -jnp.inf), axis=-1)
    token = jnp.where(greedy[:, 0], jnp.argmax(logits, axis=-1), drawn).astype(jnp.int32)
    return jnp.where(position >= 0, token, -1)


def _noise(
    vocabulary: int, sequence: Int32[Array, " T"], position: Int32[Array, " T"], seed: Int32[Array, "T 2"]
) -> Float32[Array, "T V"]:
    """Gumbel noise keyed by (seed, sequence, position) and counted by token: `moe_jax.sampling` draws the same.

    Counter-based (Threefry-2x32, doi:10.1145/2063384.2063405). 64 bits, fine near 0: with the 23 bits of a usual
    uniform, tokens under 1e-7 would never be drawn. Below 1, so that no noise is -inf.
    """

    def words(key, first, second):
        return threefry2x32_p.bind(*jnp.broadcast_arrays(*key, first, second))

    def unsigned(x):
        return lax.bitcast_convert_type(x, jnp.uint32)

    own = words((unsigned(seed[:, 0]), unsigned(seed[:, 1])), unsigned(sequence), unsigned(position))
    index = lax.broadcasted_iota(jnp.uint32, (position.shape[0], vocabulary), 1)
    high, low = words((own[0][:, None], own[1][:, None]), jnp.uint32(0), index)
    uniform = high.astype(jnp.float32) * 2.0**-32 + (low.astype(jnp.float32) + 0.5) * 2.0**-64
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)))
