"""Plain NumPy versions, in float64, of what turns logits into tokens. Written from the definitions, not the code."""

from __future__ import annotations

import numpy as np


def make_rows(n: int, w: int, live: np.ndarray | None = None, position: np.ndarray | None = None, compact: bool = True):
    """The ``rows`` bundle as NumPy arrays. ``live``: bool [n, w]; live rows come first when ``compact``."""
    live = np.ones((n, w), bool) if live is None else live
    position = np.tile(np.arange(w), (n, 1)) if position is None else position
    order = np.argsort(~live.ravel(), kind="stable") if compact else np.arange(n * w)
    count = int(live.sum()) if compact else n * w
    cell = order.astype(np.int32)
    return (
        np.zeros(n * w, np.int32),
        position.ravel()[order].astype(np.int32),
        (cell // w).astype(np.int32),
        cell,
        np.array([count], np.int32),
        np.zeros((n, 3), np.int32),
    )


def distribution(logits, temperature, top_k, top_p, min_p, banned=()) -> np.ndarray:
    """One row: float64 [V], all 0 where the logits are no distribution."""
    x = np.asarray(logits, np.float64).copy()
    if np.isnan(x).any() or (x == np.inf).any():
        return np.zeros_like(x)
    x[[b for b in banned if b >= 0]] = -np.inf
    if x.max() == -np.inf:
        return np.zeros_like(x)
    if temperature == 0 or top_k == 1:
        return np.eye(len(x))[np.argmax(x)]
    with np.errstate(divide="ignore"):
        p = np.exp((x - x.max()) / np.float64(temperature))
    p[p < 1.2e-38] = 0  # what float32 holds
    if 0 < top_k < len(p):
        p[p < np.sort(p)[::-1][int(top_k) - 1]] = 0
    p /= p.sum()
    if top_p < 1:
        keep = np.array([p[p > value].sum() < top_p for value in p]) if len(p) < 600 else _nucleus(p, top_p)
        p = np.where(keep, p, 0)
        p /= p.sum()
    p = np.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


def _nucleus(p: np.ndarray, top_p: float) -> np.ndarray:
    values, inverse = np.unique(p, return_inverse=True)
    mass = np.zeros(len(values))
    np.add.at(mass, inverse, p)
    above = mass[::-1].cumsum()[::-1] - mass
    return (above < top_p)[inverse]


def inverse_cdf(p: np.ndarray, u: float) -> int:
    """The first id at which the running sum exceeds u * sum; -1 when nothing has any probability."""
    running = np.cumsum(np.asarray(p, np.float64))
    if not running[-1] > 0:
        return -1
    return int(min(np.searchsorted(running, u * running[-1], side="right"), np.nonzero(p)[0][-1]))


def entropy(logits: np.ndarray) -> float:
    """Nats, of softmax(logits)."""
    x = np.asarray(logits, np.float64)
    p = np.exp(x - x.max())
    p = p[p > 0] / p.sum()
    return float(-(p * np.log(p)).sum())
