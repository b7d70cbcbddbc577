"""Choosing the next token: greedy, temperature, top-p, with a generator that does not know its batch.

The noise of a row is a function of (seed, sequence, position) only, so what is drawn for a sequence depends on its
own logits and on nothing else in the batch. All parameters are device data: changing them compiles nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float32, Int32, UInt32

from moe_jax.pallas_kernels.checks import as_number, check_integer, shown
from moe_jax.pallas_kernels.errors import InvalidArgument


class Sampling(NamedTuple):
    """Parameters of a generation, as arrays.

    Attributes:
        seed: uint32 ``[2]``, high and low word.
        temperature: f32 scalar; 0 is greedy.
        top_p: f32 scalar in (0, 1].
    """

    seed: UInt32[Array | np.ndarray, " 2"]
    temperature: Float32[Array | np.ndarray, ""]
    top_p: Float32[Array | np.ndarray, ""]


def sampling(temperature: float = 0.0, top_p: float = 1.0, seed: int = 0, where: str = "generate") -> Sampling:
    """Checked parameters, as NumPy arrays.

    Args:
        temperature: divides the logits; 0 takes the largest.
        top_p: draw from the smallest set of most probable tokens whose probabilities reach this (nucleus
            sampling, arXiv:1904.09751); the most probable token is always in it; 1 keeps all.
        seed: 0 to 2**64 - 1.
        where: whose options they are, for errors.

    Raises:
        InvalidArgument: a value out of range or of another type.
    """
    heat, share = as_number(temperature), as_number(top_p)
    if not 0 <= heat < math.inf:
        raise InvalidArgument("temperature", where=where, got=shown(temperature), wanted="a finite number, 0 or more")
    if not 0 < share <= 1:
        raise InvalidArgument("top_p", where=where, got=shown(top_p), wanted="a number over 0, at most 1")
    words = np.asarray(divmod(check_integer(where, "seed", seed, 0, (1 << 64) - 1), 1 << 32), np.uint32)
    # What f32 has no number for must not become 0, which means something else, or infinity.
    limits = np.finfo(np.float32)
    hot = 0.0 if heat == 0 else min(max(heat, float(limits.tiny)), float(limits.max))
    kept = max(share, float(limits.tiny))
    return Sampling(words, np.asarray(hot, np.float32), np.asarray(kept, np.float32))


def sample(
    logits: Float32[Array, "B V"], sequences: Int32[Array, " B"], positions: Int32[Array, " B"], parameters: Sampling
) -> Int32[Array, " B"]:
    """One token for each row; equal logits go to the lower index.

    Args:
        logits: f32 ``[B, V]``.
        sequences: number of each row's sequence.
        positions: position the new token will stand at.
        parameters: see `sampling`.
    """
    # Only one branch runs: greedy decoding must not pay for noise, nor plain sampling for a sort of the vocabulary.
    return lax.cond(parameters.temperature == 0, _greedy, _draw, logits, sequences, positions, parameters)


def token_logprobs(logits: Float32[Array, "B V"], tokens: Int32[Array, " B"]) -> Float32[Array, " B"]:
    """Log-probability of each row's token under the model itself: temperature and top-p play no part."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _greedy(logits, sequences, positions, parameters) -> Int32[Array, " B"]:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _draw(logits, sequences, positions, parameters) -> Int32[Array, " B"]:
    # The maximum goes to 0 first, so that a tiny temperature cannot overflow.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / parameters.temperature
    noise = _noise(logits.shape[-1], sequences, positions, parameters.seed)
    kept = lax.cond(parameters.top_p >= 1, lambda scaled, _: scaled, _nucleus, scaled, parameters.top_p)
    return jnp.argmax(kept + noise, axis=-1).astype(jnp.int32)


def _nucleus(scaled: Float32[Array, "B V"], top_p: Float32[Array, ""]) -> Float32[Array, "B V"]:
    """Logits outside the nucleus become -inf; of equal ones the lower index comes first."""
    index = lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
    descending, order = lax.sort((-scaled, index), dimension=-1, is_stable=True, num_keys=1)
    probability = jax.nn.softmax(-descending, axis=-1)
    # Probability before each token: shifted, not subtracted, so that the first is exactly 0 and always kept.
    before = jnp.pad(jnp.cumsum(probability, axis=-1)[:, :-1], ((0, 0), (1, 0)))
    rows = lax.broadcasted_iota(jnp.int32, scaled.shape, 0)
    kept = jnp.zeros(scaled.shape, bool).at[rows, order].set(before < top_p, unique_indices=True)
    return jnp.where(kept, scaled, -jnp.inf)


def _noise(
    vocabulary: int, sequences: Int32[Array, " B"], positions: Int32[Array, " B"], seed: UInt32[Array, " 2"]
) -> Float32[Array, "B V"]:
    """Gumbel noise: the argmax of logits plus this is a draw from their softmax.

    Counter-based (Threefry-2x32, doi:10.1145/2063384.2063405), straight from the primitive: what is drawn depends on
    no setting of `jax.random`.
    """

    def words(key, first, second):
        return threefry2x32_p.bind(*jnp.broadcast_arrays(*key, first, second))

    own = words((seed[0], seed[1]), sequences.astype(jnp.uint32), positions.astype(jnp.uint32))
    index = lax.broadcasted_iota(jnp.uint32, (sequences.shape[0], vocabulary), 1)
    high, low = words((own[0][:, None], own[1][:, None]), jnp.uint32(0), index)
    # 64 bits, fine near 0: with the 23 bits of a usual uniform, tokens under 1e-7 would never be drawn. Below 1, so
    # that no noise is -inf, which would lose to a token that is not allowed.
    uniform = high.astype(jnp.float32) * 2.0**-32 + (low.astype(jnp.float32) + 0.5) * 2.0**-64
    uniform = jnp.minimum(uniform, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))
