"""Which rows live, what they see, and moving them from one grid to another. See :mod:`ms_spec.models.ops.interface`.

The CPU's own entry of the bundle is 6, horizon int32 [R]: the last position that a row sees.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_spec.models.ops.cpu.build import kernel

HORIZON = 6


class Rows(nn.Cell):
    """Live rows first. See :class:`ms_spec.models.ops.interface.Backend`."""

    def __init__(self, max_len: int, block_size: int) -> None:
        super().__init__()
        del block_size
        self.max_len = Tensor(np.array([max_len], np.int32))
        self.op = kernel(
            "rows",
            lambda tokens, start, end: ([tokens[0] * tokens[1]],) * 4 + ([1],),
            lambda *_: (ms.int32,) * 5,
        )

    def construct(
        self, tokens: Tensor, start: Tensor, block_tables: Tensor, bounds: Tensor, end: Tensor | None = None
    ) -> tuple:
        token, position, request, cell, count = self.op(tokens, start, self.max_len if end is None else end)
        return token, position, request, cell, count, block_tables, position


class Pick(nn.Cell):
    """The last live row, as rows of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.op = kernel(
            "pick",
            lambda x, *_: ([1, x[1]],) + ([1],) * 5,
            lambda *_: (ms.float32,) + (ms.int32,) * 5,
        )

    def construct(self, x: Tensor, rows: tuple) -> tuple:
        picked, token, position, request, cell, count = self.op(x, rows[0], rows[1], rows[2], rows[3], rows[4])
        return picked, (token, position, request, cell, count, rows[5], position)


class Block(nn.Cell):
    """Rows that see all rows of their request."""

    def __init__(self) -> None:
        super().__init__()
        self.op = kernel("block_horizon", lambda position, *_: position, lambda *_: ms.int32)

    def construct(self, rows: tuple) -> tuple:
        return (*rows[:HORIZON], self.op(rows[1], rows[2], rows[4]))


class TakeRows(nn.Cell):
    """Rows of one grid, in the order of another."""

    def __init__(self) -> None:
        super().__init__()
        self.op = kernel(
            "take_rows",
            lambda x, cell, count, cells, to_cell, to_count: [to_cell[0], x[1]],
            lambda *_: ms.float32,
        )

    def construct(self, x: Tensor, rows: tuple, cells: Tensor, to_rows: tuple) -> Tensor:
        return self.op(x, rows[3], rows[4], cells, to_rows[3], to_rows[4])
