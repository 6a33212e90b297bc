"""The random numbers of sampling: a hash of what they are for, so that nothing else can change them.

A number is the hash of (seed, sample index, purpose, output index, number within the purpose): counters, no state.
The hash chains the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
2014; constants of Stafford's variant 13). Its upper 24 bits give a float32 in [0, 1), exactly.

The width of the bucket that a request happens to run in is no part of the key: the same request gets the same numbers
in a wide and in a narrow step.
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MATCH, _ACCEPT, _DRAW, _DRAFT = range(4)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser; x uint64, wrapping around."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix_int(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _uniforms(seed: int, sample: int, purpose: np.ndarray, output_index: np.ndarray, number: np.ndarray) -> np.ndarray:
    """float32, of the shape of the three arrays (uint64)."""
    key = np.array([_mix_int(_mix_int(seed + _GOLDEN) + _GOLDEN * (sample + 1))], np.uint64)
    golden = np.uint64(_GOLDEN)
    key = _mix(key + golden * (output_index + np.uint64(1)))
    key = _mix(key + golden * (purpose * np.uint64(1 << 32) + number + np.uint64(1)))
    return (key >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def matched_uniforms(seed: int, sample: int, output_index: int, width: int) -> np.ndarray:
    """One number an output position: float32 [width], column i for the output token ``output_index + i``.

    The same position gets the same number in whatever step it is emitted.
    """
    zero = np.zeros(width, np.uint64)
    return _uniforms(
        seed, sample, zero + np.uint64(_MATCH), np.arange(output_index, output_index + width).astype(np.uint64), zero
    )


def step_uniforms(seed: int, sample: int, output_index: int, num_drafts: int) -> np.ndarray:
    """The numbers of one step: float32 [2 * (num_drafts + 1)], K = num_drafts.

    Columns 0..K-1 accept the drafts, column K draws the correction or bonus, columns K+1..2K draw the next
    probabilistic drafts, and the last is not used. ``output_index`` is that of the step's first output token, so no
    number serves two steps.
    """
    k = num_drafts
    number = np.concatenate([np.arange(k), [0], np.arange(k + 1)]).astype(np.uint64)
    purpose = np.repeat(np.array([_ACCEPT, _DRAW, _DRAFT], np.uint64), (k, 1, k + 1))
    return _uniforms(seed, sample, purpose, np.full(2 * k + 2, output_index, np.uint64), number)
