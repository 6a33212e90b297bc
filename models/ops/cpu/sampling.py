"""Sampling, log-probabilities and n-gram lookup as fused kernels. What each Cell does is said in
:mod:`ms_spec.models.ops.plain_sampling` and :mod:`ms_spec.models.ops.plain_shaping`.

A row costs a few passes over the vocabulary (a greedy one: a search for the maximum and a fill with zeros), a dead row
nothing but its zeros. Shaping and log-probabilities cost where a request asks for them.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

from ms_spec.models.ops.cpu.build import kernel


class Probs(nn.Cell):
    """(logits [R, V], rows, sampling [n, 4], banned [n, E], banned_until [n], shaping) -> float32 [R, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.op = kernel("sampling_probs", lambda logits, *_: logits, lambda logits, *_: logits)
        # In its place among the writes to the history, which it reads.
        self.shaped = kernel("sampling_shaped_probs", lambda x, *_: x, lambda x, *_: x, mutates=True)

    def construct(self, logits, rows, sampling, banned, banned_until, shaping=None):
        if shaping is None:
            return self.op(logits, rows[1], rows[2], rows[4], sampling, banned, banned_until)
        return self.shaped(logits, rows[1], rows[2], rows[4], sampling, banned, banned_until, *shaping)


class InverseCDF(nn.Cell):
    """(p [R, V], rows, u [n, w]) -> int32 [n, w]."""

    def __init__(self) -> None:
        super().__init__()
        self.op = kernel("sampling_inverse_cdf", lambda p, cell, count, u: u, lambda *_: ms.int32)

    def construct(self, p, rows, u):
        return self.op(p, rows[3], rows[4], u)


class Argmax(nn.Cell):
    """(logits [R, V], rows) -> int32 [n, w]."""

    def __init__(self) -> None:
        super().__init__()
        self.op = kernel(
            "sampling_argmax", lambda x, cell, count, tables: [tables[0], x[0] // tables[0]], lambda *_: ms.int32
        )

    def construct(self, logits, rows):
        return self.op(logits, rows[3], rows[4], rows[5])


class Match(nn.Cell):
    """(logits [R, V], rows, drafts [n, w - 1], sampling [n, 4], banned [n, E], banned_until [n], u [n, w], shaping)
    -> three."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.nothing = ms.Tensor([[-1]], ms.int32)  # no tensor is empty for a kernel
        made = (lambda *shapes: (shapes[-1], shapes[-1][:1], shapes[-1][:1])), (lambda *_: (ms.int32,) * 3)
        self.op = kernel("sampling_match", *made)
        self.shaped = kernel("sampling_shaped_match", *made, mutates=True)  # see Probs

    def construct(self, logits, rows, drafts, sampling, banned, banned_until, u, shaping=None):
        drafts, u = self.nothing if self.width == 1 else drafts, u[:, : self.width]
        if shaping is None:
            return self.op(logits, rows[1], rows[2], rows[3], rows[4], drafts, sampling, banned, banned_until, u)
        return self.shaped(
            logits, rows[1], rows[2], rows[3], rows[4], drafts, sampling, banned, banned_until, *shaping, u
        )


class Logprobs(nn.Cell):
    """(logits [R, V], rows, tokens [n, w], asked [n, A]) -> float32 [n, w, 2 + 2 N]."""

    def __init__(self, most: int, column: int) -> None:
        super().__init__()
        self.column = ms.Tensor([column], ms.int32)
        self.op = kernel(
            "logprobs",
            lambda x, request, cell, count, tokens, *_: [*tokens, 2 + 2 * min(most, x[1])],
            lambda *_: ms.float32,
        )

    def construct(self, logits, rows, tokens, asked):
        return self.op(logits, rows[2], rows[3], rows[4], tokens, asked, self.column)


class Entropy(nn.Cell):
    """(logits [R, V], rows) -> float32 [n, w], nats."""

    def __init__(self) -> None:
        super().__init__()
        self.op = kernel("sampling_entropy", lambda logits, *_: [logits[0]], lambda logits, *_: logits)

    def construct(self, logits, rows):
        requests = rows[5].shape[0]
        return self.op(logits, rows[3], rows[4]).reshape(requests, -1)


class Grid(nn.Cell):
    """(x [R, V], rows) -> float32 [n, w, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.op = kernel(
            "sampling_grid", lambda x, cell, count, tables: [tables[0], x[0] // tables[0], x[1]], lambda x, *_: x
        )

    def construct(self, x, rows):
        return self.op(x, rows[3], rows[4], rows[5])


class NgramLookup(nn.Cell):
    """(history int32 [S, L], slot [n], length [n], limit [n]) -> (drafts int32 [n, K], counts int32 [n])."""

    def __init__(self, min_n: int, max_n: int, num_drafts: int) -> None:
        super().__init__()
        self.sizes = ms.Tensor([min_n, max_n], ms.int32)
        self.op = kernel(
            "ngram_lookup",
            lambda history, slot, *_: ([slot[0], num_drafts], [slot[0]]),
            lambda *_: (ms.int32, ms.int32),
        )

    def construct(self, history, slot, length, limit):
        return self.op(history, slot, length, limit, self.sizes)
