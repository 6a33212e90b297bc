"""Calls Cells that take the ``rows`` tuple: a tuple of Tensors given to a graph from outside would be a constant."""

from __future__ import annotations

from mindspore import Tensor, nn


class Flat(nn.Cell):
    """cell(first, rows, *rest) as one call of plain tensors. None among ``rest`` stays None."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell = cell

    def construct(self, first, token, position, request, place, count, tables, *rest):
        return self.cell(first, (token, position, request, place, count, tables), *rest)


def call(flat: Flat, first, rows, *rest):
    """NumPy in, NumPy out."""
    out = flat(Tensor(first), *map(Tensor, rows), *(x if x is None else Tensor(x) for x in rest))
    return [x.asnumpy() for x in out] if isinstance(out, (tuple, list)) else out.asnumpy()
