"""Tables of rotary position embeddings (Su et al., RoFormer), with the ways to stretch them over longer contexts.

The arithmetic follows transformers step by step in float32: an angle of thousands of radians turns a last-bit
difference of a frequency into an error that can be seen in the logits.
"""

from __future__ import annotations

import math

import numpy as np

from ms_spec.models.config import RopeConfig


def rope_tables(rope: RopeConfig, head_dim: int, max_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of positions 0 .. max_len - 1: two float32 [max_len, head_dim / 2].

    Column i turns the pair (i, i + head_dim / 2). Yarn's attention factor is multiplied into both tables.

    Dynamic NTK scaling depends on the length of the sequence. Up to the trained length the table is the unscaled one;
    row p beyond it uses the base that belongs to a sequence of p + 1 tokens. That is what transformers computes when
    tokens come one at a time, and it makes a row depend on its position alone, not on how a prompt was chunked. (Fed
    a whole prompt longer than the trained length at once, transformers uses the last position's base for all rows.)
    """
    positions = np.arange(max_len, dtype=np.float32)[:, None]
    if rope.kind == "dynamic" and max_len > rope.original_max_position:
        lengths = np.maximum(np.arange(1, max_len + 1), rope.original_max_position)
        frequencies = _dynamic_frequencies(rope, head_dim, lengths)
        scale = 1.0
    else:
        frequency, scale = inverse_frequencies(rope, head_dim)
        frequencies = frequency[None, :]
    angles = (frequencies * positions).astype(np.float64)  # rounded to float32 before the cosine, as in transformers
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return cos * np.float32(scale), sin * np.float32(scale)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Radians per position, float32 [head_dim / 2], and the factor of cosines and sines."""
    base = 1.0 / _powers(rope.theta, head_dim)
    if rope.kind in ("default", "dynamic"):
        return base, 1.0
    if rope.kind == "linear":
        return base / np.float32(rope.factor), 1.0
    if rope.kind == "factors":
        return base / np.asarray(rope.frequency_factors, np.float32), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, head_dim)
    raise ValueError(f"rope_type: {rope.kind!r} is not supported")


def _powers(theta: float, head_dim: int) -> np.ndarray:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(np.float64(np.float32(theta)), exponents.astype(np.float64)).astype(np.float32)


def _dynamic_frequencies(rope: RopeConfig, head_dim: int, lengths: np.ndarray) -> np.ndarray:
    """One row of frequencies for each sequence length: float32 [len(lengths), head_dim / 2]."""
    stretch = np.float32(rope.factor) * lengths.astype(np.float32) / np.float32(rope.original_max_position)
    stretch = (stretch - np.float32(rope.factor - 1)).astype(np.float64)
    theta = np.float32(rope.theta) * np.power(stretch, head_dim / (head_dim - 2)).astype(np.float32)
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.power(theta.astype(np.float64)[:, None], exponents.astype(np.float64)[None, :])
    return (np.float32(1.0) / powers.astype(np.float32)).astype(np.float32)


def _llama3(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between blended."""
    one = np.float32(1.0)
    factor, low, high = np.float32(rope.factor), np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
    original = float(rope.original_max_position)
    longest, shortest = original / rope.low_freq_factor, original / rope.high_freq_factor
    wavelength = np.float32(2 * math.pi) / base
    scaled = np.where(wavelength > np.float32(longest), base / factor, base)
    smooth = (np.float32(original) / wavelength - low) / np.float32(high - low)
    blended = (one - smooth) * scaled / factor + smooth * scaled
    medium = ~(wavelength < np.float32(shortest)) & ~(wavelength > np.float32(longest))
    return np.where(medium, blended, scaled).astype(np.float32)


def _yarn(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al., arXiv 2309.00071): fast rotations are kept, slow ones interpolated, with a ramp between."""

    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    if rope.attention_factor is not None:
        attention = float(rope.attention_factor)
    elif rope.mscale and rope.mscale_all_dim:
        attention = magnitude(rope.factor, rope.mscale) / magnitude(rope.factor, rope.mscale_all_dim)
    else:
        attention = magnitude(rope.factor)

    def dimension(rotations: float) -> float:
        """The (fractional) dimension that turns so many times over the trained context."""
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return (head_dim * math.log(turns)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = np.float32(1.0) - np.clip(ramp, np.float32(0), np.float32(1))
    powers = _powers(rope.theta, head_dim)
    kept = np.float32(1.0) / powers
    squeezed = np.float32(1.0) / (np.float32(rope.factor) * powers)
    return (squeezed * (np.float32(1.0) - keep) + kept * keep).astype(np.float32), attention
