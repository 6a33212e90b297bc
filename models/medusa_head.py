"""One Medusa head (Cai et al., arXiv 2401.10774), written in device operations."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_spec.models.drafts import MedusaShape
from ms_spec.models.ops.interface import Backend
from ms_spec.models.weights import WeightSpec


class MedusaHead(nn.Cell):
    """(x [R, hidden], rows) -> logits [R, draft_vocab]: layers x + silu(W x + b), then an output matrix.

    ``tied``: a Linear whose output matrix it shares; None: it has its own.
    """

    def __init__(self, shape: MedusaShape, backend: Backend, dtype: str, tied: Any = None) -> None:
        super().__init__()
        wide = shape.hidden_size
        self.layers = nn.CellList([backend.Linear(wide, wide, dtype, shape.bias) for _ in range(shape.num_layers)])
        self.output = backend.Linear(shape.draft_vocab_size, wide, dtype, tied=tied)

    def weights(self, head: int) -> list[WeightSpec]:
        """Where they stand in a checkpoint, as vLLM's Medusa names them; ``head`` is the head's number."""
        specs: list[WeightSpec] = []
        for i, layer in enumerate(self.layers):
            specs += layer.weights(f"blocks.{head}.layers.{i}")
        return [*specs, *self.output.weights(f"lm_heads.{head}")]

    def construct(self, x: Tensor, rows: tuple) -> Tensor:
        for layer in self.layers:
            wide = layer(x, rows).astype(ms.float32)  # documented for half and single precision, not for bfloat16
            x = x + ops.silu(wide).astype(x.dtype)
        return self.output(x, rows)
