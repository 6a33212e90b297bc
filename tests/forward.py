"""Runs a Decoder on chosen grids of tokens and gives all logits: the forward pass without engine and verification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor, nn

from ms_spec.group import join
from ms_spec.models.checkpoint.sharded import sharded
from ms_spec.models.decoder import Decoder
from ms_spec.models.loading import load
from ms_spec.models.ops.cpu import CpuOps
from ms_spec.models.ops.parallel import shared_out
from ms_spec.models.ops.reference import ReferenceOps
from ms_spec.models.parallel import Shard, part
from ms_spec.models.weights import load_weights
from ms_spec.runtime import graph_thread, setup_mindspore

BACKENDS = {"cpu": CpuOps, "reference": ReferenceOps}


class _Logits(nn.Cell):
    def __init__(self, target: Decoder) -> None:
        super().__init__()
        self.target = target

    def construct(self, tokens, start, tables, bounds):
        rows = self.target.rows(tokens, start, tables, bounds)
        return self.target.head(self.target(rows)[-1], rows), rows[3], rows[4]


class Forward:
    """A model with a paged cache for ``requests`` contexts of ``max_len`` positions.

    ``shuffled``: the blocks of a context lie in no order. Graphs are compiled for each shape of grid. ``shard``: this
    worker of an msrun job, of which all run the same.
    """

    def __init__(
        self,
        model: Path | str,
        backend: str = "cpu",
        dtype: str = "float32",
        *,
        max_len: int = 128,
        block_size: int = 16,
        requests: int = 4,
        shuffled: bool = True,
        shard: Shard | None = None,
    ) -> None:
        loaded = load(model)
        self.config = loaded.config
        per_request = -(-max_len // block_size)
        blocks = np.arange(1, requests * per_request + 1, dtype=np.int32)
        if shuffled:
            np.random.default_rng(0).shuffle(blocks)
        self.tables = blocks.reshape(requests, per_request)
        sizes = blocks.size + 1, block_size, max_len
        self._cell = graph_thread().run(self._build, loaded, backend, dtype, sizes, shard or Shard())

    @staticmethod
    def _build(loaded: Any, backend: str, dtype: str, sizes: tuple[int, int, int], shard: Shard) -> _Logits:
        setup_mindspore("cpu")
        if shard.size > 1:
            join()
        decoder = Decoder(part(loaded.config, shard), shared_out(BACKENDS[backend](), shard), *sizes, dtype)
        vocabulary = dict.fromkeys(("embed_tokens", "lm_head"), loaded.config.vocab_size)
        load_weights(decoder.weights(), sharded(loaded.checkpoint, loaded.config, shard, vocabulary), cache_key=None)
        return _Logits(decoder)

    def grid(self, tokens: np.ndarray, start: np.ndarray, which: np.ndarray) -> np.ndarray:
        """tokens [n, w] (-1: none), start [n], which context each request is (-1: none) -> logits [n, w, V].

        Dead cells are NaN.
        """
        tokens = np.asarray(tokens, np.int32)
        tables = np.where(np.asarray(which)[:, None] >= 0, self.tables[np.maximum(which, 0)], 0).astype(np.int32)
        inputs = (tokens, np.asarray(start, np.int32), tables, np.ones(1, np.int32))
        logits, cell, count = graph_thread().run(
            lambda: [x.asnumpy().copy() for x in self._cell(*(Tensor(x) for x in inputs))]
        )
        out = np.full((tokens.size, logits.shape[1]), np.nan, np.float32)
        out[cell[: count[0]]] = logits[: count[0]]
        out[tokens.reshape(-1) < 0] = np.nan
        return out.reshape(*tokens.shape, -1)

    def run(self, ids: np.ndarray, pieces: list[int], context: int = 0, width: int | None = None) -> np.ndarray:
        """Feeds one context's ids in pieces, from position 0 -> logits [len(ids), V].

        ``width``: every piece of more than one id runs in a grid of this width, so that one graph serves all of them.
        """
        assert sum(pieces) == len(ids)
        out, at = [], 0
        for size in pieces:
            tokens = np.full((1, size if size == 1 else width or size), -1)
            tokens[0, :size] = ids[at : at + size]
            out.append(self.grid(tokens, np.array([at]), np.array([context]))[0, :size])
            at += size
        return np.concatenate(out)
