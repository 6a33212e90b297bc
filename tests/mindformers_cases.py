"""Grids and prompts that test_mindformers.py and its probe both know."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

K, BLOCK, MAX_LEN, NUM_BLOCKS, VOCAB, STEPS = 3, 16, 96, 16, 160, 8
DTYPE = "bfloat16"
CLOSE = {"bfloat16": 2e-2, "float16": 3e-3}
"""How far logits may be from those of activations in float32, by the dtype that they are computed in."""
TABLES = {1: [5, 1, 7, 2, 3, 6], 2: [4, 9, 8, 12, 11, 10]}
"""KV blocks of two requests, in no order."""


def _ids(seed: int, size: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, size).tolist()


PROMPTS = {1: _ids(1, 38), 2: _ids(2, 6) * 3}
"""One in two chunks; one that repeats itself, so that drafts are found."""


@dataclass
class Grid:
    """tokens [n, w] (-1: none), start [n], the slot of each request (0: nobody's)."""

    tokens: np.ndarray
    start: np.ndarray
    slots: list[int]

    def tables(self) -> np.ndarray:
        """Block tables with room for the padding behind a context; nobody's has what some request had."""
        width = -(-(MAX_LEN + self.tokens.shape[1]) // BLOCK)
        tables = np.zeros((len(self.slots), width), np.int32)
        for row, slot in zip(tables, self.slots):
            row[: len(TABLES[slot or 1])] = TABLES[slot or 1]
        return tables


def _grid(width: int, *requests: tuple[int, int, list[int]]) -> Grid:
    """``requests``: slot, first position, tokens."""
    tokens = np.full((len(requests), width), -1)
    for row, (_, _, ids) in zip(tokens, requests):
        row[: len(ids)] = ids
    return Grid(tokens, np.array([start for _, start, _ in requests]), [slot for slot, _, _ in requests])


GRIDS = [
    _grid(32, (1, 0, _ids(3, 32))),
    _grid(32, (1, 32, _ids(4, 6))),
    _grid(16, (2, 0, _ids(5, 5))),
    _grid(K + 1, (1, 38, _ids(6, 4)), (2, 5, _ids(7, 2)), (0, 0, [])),
    _grid(1, (2, 7, _ids(8, 1)), (1, 40, _ids(9, 1))),
    _grid(K + 1, (2, 8, _ids(10, 4)), (1, 41, _ids(11, 3))),
]
"""A prompt in two chunks, a short one, drafts of some lengths beside a request that is not there, no drafts, drafts
written over those that were rejected."""
