"""Plain operations on rows for backends that leave each row at its cell, and what they make of a clock."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops


class TakeRows(nn.Cell):
    """(x [R, H], rows, cells int32 [n2, w2], to_rows) -> [n2 * w2, H]; dead rows of ``to_rows`` may hold anything.

    ``live``: the entry of ``rows`` that is not 0 where a row has a token.
    """

    def __init__(self, live: int) -> None:
        super().__init__()
        self.live = live

    def construct(self, x: Tensor, rows: tuple, cells: Tensor, to_rows: tuple) -> Tensor:
        size = x.shape[0]
        cells = cells.reshape(-1)
        source = ops.maximum(ops.minimum(cells, size - 1), 0).astype(ms.int32)
        there = ops.logical_and(source == cells, ops.gather(rows[self.live], source, 0) > 0)
        taken = ops.gather(x, source, 0)
        return ops.select(there.reshape(-1, 1), taken, ops.zeros_like(taken))


class Writers(nn.Cell):
    """(kv [R, L * 2 kv_heads * D], rows) -> int32 [1]: each part goes to the cache of its own layer."""

    def __init__(self, writers: list[nn.Cell]) -> None:
        super().__init__()
        self.apart = ops.Split(1, len(writers))
        self.writers = nn.CellList(writers)

    def construct(self, kv: Tensor, rows: tuple) -> Tensor:
        parts = self.apart(kv)
        for i, writer in enumerate(self.writers):
            writer(parts[i], rows)
        return rows[4]


class Stamp(nn.Cell):
    """(x int32) -> (x, int32 [2] zeros): no clock can be read from inside a graph here."""

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, Tensor(np.zeros(2, np.int32))
