"""The multi-token prediction layer of XiaomiMiMo/MiMo (arXiv 2505.07608), written in device operations."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn, ops

from ms_spec.models.decoder import Decoder, DecoderLayer, geometry_of
from ms_spec.models.ops.interface import Backend
from ms_spec.models.weights import WeightSpec

_AT = "model.mtp_layers.0"


class MimoMtpLayer(nn.Cell):
    """(embedded [R, H], state [R, H], rows) -> [R, H]: both normed, brought to one width, a decoder layer, a norm.

    Args:
        shape: :class:`ms_spec.models.drafts.MtpShape`.
        target: whose rotary tables it shares.
        backend: the device operations.
        num_blocks, block_size, max_len: the paged KV cache, as the target's.
        dtype: how weights are stored.
    """

    def __init__(
        self,
        shape: Any,
        target: Decoder,
        backend: Backend,
        num_blocks: int,
        block_size: int,
        max_len: int,
        dtype: str,
    ) -> None:
        super().__init__()
        wide, eps = shape.hidden_size, shape.rms_norm_eps
        geometry = geometry_of(shape, num_blocks, block_size, max_len)
        self.token_norm, self.state_norm = backend.Norm(wide, eps), backend.Norm(wide, eps)
        self.project = backend.Linear(wide, 2 * wide, dtype)
        self.layer = backend.fuse([DecoderLayer(shape, backend, geometry, target.cos, target.sin, dtype)])[0]
        self.final_norm = backend.Norm(wide, eps)

    def weights(self) -> list[WeightSpec]:
        """Where they stand in the target's checkpoint."""
        return [
            *self.token_norm.weights(f"{_AT}.token_layernorm"),
            *self.state_norm.weights(f"{_AT}.hidden_layernorm"),
            *self.project.weights(f"{_AT}.input_proj"),
            *self.layer.weights(_AT),
            *self.final_norm.weights(f"{_AT}.final_layernorm"),
        ]

    def construct(self, embedded: Tensor, state: Tensor, rows: tuple) -> Tensor:
        both = ops.cat((self.state_norm(state, rows), self.token_norm(embedded, rows)), 1)
        return self.final_norm(self.layer(self.project(both, rows), rows), rows)
