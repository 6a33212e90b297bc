"""Plain operations on rows and the grid that they were taken from, and what plain backends make of a clock."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_spec.models.ops.constants import numbers


def live_rows(rows: tuple) -> Tensor:
    """bool [R]: which rows are not dead."""
    return numbers(rows[0].shape[0]) < rows[4]


def rows_of_cells(rows: tuple, size: int) -> Tensor:
    """int32 [size]: the row that stands in each cell of the grid; R where there is none."""
    count = rows[0].shape[0]
    cell = ops.select(live_rows(rows), rows[3], ops.full_like(rows[3], size))  # one spare cell takes the dead rows
    index = numbers(count)
    return ops.tensor_scatter_elements(ops.full((size + 1,), count, dtype=ms.int32), cell, index, 0)[:size]


def grid_of(rows: tuple) -> tuple[int, int]:
    """(n, w), the shape of the grid that the rows were taken from."""
    requests = rows[5].shape[0]
    return requests, rows[0].shape[0] // requests


def at_cells(x: Tensor, rows: tuple, size: int, absent: float) -> Tensor:
    """x [R, ...] -> [size, ...] in the order of the grid, ``absent`` in dead cells."""
    spare = ops.full((1, *x.shape[1:]), absent, dtype=x.dtype)
    return ops.gather(ops.cat((x, spare)), rows_of_cells(rows, size), 0)


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


class InTurn(nn.Cell):
    """(x [R, hidden], rows) -> [R, hidden]: decoder layers one after another."""

    def __init__(self, layers: list[nn.Cell]) -> None:
        super().__init__()
        self.layers = nn.CellList(layers)

    def construct(self, x: Tensor, rows: tuple) -> Tensor:
        for layer in self.layers:
            x = layer(x, rows)
        return x


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


class AddParts(nn.Cell):
    """(parts [N * R, M], residual [R, M], rows) -> [R, M]: N workers' rows added in float32 and in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.apart = ops.Unstack(0)

    def construct(self, parts: Tensor, residual: Tensor, rows: tuple) -> Tensor:
        own = self.apart(parts.reshape(-1, *residual.shape))
        total = own[0].astype(ms.float32)
        for part in own[1:]:
            total = total + part.astype(ms.float32)
        return total.astype(residual.dtype) + residual


class JoinParts(nn.Cell):
    """(parts [N * R, M], rows) -> [R, width]: N workers' columns beside each other."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.size, self.width = size, width

    def construct(self, parts: Tensor, rows: tuple) -> Tensor:
        apart = parts.reshape(self.size, -1, parts.shape[1]).transpose(1, 0, 2)
        return apart.reshape(apart.shape[0], -1)[:, : self.width]


class ReadCarry(nn.Cell):
    """Where requests stand after a step that the host has not looked at: tokens, start, uniforms."""

    def construct(
        self,
        history: Tensor,
        carry: Tensor,
        slot: Tensor,
        tokens: Tensor,
        start: Tensor,
        carried: Tensor,
        uniforms: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        n, w = tokens.shape
        size, drawn = history.shape[1], uniforms.shape[1]
        known = ops.gather(carry, slot, 0)
        there = carried.reshape(n, 1) > 0
        at = ops.maximum(ops.minimum(known[:, :1] - 1, size - 1), 0).astype(ms.int32)
        place = (slot.reshape(n, 1) * size + at).reshape(n)
        newest = ops.gather(history.reshape(-1), place, 0).reshape(n, 1)
        left = ops.cat((newest, known[:, 1:w]), 1) if w > 1 else newest
        column = numbers(w).reshape(1, w)
        live = ops.logical_and(ops.logical_and(tokens >= 0, left >= 0), at + column < size - 1)
        live = ops.cumprod(live.astype(ms.int32), 1) > 0
        left = ops.select(live, left, ops.full_like(left, -1))
        begin = start.reshape(n, 1)
        shift = ops.select(there, at - begin, ops.zeros_like(at))
        shift = ops.maximum(ops.minimum(shift, drawn - w), 0)
        chosen = ops.gather_elements(uniforms, 1, (column + shift).astype(ms.int32))
        chosen = ops.cat((chosen, uniforms[:, w:]), 1) if drawn > w else chosen
        there_at_all = ops.broadcast_to(there, (n, w))
        return ops.select(there_at_all, left, tokens), ops.select(there, at, begin).reshape(n), chosen


class Stamp(nn.Cell):
    """(x int32) -> (x, int32 [2] zeros): no clock can be read from inside a graph here."""

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, Tensor(np.zeros(2, np.int32))
