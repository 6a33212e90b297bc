"""The arithmetic of acceptance: pure functions of tensors, shared by the rules and by the tests that enumerate them.

For each of n requests: target distributions p_1..p_{K+1}, drafts x_1..x_K and the distributions q_1..q_K they were
drawn from. Where a request has fewer than K drafts q is 0 there, which no draft can pass, so one formula serves all.
Sources: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (standard); Sun et al., "Block
Verification Accelerates Speculative Decoding" (block); Cai et al., "Medusa", section on typical acceptance (entropy).
"""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, ops


def likelihood_ratios(p_drafts: Tensor, q_drafts: Tensor) -> Tensor:
    """p_i(x_i) / q_i(x_i), both float [n, K] -> float [n, K]. 0 where q is 0: nothing was drafted there."""
    drafted = q_drafts > 0
    return ops.select(
        drafted, p_drafts / ops.select(drafted, q_drafts, ops.ones_like(q_drafts)), ops.zeros_like(p_drafts)
    )


def standard_acceptance(ratios: Tensor) -> Tensor:
    """float [n, K]: the probability that draft i passes, given that those before it did."""
    return ops.clamp(ratios, 0.0, 1.0)


def standard_length(uniforms: Tensor, acceptance: Tensor) -> Tensor:
    """uniforms, acceptance float [n, K] -> int32 [n]: how many drafts pass before the first that does not."""
    return ops.cumprod((uniforms < acceptance).astype(ms.int32), 1).sum(1).astype(ms.int32)


def block_weights(ratios: Tensor) -> Tensor:
    """P_0..P_K float [n, K+1]: P_0 = 1, P_i = min(P_{i-1} p_i(x_i) / q_i(x_i), 1)."""
    weight = ops.ones_like(ratios[:, :1])
    weights = [weight]
    for i in range(ratios.shape[1]):
        weight = ops.clamp(weight * ratios[:, i : i + 1], 0.0, 1.0)
        weights.append(weight)
    return ops.cat(weights, 1)


def residual_masses(weights: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """r_i = sum over x of max(P_i p_{i+1}(x) - q_{i+1}(x), 0).

    weights: P_i float [n, m]. p, q: p_{i+1} and q_{i+1}, float [n, m, V]. -> float [n, m].
    """
    return ops.relu(weights.expand_dims(2) * p - q).sum(2)


def one_hot_residual_masses(weights: Tensor, p_drafts: Tensor, drafted: Tensor) -> Tensor:
    """The same where q_{i+1} is all on draft i+1 (or 0 where ``drafted``, bool, is false). All float [n, m]."""
    return weights * ops.select(drafted, ops.relu(1.0 - p_drafts), ops.ones_like(p_drafts))


def block_acceptance(weights: Tensor, masses: Tensor) -> Tensor:
    """h_i = r_i / (r_i + 1 - P_i) for i < K (0/0 counts as 1), h_K = P_K.

    weights: P_1..P_K float [n, K]. masses: r_1..r_{K-1} float [n, K-1]. -> float [n, K].
    """
    last = weights[:, -1:]
    if weights.shape[1] == 1:
        return last
    below = masses + (1.0 - weights[:, :-1])
    defined = below > 0
    inner = ops.select(defined, masses / ops.select(defined, below, ops.ones_like(below)), ops.ones_like(below))
    return ops.cat((inner, last), 1)


def block_length(uniforms: Tensor, acceptance: Tensor) -> Tensor:
    """uniforms, acceptance float [n, K] -> int32 [n]: the largest i with u_i < h_i, 0 if there is none."""
    place = ops.arange(1, acceptance.shape[1] + 1).astype(ms.float32)
    return ops.amax((uniforms < acceptance).astype(ms.float32) * place, 1).astype(ms.int32)


def residual(weight: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """What the token after the accepted ones is drawn from, not normalised: max(P p - q, 0), or p where that sums to 0.

    weight float [n, 1] (1 in the standard rule). p, q float [n, V]: at the first position not accepted. q is 0 where
    nothing was drafted, the position after the last draft included. -> float [n, V].
    """
    left = ops.relu(weight * p - q)
    return ops.select(left.sum(1, keepdims=True) > 0, left, p)


def entropy_threshold(entropy: Tensor, alpha: float, threshold: float) -> Tensor:
    """theta = min(exp(-alpha * H), threshold), H in nats; any shape. The uniforms are multiplied by it."""
    return ops.clamp(ops.exp(-alpha * entropy), 0.0, threshold)
