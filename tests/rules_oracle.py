"""The acceptance rules for one request, in plain Python and float64, from their definitions."""

from __future__ import annotations

import numpy as np
from sampling_oracle import inverse_cdf


def match(p, drafts, u):
    """Draws each position and compares. p [k+1, V], drafts: the k real ones, u [k+1]. -> (emitted, num_accepted)."""
    out = []
    for i, row in enumerate(p):
        token = inverse_cdf(row, u[i])
        out.append(token)
        if token < 0 or i == len(drafts) or token != drafts[i]:
            break
    return out, len(out) - 1


def standard(p, q, drafts, u_accept, u_draw):
    """Token-wise rejection sampling. q [k, V]."""
    for i, x in enumerate(drafts):
        if not (q[i][x] > 0 and u_accept[i] < p[i][x] / q[i][x]):
            return _finish(drafts[:i], 1.0, p[i], q[i], u_draw)
    return _finish(drafts, 1.0, p[len(drafts)], np.zeros_like(p[0]), u_draw)


def block(p, q, drafts, u_accept, u_draw):
    """Block verification: every draft's chance looks at the residual behind it, and the longest success wins."""
    k = len(drafts)
    weights, best = [1.0], 0
    for i, x in enumerate(drafts, 1):
        weights.append(min(weights[-1] * (p[i - 1][x] / q[i - 1][x] if q[i - 1][x] > 0 else 0.0), 1.0))
        h = weights[i]
        if i < k:
            r = np.maximum(weights[i] * p[i] - q[i], 0).sum()
            h = r / (r + 1 - weights[i]) if r + 1 - weights[i] > 0 else 1.0
        if u_accept[i - 1] < h:
            best = i
    behind = q[best] if best < k else np.zeros_like(p[0])
    return _finish(drafts[:best], weights[best], p[best], behind, u_draw)


def _finish(accepted, weight, p, q, u):
    left = np.maximum(weight * p - q, 0)
    return [*accepted, inverse_cdf(left if left.sum() > 0 else p, u)], len(accepted)
