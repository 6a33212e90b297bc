"""The operations of one worker of several: each holds a part of the weights, and all get the same results.

Partial sums are gathered and added in the order of the workers. An all-reduce would add them in an order that depends
on their number of rows, and then a row's bits would depend on its neighbours. Every meeting of the workers needs what
came of the one before, so that they are in the same order everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops

from ms_spec.models.ops import plain_rows
from ms_spec.models.ops.interface import Backend
from ms_spec.models.parallel import Shard
from ms_spec.models.weights import WeightSpec


class Sum(nn.Cell):
    """(x [R, M] of each worker, residual [R, M], rows) -> their sum and the residual [R, M]."""

    def __init__(self, add: Any) -> None:
        super().__init__()
        self.gather, self.add = ops.AllGather(), add

    def construct(self, x: Tensor, residual: Tensor, rows: tuple) -> Tensor:
        return self.add(self.gather(x), residual, rows)


class LinearAdd(nn.Cell):
    """A linear map of which each worker has some columns, added to the residual that all have."""

    def __init__(self, own: Any, total: Sum) -> None:
        super().__init__()
        self.own, self.total = own, total

    def weights(self, *sources: str) -> list[WeightSpec]:
        specs: list[WeightSpec] = self.own.weights(*sources)
        return specs

    def construct(self, x: Tensor, residual: Tensor, rows: tuple) -> Tensor:
        return self.total(self.own(x, rows), residual, rows)


class Embedding(nn.Cell):
    """A table of which each worker has some rows: those that it has not are zeros, and the sum has them all.

    ``own``: an Embedding of ``each`` tokens, ``first`` the id of the first.
    """

    def __init__(self, own: Any, first: int, each: int, total: Sum) -> None:
        super().__init__()
        self.own, self.total = own, total
        self.first, self.none = Tensor(np.array([first], np.int32)), Tensor(np.zeros(1, np.int32))
        self.last = Tensor(np.array([each - 1], np.int32))

    def weights(self, source: str) -> list[WeightSpec]:
        specs: list[WeightSpec] = self.own.weights(source)
        return specs

    def construct(self, rows: tuple) -> Tensor:
        place = rows[0] - self.first
        here = ops.minimum(ops.maximum(place, self.none), self.last)
        x = self.own((here, *rows[1:]))
        nothing = ops.zeros_like(x)
        return self.total(ops.select((here == place).reshape(-1, 1), x, nothing), nothing, rows)


class Logits(nn.Cell):
    """(x [R, H], rows) -> [R, vocab]: each worker has the rows of some tokens, all get the logits of all.

    ``own``: a NormLinear or Linear of this worker's tokens.
    """

    def __init__(self, own: Any, join: Any) -> None:
        super().__init__()
        self.own, self.gather, self.join = own, ops.AllGather(), join

    def weights(self, *sources: str) -> list[WeightSpec]:
        specs: list[WeightSpec] = self.own.weights(*sources)
        return specs

    def construct(self, x: Tensor, rows: tuple) -> Tensor:
        return self.join(self.gather(self.own(x, rows)), rows)


class SharedVocabularyOps:
    """``backend`` beside a target whose vocabulary is shared out: for networks that every worker has as a whole.

    What is tied to the target's embeddings or output matrix computes the worker's part, and gathers.
    """

    def __init__(self, backend: Backend, shard: Shard) -> None:
        self._backend: Any = backend
        self._shard = shard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _tokens(self, vocab: int) -> tuple[int, int]:
        """The worker's first token, and how many it has."""
        first, last = self._shard.span(vocab)
        return first, last - first

    def _logits(self, own: Any, vocab: int) -> Logits:
        return Logits(own, self._backend.JoinParts(self._shard.size, vocab))

    def Norm(self, size: int, eps: float, tied: Any = None) -> Any:
        return self._backend.Norm(size, eps, _own(tied))

    def Linear(self, out: int, inner: int, dtype: str, bias: bool = False, tied: Any = None) -> Any:
        if _own(tied) is tied:
            return self._backend.Linear(out, inner, dtype, bias, tied)
        return self._logits(self._backend.Linear(self._tokens(out)[1], inner, dtype, tied=_own(tied)), out)

    def NormLinear(self, out: int, hidden: int, eps: float, dtype: str, bias: bool = False, tied: Any = None) -> Any:
        if _own(tied) is tied:
            return self._backend.NormLinear(out, hidden, eps, dtype, bias, tied)
        return self._logits(self._backend.NormLinear(self._tokens(out)[1], hidden, eps, dtype, tied=_own(tied)), out)


class ParallelOps(SharedVocabularyOps):
    """``backend`` for networks that are shared out, each worker with the heads and widths of its own.

    See :class:`ms_spec.models.ops.interface.Backend`.
    """

    def _total(self) -> Sum:
        return Sum(self._backend.AddParts())

    def LinearAdd(self, out: int, inner: int, dtype: str, bias: bool = False) -> Any:
        return LinearAdd(self._backend.Linear(out, inner, dtype, bias), self._total())

    def Embedding(self, vocab: int, hidden: int, dtype: str) -> Any:
        first, each = self._tokens(vocab)
        return Embedding(self._backend.Embedding(each, hidden, dtype), first, each, self._total())

    def Head(self, out: int, hidden: int, eps: float, dtype: str, bias: bool = False, tied: Any = None) -> Any:
        return self._logits(self._backend.Head(self._tokens(out)[1], hidden, eps, dtype, bias, _own(tied)), out)

    def fuse(self, layers: list[Any]) -> list[Any]:
        fused: list[Any] = self._backend.fuse(layers, self._total)
        return fused

    join = staticmethod(plain_rows.InTurn)


def _own(tied: Any) -> Any:
    """The worker's part of an operation that is shared out; any other as it is."""
    return tied.own if isinstance(tied, (Embedding, Logits)) else tied


def shared_out(backend: Backend, shard: Shard) -> Any:
    """The operations of a network that ``shard`` holds a part of."""
    return backend if shard.size == 1 else ParallelOps(backend, shard)


def beside(backend: Backend, shard: Shard) -> Any:
    """The operations of a whole network beside a target that ``shard`` holds a part of."""
    return backend if shard.size == 1 else SharedVocabularyOps(backend, shard)
