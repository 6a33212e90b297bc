"""Sampling and n-gram lookup as fused kernels. What each Cell does is said in :mod:`ms_spec.models.ops.plain_sampling`.

A row costs a few passes over the vocabulary (a greedy one: a search for the maximum and a fill with zeros), a dead row
nothing but its zeros.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

from ms_spec.models.ops.cpu.build import kernel


class Probs(nn.Cell):
    """(logits [R, V], rows, sampling [n, 4], banned [n, E], banned_until [n]) -> float32 [R, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.op = kernel("sampling_probs", lambda logits, *_: logits, lambda logits, *_: logits)

    def construct(self, logits, rows, sampling, banned, banned_until):
        return self.op(logits, rows[1], rows[2], rows[4], sampling, banned, banned_until)


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
    """(logits [R, V], rows, drafts [n, w - 1], sampling [n, 4], banned [n, E], banned_until [n], u [n, w]) -> three."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.nothing = ms.Tensor([[-1]], ms.int32)  # no tensor is empty for a kernel
        self.op = kernel(
            "sampling_match", lambda *shapes: (shapes[9], shapes[9][:1], shapes[9][:1]), lambda *_: (ms.int32,) * 3
        )

    def construct(self, logits, rows, drafts, sampling, banned, banned_until, u):
        drafts = self.nothing if self.width == 1 else drafts
        return self.op(
            logits, rows[1], rows[2], rows[3], rows[4], drafts, sampling, banned, banned_until, u[:, : self.width]
        )


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
