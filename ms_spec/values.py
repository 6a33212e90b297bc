"""Checks of single values that users give. Each fault is a ValueError of one line that names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def integer(name: str, value: Any, least: int, allowed: str = "", most: int | None = None) -> int:
    """An integer of any kind, NumPy's too, but no bool."""
    allowed, given = allowed or f"an integer >= {least}", value
    if isinstance(value, bool) or not isinstance(value, int):
        try:
            value = value.__index__() if not isinstance(value, bool) else None
        except (AttributeError, TypeError):
            value = None
    if value is None:
        raise ValueError(f"{name} = {given!r}: must be {allowed}")
    if value < least or (most is not None and value > most):
        near = least if value < least else most
        raise ValueError(f"{name} = {value}: must be {allowed}; nearest: {near}")
    return int(value)


def number(name: str, value: Any, allowed: str, least: float, most: float, open_below: bool = False) -> float:
    """A finite number from ``least`` to ``most``; ``open_below``: above ``least``."""
    try:
        found = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not (least <= found <= most) or math.isinf(found) or (open_below and found == least):
        raise ValueError(f"{name} = {value!r}: must be {allowed}")
    return found


def strings(name: str, value: Any, empty: str) -> list[str]:
    """Texts, none of them empty (``empty`` says why); none at all for None."""
    if value is None:
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} = {value!r}: must be a string or a list of strings")
    if "" in texts:
        raise ValueError(f"{name} contains an empty string, {empty}; remove it")
    return list(texts)


def ids(name: str, value: Any) -> list[int]:
    """Token ids; none at all for None."""
    if value is None:
        return []
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise ValueError(f"{name} = {value!r}: must be a list of token ids")
    found = [integer(f"{name} entry", token, 0, "a token id (an integer >= 0)") for token in value]
    return sorted(found) if isinstance(value, (set, frozenset)) else found


def biases(name: str, value: Any) -> dict[int, float]:
    """Token id -> number; none at all for None. Ids may be written as texts, as JSON has them."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} = {value!r:.60}: must be a dict of token id and number")
    found = {}
    for token, bias in value.items():
        key = int(token) if isinstance(token, str) and token.isdecimal() else token
        key = integer(f"{name} key", key, 0, "a token id (an integer >= 0)")
        found[key] = number(f"{name}[{key}]", bias, "a number from -1e30 to 1e30", -1e30, 1e30)
    return found
