"""Acceptance rules: which drafts stay, and which token follows them. Cells, so that they are part of the step graph.

Every rule is called alike:

    rule(logits float32 [R, V], rows, drafts int32 [n, K] (-1: none), draft_probs float32 [n, K, V] or None,
         sampling float32 [n, 4], banned int32 [n, E], banned_until int32 [n], uniforms float32 [n, 2w], shaping = None)
    -> (emitted int32 [n, w] (-1 after the end), num_emitted int32 [n], num_accepted int32 [n])

w = K + 1, and a draft's column is one less than that of the row it was fed to. Where the logits of the row that the
next token comes from are no distribution, -1 is emitted and nothing after it. A request at temperature 0 is greedy
under any rule, because its distributions are one-hot. What is drawn and compared are the distributions that the
requests want (``shaping``); entropies are those of the logits as they are. ``rule.matched`` says how the uniforms are
to be keyed: column i for output position i (true), or columns 0..K-1 to accept and column K for the one token that is
drawn (false).
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn, ops

from ms_spec.models.ops.constants import numbers
from ms_spec.models.ops.plain_sampling import cut
from ms_spec.verify import acceptance
from ms_spec.verify.rates import conditional_rates


def make_rule(
    backend: Any,
    width: int,
    *,
    method: str = "standard",
    entropy: bool = False,
    posterior_threshold: float = 0.95,
    posterior_alpha: float = 0.4,
    dense: bool = False,
    rates: tuple[float, ...] = (),
) -> nn.Cell:
    """The rule for one width bucket.

    Args:
        backend: constructors of the device operations.
        width: w = K + 1 of the bucket; 1 means that nothing is drafted and nothing is verified.
        method: "standard", "block" or "synthetic".
        entropy: loosen standard or block acceptance by the target's entropy. Lossy.
        dense: drafts come with distributions. Otherwise they count as one-hot.
        rates: for "synthetic", as SyntheticRule takes them.

    Raises:
        ValueError: an unknown method, or synthetic together with entropy.
    """
    if method not in ("standard", "block", "synthetic"):
        raise ValueError(f"rejection_sample_method={method!r}: allowed are standard, block, synthetic")
    if method == "synthetic":
        if entropy:
            raise ValueError(
                "rejection_sample_method='synthetic' accepts by rates: enable_entropy_verify must be false"
            )
        return SyntheticRule(backend, width, rates)
    if not (dense or entropy):
        return MatchRule(backend, width)
    rule = (BlockRule if method == "block" else StandardRule)(backend, width, dense)
    return EntropyRule(rule, backend, posterior_alpha, posterior_threshold) if entropy else rule


class MatchRule(nn.Cell):
    """For one-hot drafts: draw every position as plain decoding would, and keep drafts as long as they agree.

    Of the same law as the standard and the block rule, and it emits plain decoding's tokens, uniform by uniform.
    """

    matched = True

    def __init__(self, backend: Any, width: int) -> None:
        super().__init__()
        self.match = backend.Match(width)

    def construct(self, logits, rows, drafts, draft_probs, sampling, banned, banned_until, uniforms, shaping=None):
        return self.match(logits, rows, drafts, sampling, banned, banned_until, uniforms, shaping)


class SampledRule(nn.Cell):
    """What the standard and the block rule share. Subclasses choose the accepted length in ``accept``."""

    matched = False

    def __init__(self, backend: Any, width: int, dense: bool) -> None:
        super().__init__()
        self.width, self.dense = width, dense
        self.probs = backend.Probs()
        self.draw = backend.InverseCDF()
        self.grid = backend.Grid()

    def accept(self, uniforms, ratios, p, p_drafts, drafts, draft_probs):
        """-> (num_accepted int32 [n], weight float32 [n, 1] that scales p in the residual)."""
        raise NotImplementedError

    def construct(self, logits, rows, drafts, draft_probs, sampling, banned, banned_until, uniforms, shaping=None):
        last = self.width - 1
        p = self.probs(logits, rows, sampling, banned, banned_until, shaping)
        if self.width == 1:
            return self.draw(p, rows, uniforms[:, :1]), ops.ones_like(banned_until), ops.zeros_like(banned_until)
        p = self.grid(p, rows)
        drafted = drafts >= 0
        index = ops.maximum(drafts, 0)
        p_drafts = ops.gather_elements(p[:, :last], 2, index.expand_dims(2)).squeeze(2)
        q_drafts = drafted.astype(ms.float32)
        if self.dense:
            q = ops.gather_elements(draft_probs, 2, index.expand_dims(2)).squeeze(2)
            q_drafts = ops.select(drafted, q, ops.zeros_like(q))
        ratios = acceptance.likelihood_ratios(p_drafts, q_drafts)
        num_accepted, weight = self.accept(uniforms[:, :last], ratios, p, p_drafts, drafts, draft_probs)

        request = numbers(drafts.shape[0])
        at = ops.minimum(num_accepted, last - 1)
        refused = ops.gather(drafts.reshape(-1), request * last + at, 0)  # the draft after the accepted ones
        refused = ops.select(num_accepted < last, refused, ops.full_like(refused, -1)).reshape(-1, 1)
        p_next = ops.gather(p.reshape(-1, p.shape[2]), request * self.width + num_accepted, 0)
        if self.dense:
            q_next = ops.gather(draft_probs.reshape(-1, p.shape[2]), request * last + at, 0)
            q_next = ops.select(refused >= 0, q_next, ops.zeros_like(q_next))
        else:
            q_next = (numbers(p.shape[2]) == refused).astype(ms.float32)
        left = acceptance.residual(weight, p_next, q_next)
        count = ops.full((1,), drafts.shape[0], dtype=ms.int32)
        one_each = (request, request, request, request, count, rows[5])
        token = self.draw(left, one_each, uniforms[:, last : last + 1])
        tokens = ops.cat((drafts, ops.full_like(token, -1)), 1)
        column = numbers(self.width)
        tokens = ops.select(column == num_accepted.reshape(-1, 1), ops.broadcast_to(token, tokens.shape), tokens)
        return cut(tokens, num_accepted), num_accepted + 1, num_accepted


class StandardRule(SampledRule):
    """Each draft is accepted with probability min(p/q, 1), up to the first that is not."""

    def accept(self, uniforms, ratios, p, p_drafts, drafts, draft_probs):
        num_accepted = acceptance.standard_length(uniforms, acceptance.standard_acceptance(ratios))
        return num_accepted, ops.ones_like(ratios[:, :1])


class BlockRule(SampledRule):
    """The drafts are accepted as a block: never fewer of them in expectation than by the standard rule."""

    def accept(self, uniforms, ratios, p, p_drafts, drafts, draft_probs):
        last = self.width - 1
        weights = acceptance.block_weights(ratios)
        masses = weights  # not looked at when there is one draft
        if last > 1:
            drafted = drafts[:, 1:] >= 0
            if self.dense:
                masses = acceptance.residual_masses(weights[:, 1:last], p[:, 1:last], draft_probs[:, 1:])
                masses = ops.select(drafted, masses, weights[:, 1:last])
            else:
                masses = acceptance.one_hot_residual_masses(weights[:, 1:last], p_drafts[:, 1:], drafted)
        num_accepted = acceptance.block_length(uniforms, acceptance.block_acceptance(weights[:, 1:], masses))
        return num_accepted, ops.gather_elements(weights, 1, num_accepted.reshape(-1, 1))


class EntropyRule(nn.Cell):
    """Loosens another rule where the target is sure: u_i becomes theta_i u_i. Lossy by design."""

    matched = False

    def __init__(self, inner: SampledRule, backend: Any, alpha: float, threshold: float) -> None:
        super().__init__()
        self.inner = inner
        self.entropy = backend.Entropy()
        self.alpha, self.threshold = alpha, threshold

    def construct(self, logits, rows, drafts, draft_probs, sampling, banned, banned_until, uniforms, shaping=None):
        last = self.inner.width - 1
        if last > 0:
            theta = acceptance.entropy_threshold(self.entropy(logits, rows), self.alpha, self.threshold)
            uniforms = ops.cat((uniforms[:, :last] * theta[:, :last], uniforms[:, last:]), 1)
        return self.inner(logits, rows, drafts, draft_probs, sampling, banned, banned_until, uniforms, shaping)


class SyntheticRule(nn.Cell):
    """Accepts at given rates whatever the probabilities say: for capacity planning, never for text.

    ``rates[i]`` is the probability that drafts 0..i are all accepted: in [0, 1] and not increasing, one a draft.
    """

    matched = False

    def __init__(self, backend: Any, width: int, rates: tuple[float, ...]) -> None:
        super().__init__()
        self.width = width
        self.probs = backend.Probs()
        self.draw = backend.InverseCDF()
        self.rates = ms.Tensor(conditional_rates(rates, width - 1) or [0.0], ms.float32)

    def construct(self, logits, rows, drafts, draft_probs, sampling, banned, banned_until, uniforms, shaping=None):
        last = self.width - 1
        p = self.probs(logits, rows, sampling, banned, banned_until, shaping)
        tokens = self.draw(p, rows, ops.broadcast_to(uniforms[:, last : last + 1], (uniforms.shape[0], self.width)))
        if last == 0:
            return tokens, ops.ones_like(banned_until), ops.zeros_like(banned_until)
        passed = ops.logical_and(uniforms[:, :last] < self.rates, drafts >= 0)
        passed = ops.logical_and(passed, tokens[:, :-1] >= 0)  # not over a row whose logits are no distribution
        num_accepted = ops.cumprod(passed.astype(ms.int32), 1).sum(1).astype(ms.int32)
        column = numbers(self.width)
        known = ops.cat((drafts, tokens[:, last:]), 1)
        tokens = ops.select(column < num_accepted.reshape(-1, 1), known, tokens)
        return cut(tokens, num_accepted), num_accepted + 1, num_accepted
