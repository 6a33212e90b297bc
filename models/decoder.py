"""The decoder-only transformer of Llama, Qwen2 and Qwen3, written in device operations."""

from __future__ import annotations

import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_spec.models.config import ModelConfig
from ms_spec.models.ops.interface import Backend, Geometry
from ms_spec.models.rope import rope_tables
from ms_spec.models.weights import WeightSpec


class DecoderLayer(nn.Cell):
    """Attention and a gated feed-forward network, each added to the residual stream."""

    def __init__(
        self, config: ModelConfig, backend: Backend, geometry: Geometry, cos: Parameter, sin: Parameter, dtype: str
    ):
        super().__init__()
        c, inner = config, geometry.num_heads * geometry.head_dim
        qkv = inner + 2 * geometry.num_kv_heads * geometry.head_dim
        self.qkv = backend.NormLinear(qkv, c.hidden_size, c.rms_norm_eps, dtype, c.qkv_bias)
        self.attention = backend.Attention(geometry, cos, sin)
        self.output = backend.LinearAdd(c.hidden_size, inner, dtype, c.output_bias)
        self.gated = backend.NormGatedLinear(c.intermediate_size, c.hidden_size, c.rms_norm_eps, dtype, c.mlp_bias)
        self.down = backend.LinearAdd(c.hidden_size, c.intermediate_size, dtype, c.mlp_bias)

    def weights(self, at: str) -> list[WeightSpec]:
        """Where the layer's weights stand in a Hugging Face checkpoint; ``at`` is the layer's prefix."""
        attn, mlp = f"{at}.self_attn", f"{at}.mlp"
        return [
            *self.qkv.weights(f"{at}.input_layernorm", f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"),
            *self.attention.weights(f"{attn}.q_norm", f"{attn}.k_norm"),
            *self.output.weights(f"{attn}.o_proj"),
            *self.gated.weights(f"{at}.post_attention_layernorm", f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            *self.down.weights(f"{mlp}.down_proj"),
        ]

    def construct(self, x: Tensor, rows: tuple) -> Tensor:
        x = self.output(self.attention(self.qkv(x, rows), rows), x, rows)
        return self.down(self.gated(x, rows), x, rows)


class Decoder(nn.Cell):
    """Token rows in, residual stream out; ``head`` makes logits of it, ``normed`` what the head's matrix sees.

    The output is a tuple of num_layers + 1 states [R, hidden]: the embeddings, then what each layer leaves. What nobody
    looks at costs nothing.

    Args:
        config: the model's shape.
        backend: the device operations.
        num_blocks, block_size: the paged KV cache; block 0 takes the writes of dead rows.
        max_len: positions that the rotary tables cover.
        dtype: how weights are stored: float32, bfloat16 or float16.
    """

    def __init__(
        self, config: ModelConfig, backend: Backend, num_blocks: int, block_size: int, max_len: int, dtype: str
    ):
        super().__init__()
        self.config = config
        cos, sin = rope_tables(config.rope, config.head_dim, max_len)
        self.cos = Parameter(Tensor(np.ascontiguousarray(cos, np.float32)), name="cos", requires_grad=False)
        self.sin = Parameter(Tensor(np.ascontiguousarray(sin, np.float32)), name="sin", requires_grad=False)
        geometry = Geometry(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            num_blocks,
            block_size,
            max_len,
            config.rms_norm_eps,
            config.qk_norm,
        )
        self.rows = backend.Rows(max_len, block_size)
        self.embedding = backend.Embedding(config.vocab_size, config.hidden_size, dtype)
        layers = [DecoderLayer(config, backend, geometry, self.cos, self.sin, dtype) for _ in range(config.num_layers)]
        self.layers = nn.CellList(backend.fuse(layers))
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = backend.NormLinear(config.vocab_size, config.hidden_size, config.rms_norm_eps, dtype, tied=tied)
        self.normed = backend.Norm(config.hidden_size, config.rms_norm_eps, tied=self.head)

    def weights(self) -> list[WeightSpec]:
        """Every parameter's place in a Hugging Face checkpoint."""
        specs = list(self.embedding.weights("model.embed_tokens.weight"))
        for i, layer in enumerate(self.layers):
            specs += layer.weights(f"model.layers.{i}")
        return [*specs, *self.head.weights("model.norm", "lm_head")]

    def construct(self, rows: tuple) -> tuple[Tensor, ...]:
        states: tuple[Tensor, ...] = (self.embedding(rows),)
        for layer in self.layers:
            states += (layer(states[-1], rows),)
        return states
