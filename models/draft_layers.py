"""The decoder layers of drafters whose first layer is fed something else than what it adds to."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_spec.models.decoder import DecoderLayer
from ms_spec.models.ops.interface import Backend, Geometry
from ms_spec.models.rope import rope_tables
from ms_spec.models.weights import WeightSpec


class FedLayer(nn.Cell):
    """(z [R, inner], residual [R, hidden], rows) -> [R, hidden]: a decoder layer that attends to z, without norming it.

    ``shape``: a :class:`ms_spec.models.drafts.LayerShape`.
    """

    def __init__(
        self, shape: Any, inner: int, backend: Backend, geometry: Geometry, cos: Parameter, sin: Parameter, dtype: str
    ) -> None:
        super().__init__()
        s, heads = shape, geometry.num_heads * geometry.head_dim
        qkv = heads + 2 * geometry.num_kv_heads * geometry.head_dim
        self.qkv = backend.Linear(qkv, inner, dtype, s.qkv_bias)
        self.attention = backend.Attention(geometry, cos, sin)
        self.output = backend.LinearAdd(s.hidden_size, heads, dtype, s.output_bias)
        self.gated = backend.NormGatedLinear(s.intermediate_size, s.hidden_size, s.rms_norm_eps, dtype, s.mlp_bias)
        self.down = backend.LinearAdd(s.hidden_size, s.intermediate_size, dtype, s.mlp_bias)

    def weights(self, at: str) -> list[WeightSpec]:
        """Names as in a Hugging Face decoder layer with the prefix ``at``, without an input norm."""
        attn, mlp = f"{at}.self_attn", f"{at}.mlp"
        return [
            *self.qkv.weights(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"),
            *self.attention.weights(f"{attn}.q_norm", f"{attn}.k_norm"),
            *self.output.weights(f"{attn}.o_proj"),
            *self.gated.weights(f"{at}.post_attention_layernorm", f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            *self.down.weights(f"{mlp}.down_proj"),
        ]

    def construct(self, z: Tensor, residual: Tensor, rows: tuple) -> Tensor:
        x = self.output(self.attention(self.qkv(z, rows), rows), residual, rows)
        return self.down(self.gated(x, rows), x, rows)


class FedLayers(nn.Cell):
    """(z [R, inner], residual [R, hidden], rows) -> [R, hidden]: a :class:`FedLayer`, then plain decoder layers.

    Args:
        shape: a :class:`ms_spec.models.drafts.LayerShape`.
        inner: width of z.
        backend: the device operations.
        num_blocks, block_size: the paged KV cache, of the same numbering as the target's.
        max_len: positions that the rotary tables cover.
        dtype: how weights are stored.
    """

    def __init__(
        self, shape: Any, inner: int, backend: Backend, num_blocks: int, block_size: int, max_len: int, dtype: str
    ) -> None:
        super().__init__()
        s = shape
        cos, sin = rope_tables(s.rope, s.head_dim, max_len)
        self.cos = Parameter(Tensor(np.ascontiguousarray(cos, np.float32)), name="cos", requires_grad=False)
        self.sin = Parameter(Tensor(np.ascontiguousarray(sin, np.float32)), name="sin", requires_grad=False)
        cache = (num_blocks, block_size, max_len)
        geometry = Geometry(s.num_heads, s.num_kv_heads, s.head_dim, *cache, s.rms_norm_eps, s.qk_norm)
        self.first = backend.fuse([FedLayer(s, inner, backend, geometry, self.cos, self.sin, dtype)])[0]
        more = [DecoderLayer(s, backend, geometry, self.cos, self.sin, dtype) for _ in range(1, s.num_layers)]
        self.more = nn.CellList(backend.fuse(more) if more else [])

    def weights(self, first: str) -> list[WeightSpec]:
        """``first``: prefix of the first layer; the others are ``layers.1`` and so on."""
        specs = self.first.weights(first)
        for i, layer in enumerate(self.more):
            specs += layer.weights(f"layers.{i + 1}")
        return specs

    def construct(self, z: Tensor, residual: Tensor, rows: tuple) -> Tensor:
        x = self.first(z, residual, rows)
        for layer in self.more:
            x = layer(x, rows)
        return x
