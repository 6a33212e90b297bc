"""Sampling and n-gram lookup in plain MindSpore operators, for every device. Float32, row by row.

Slow on CPU (they sort the vocabulary), but short: the fused kernels are tested against the same NumPy oracle. All
Cells take the ``rows`` bundle of :mod:`ms_spec.models.ops.interface`: rows from ``count`` on are dead, and a row's
place in the [n, w] grid is its ``cell``.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops

from ms_spec.models.ops.constants import numbers
from ms_spec.models.ops.plain_rows import at_cells, grid_of, live_rows
from ms_spec.models.ops.plain_shaping import Shape, without

_TINY = 1e-30  # keeps divisions defined; no temperature or sum that matters is smaller
_INF = float("inf")


class Probs(nn.Cell):
    """Logits to the distribution that a request samples from.

    (logits float32 [R, V], rows, sampling float32 [n, 4], banned int32 [n, E] (-1: none), banned_until int32 [n],
    shaping = None) -> float32 [R, V]. ``sampling`` holds temperature, top_k (<= 0: off), top_p and min_p.

    Shaping and banned ids come first; then temperature, top-k, top-p (the smallest set of ids whose mass, of what top-k
    left, is at least top_p) and min-p; ids as probable as the last one kept are kept too. Temperature 0 and top_k 1
    mean all mass on the argmax (lowest id on ties). Dead rows, and rows with a NaN, a +inf or nothing but -inf, are all
    0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shape = Shape()
        self.exclusive_cumsum = ops.CumSum(exclusive=True)

    def construct(self, logits, rows, sampling, banned, banned_until, shaping=None):
        vocab = logits.shape[1]
        ids = numbers(vocab)
        wanted = ops.gather(sampling, rows[2], 0)
        temperature, top_k, top_p, min_p = wanted[:, 0:1], wanted[:, 1:2], wanted[:, 2:3], wanted[:, 3:4]

        finite = logits < _INF  # false for NaN as well
        x = ops.select(finite, logits, ops.full_like(logits, -_INF))
        if shaping is not None:
            x = self.shape(x, rows, shaping)
            finite = ops.logical_and(finite, x < _INF)
        early = (rows[1] + 1 < ops.gather(banned_until, rows[2], 0)).reshape(-1, 1)
        forbidden = ops.gather(banned, rows[2], 0)
        forbidden = ops.select(ops.logical_and(early, forbidden >= 0), forbidden, ops.full_like(forbidden, vocab))
        x = without(x, forbidden)
        top = ops.amax(x, 1, keepdims=True)
        valid = ops.logical_and(ops.logical_and(finite.all(1, True), top > -_INF), live_rows(rows).reshape(-1, 1))
        best = ops.argmax(x, 1).astype(ms.int32).reshape(-1, 1)
        greedy = ops.logical_or(temperature <= 0, top_k == 1)

        top = ops.select(top > -_INF, top, ops.zeros_like(top))
        weight = ops.exp((x - top) / ops.maximum(temperature, _TINY))  # the most probable id has exactly 1
        ranked, _ = ops.sort(weight, -1, True)
        k = ops.clamp(top_k, 1, vocab).astype(ms.int32) - 1
        floor = ops.select(top_k > 0, ops.gather_elements(ranked, 1, k), ops.zeros_like(top))
        ranked = ops.select(ranked >= floor, ranked, ops.zeros_like(ranked))
        before = self.exclusive_cumsum(ranked, 1)  # mass of what stands ahead of each id
        mass = before[:, -1:] + ranked[:, -1:]
        kept = (before < top_p * mass).astype(ms.int32).sum(1, keepdims=True)
        last = ops.gather_elements(ranked, 1, ops.clamp(kept, 1, vocab).astype(ms.int32) - 1)
        floor = ops.maximum(ops.maximum(floor, min_p), ops.select(top_p < 1, last, ops.zeros_like(last)))
        weight = ops.select(weight >= floor, weight, ops.zeros_like(weight))
        weight = weight / ops.maximum(weight.sum(1, keepdims=True), _TINY)
        weight = ops.select(greedy, (ids == best).astype(ms.float32), weight)
        return ops.select(valid, weight, ops.zeros_like(weight))


class Argmax(nn.Cell):
    """(logits float32 [R, V], rows) -> int32 [n, w]: the lowest id of the largest logit.

    -1 in dead cells, and for rows with a NaN, a +inf or nothing but -inf. ``live``: the entry of ``rows`` that is 0
    where a row has no token, for backends that do not compact; a bundle without it is told by its count alone.
    """

    def __init__(self, live: int | None = None) -> None:
        super().__init__()
        self.live = live

    def construct(self, logits, rows):
        finite = logits < _INF  # false for NaN as well
        x = ops.select(finite, logits, ops.full_like(logits, -_INF))
        valid = ops.logical_and(finite.all(1), ops.amax(x, 1) > -_INF)
        if self.live is not None and len(rows) > self.live:
            valid = ops.logical_and(valid, rows[self.live] > 0)
        token = ops.select(valid, ops.argmax(x, 1).astype(ms.int32), ops.full_like(rows[3], -1))
        return at_cells(token, rows, logits.shape[0], -1).reshape(grid_of(rows))


