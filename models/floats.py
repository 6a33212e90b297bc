"""Rounding float32 to the 16-bit formats that weights are held in."""

from __future__ import annotations

from typing import Any

import numpy as np

HELD: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
}
"""How each dtype is held in NumPy: bfloat16 as its 16 bits."""


def to_bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> the bits of bfloat16 (uint16), rounded to nearest, ties to even; NaN stays (a quiet) NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if nan.any():
        rounded = np.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded)
    return rounded.astype(np.uint16)


def from_bfloat16_bits(bits: np.ndarray) -> np.ndarray:
    """Bits of bfloat16 (uint16) -> float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def held(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values in the form of HELD[dtype]."""
    if dtype == "float32":
        return np.ascontiguousarray(values, np.float32)
    if dtype == "bfloat16":
        return to_bfloat16_bits(values)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    raise ValueError(f"dtype: {dtype!r} is not supported; supported: {', '.join(HELD)}")


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values rounded through ``dtype``, as float32 again."""
    through = held(values, dtype)
    return from_bfloat16_bits(through) if dtype == "bfloat16" else through.astype(np.float32)
