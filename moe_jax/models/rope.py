"""Rotary position embedding and its context extensions.

Formulas and rounding follow Hugging Face transformers (``modeling_rope_utils.py``), because checkpoints were
trained with them: exponents, frequencies and angles are f32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from moe_jax.pallas_kernels.errors import InvalidArgument

from .config import RopeConfig


class Rotation(NamedTuple):
    """Cosine and sine of every position's angles, shared by all layers and heads of a call."""

    cos: Float32[Array, "B T half"]
    sin: Float32[Array, "B T half"]


def frequencies(config: RopeConfig, head_dim: int) -> tuple[Float32[np.ndarray, " half"], float]:
    """Angle per token of each pair of dimensions, and the multiplier of cos and sin.

    Args:
        config: kind and parameters.
        head_dim: D, even.

    Returns:
        f32 ``[D / 2]`` in radians per token, and a float (1.0 except for yarn).

    Raises:
        InvalidArgument: an odd ``head_dim``, or a scaled kind without its ``original_max_positions``.
    """
    where = f"rope {config.kind!r}"
    if head_dim < 2 or head_dim % 2:
        raise InvalidArgument("head_dim", where=where, got=head_dim, wanted="a positive even number")
    if config.kind in ("yarn", "llama3") and config.original_max_positions is None:
        raise InvalidArgument("original_max_positions", where=where, got=None, wanted="the length before extension")
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The f32 power of torch is correctly rounded in nearly all places, NumPy's is not.
    wavelength = np.power(config.theta, exponent.astype(np.float64)).astype(np.float32)
    plain = np.float32(1) / wavelength
    if config.kind == "linear":
        return plain / np.float32(config.factor), 1.0
    if config.kind == "yarn":
        return _yarn(config, wavelength, head_dim), _yarn_attention_factor(config)
    if config.kind == "llama3":
        return _llama3(config, plain), 1.0
    return plain, 1.0


def rotation(config: RopeConfig, head_dim: int, positions: Int32[Array, "B T"]) -> Rotation:
    """Cosines and sines at the given positions."""
    per_token, scale = frequencies(config, head_dim)
    angles = positions.astype(jnp.float32)[..., None] * per_token
    return Rotation(jnp.cos(angles) * np.float32(scale), jnp.sin(angles) * np.float32(scale))


def rotate(x: Float[Array, "B T N D"], by: Rotation) -> Float[Array, "B T N D"]:
    """Rotate each head; dimension i pairs with i + D/2. Computed in f32, rounded once to the dtype of ``x``."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = by.cos[:, :, None, :], by.sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _yarn(config: RopeConfig, wavelength: np.ndarray, head_dim: int) -> np.ndarray:
    """YaRN (arXiv:2309.00071): high frequencies stay, low ones are divided by the factor, a ramp between."""
    assert config.original_max_positions is not None

    def dimension(rotations: float) -> float:
        turns = config.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    half = np.arange(head_dim // 2, dtype=np.float32)
    ramp = np.clip((half - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = np.float32(1) - ramp
    stretched = np.float32(1) / (np.float32(config.factor) * wavelength)
    return stretched * (1 - keep) + (np.float32(1) / wavelength) * keep


def _yarn_attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor

    def scale(m: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * m * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)


def _llama3(config: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Llama 3.1: wavelengths over ``original / low`` are stretched, under ``original / high`` kept, smooth between."""
    original = config.original_max_positions
    assert original is not None
    low, high, factor = config.low_freq_factor, config.high_freq_factor, np.float32(config.factor)
    wavelength = np.float32(2 * math.pi) / plain
    smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = np.where(wavelength > original / low, plain / factor, plain)
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return np.where(medium, blended, scaled).astype(np.float32)