class InverseCDF(nn.Cell):
    """Draws one id a row, by the vocabulary's order.

    (p float32 [R, V] (need not be normalised), rows, u float32 [n, w] in [0, 1)) -> int32 [n, w]: the first id at
    which the running sum exceeds u times the whole sum, so never one of probability 0. -1 in dead cells, and where
    p sums to 0. ``live``: see :class:`Argmax`.
    """

    def __init__(self, live: int | None = None) -> None:
        super().__init__()
        self.live = live

    def construct(self, p, rows, u):
        running = ops.cumsum(p, 1)
        total = running[:, -1:]
        wanted = ops.gather(u.reshape(-1), rows[3], 0).reshape(-1, 1) * total
        # The second condition stops at the last id of any probability, should the product round up to the sum.
        passed = ops.logical_and(running <= wanted, running < total).astype(ms.int32).sum(1)
        valid = total.reshape(-1) > 0
        if self.live is not None and len(rows) > self.live:
            valid = ops.logical_and(valid, rows[self.live] > 0)
        token = ops.select(valid, passed.astype(ms.int32), ops.full_like(rows[3], -1))
        return at_cells(token, rows, u.shape[0] * u.shape[1], -1).reshape(u.shape)


def cut(tokens, num_accepted):
    """tokens int32 [n, w] -> the same with -1 behind the accepted ones and the one that follows them."""
    column = numbers(tokens.shape[1])
    return ops.select(column <= num_accepted.reshape(-1, 1), tokens, ops.full_like(tokens, -1))


class Match(nn.Cell):
    """Draws every position as plain decoding would, and keeps drafts as long as they agree.

    (logits float32 [R, V], rows, drafts int32 [n, w - 1], sampling float32 [n, 4], banned int32 [n, E],
    banned_until int32 [n], u float32 [n, w], shaping = None)
    -> (emitted int32 [n, w], num_emitted int32 [n], num_accepted int32 [n])
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.probs, self.draw = width, Probs(), InverseCDF()

    def construct(self, logits, rows, drafts, sampling, banned, banned_until, u, shaping=None):
        probs = self.probs(logits, rows, sampling, banned, banned_until, shaping)
        tokens = self.draw(probs, rows, u[:, : self.width])
        if self.width == 1:
            return tokens, ops.ones_like(banned_until), ops.zeros_like(banned_until)
        same = ops.logical_and(tokens[:, :-1] == drafts, drafts >= 0).astype(ms.int32)
        num_accepted = ops.cumprod(same, 1).sum(1).astype(ms.int32)
        return cut(tokens, num_accepted), num_accepted + 1, num_accepted


class Entropy(nn.Cell):
    """(logits float32 [R, V], rows) -> float32 [n, w]: entropy of softmax(logits) in nats, at temperature 1.

    0 in dead cells and where the logits are no distribution.
    """

    def construct(self, logits, rows):
        x = ops.select(logits < _INF, logits, ops.full_like(logits, -_INF))
        top = ops.amax(x, 1, keepdims=True)
        x = ops.maximum(x - ops.maximum(top, -3e38), -1e4)  # e^-1e4 is 0, and 0 * 1e4 is not NaN
        weight = ops.exp(x)
        total = ops.maximum(weight.sum(1), _TINY)
        # The CPU's log has other bits for what is left over after whole vectors, so each row gets a whole one.
        log_total = ops.log(ops.broadcast_to(total.reshape(-1, 1), (total.shape[0], 16)))[:, 0]
        entropy = log_total - (weight * x).sum(1) / total
        valid = ops.logical_and((logits < _INF).all(1), top.reshape(-1) > -_INF)
        entropy = ops.select(valid, entropy, ops.zeros_like(entropy))
        return at_cells(entropy, rows, logits.shape[0], 0.0).reshape(grid_of(rows))


class Grid(nn.Cell):
    """(x float32 [R, V], rows) -> float32 [n, w, V]: rows put where they stand in the grid, 0 in dead cells."""

    def construct(self, x, rows):
        return at_cells(x, rows, x.shape[0], 0.0).reshape((*grid_of(rows), x.shape[1]))


class NgramLookup(nn.Cell):
    """Finds where a context said the same before.

    (history int32 [S, L], slot int32 [n], length int32 [n], limit int32 [n]) -> (drafts int32 [n, K], -1 where there
    is none; counts int32 [n]). Of the n-grams of min_n to max_n ids that end ``history[slot, :length]`` the longest
    that occurs earlier is taken, at its earliest occurrence; the ids that follow it there, up to the context's end
    and at most ``limit``, are the drafts.
    """

    def __init__(self, min_n: int, max_n: int, num_drafts: int) -> None:
        super().__init__()
        self.min_n, self.max_n, self.num_drafts = min_n, max_n, num_drafts

    def construct(self, history, slot, length, limit):
        context = ops.gather(history, slot, 0)
        span = context.shape[1]
        place = numbers(span)
        length = length.reshape(-1, 1)
        run = ops.logical_and(place < length - 1, place >= 0)  # an occurrence ends before the context does
        size = ops.zeros_like(context)  # how many ids up to each place equal those at the context's end
        for back in range(min(self.max_n, span)):
            end = ops.gather_elements(context, 1, ops.clamp(length - 1 - back, 0, span - 1))
            earlier = context
            if back > 0:
                earlier = ops.cat((context[:, span - back :], context[:, : span - back]), 1)  # wraps: ruled out below
            run = ops.logical_and(run, ops.logical_and(earlier == end, place >= back))
            size = size + run.astype(ms.int32)
        longest = ops.amax(size, 1, keepdims=True)
        first = ops.amin(ops.select(size == longest, ops.broadcast_to(place, size.shape), ops.full_like(size, span)), 1)
        column = numbers(self.num_drafts)
        source = first.reshape(-1, 1) + 1 + column
        found = ops.logical_and(longest >= self.min_n, source < length)
        found = ops.logical_and(found, column < limit.reshape(-1, 1))
        drafts = ops.gather_elements(context, 1, ops.clamp(source, 0, span - 1))
        return ops.select(found, drafts, ops.full_like(drafts, -1)), found.astype(ms.int32).sum(1).astype(ms.int32)
