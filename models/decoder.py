"""The decoder-only transformer of Llama, Qwen2 and Qwen3, written in device operations."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_spec.models.config import LayerShape, ModelConfig
from ms_spec.models.ops.interface import Backend, Geometry
from ms_spec.models.rope import rope_tables
from ms_spec.models.weights import WeightSpec


def rotary(shape: LayerShape, max_len: int) -> tuple[Parameter, Parameter]:
    """Cosines and sines, float32 [max_len, head_dim / 2]; all layers share them."""
    cos, sin = rope_tables(shape.rope, shape.head_dim, max_len)
    return (
        Parameter(Tensor(np.ascontiguousarray(cos, np.float32)), name="cos", requires_grad=False),
        Parameter(Tensor(np.ascontiguousarray(sin, np.float32)), name="sin", requires_grad=False),
    )


def geometry_of(shape: LayerShape, num_blocks: int, block_size: int, max_len: int) -> Geometry:
    """That of each layer's attention, and of its cache."""
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    return Geometry(*heads, num_blocks, block_size, max_len, shape.rms_norm_eps, shape.qk_norm)


class Layer(nn.Cell):
    """Attention to what ``qkv`` [R, (heads + 2 kv_heads) * head_dim] makes of something, and a gated feed-forward
    network, each added to the residual stream."""

    norms: tuple[str, ...] = ()
    """Names of the norms that ``qkv`` begins with."""

    def __init__(
        self,
        shape: LayerShape,
        qkv: nn.Cell,
        backend: Backend,
        geometry: Geometry,
        cos: Parameter,
        sin: Parameter,
        dtype: str,
    ) -> None:
        super().__init__()
        s, inner = shape, geometry.num_heads * geometry.head_dim
        self.qkv = qkv
        self.attention = backend.Attention(geometry, cos, sin)
        self.output = backend.LinearAdd(s.hidden_size, inner, dtype, s.output_bias)
        self.gated = backend.NormGatedLinear(s.intermediate_size, s.hidden_size, s.rms_norm_eps, dtype, s.mlp_bias)
        self.down = backend.LinearAdd(s.hidden_size, s.intermediate_size, dtype, s.mlp_bias)

    def weights(self, at: str) -> list[WeightSpec]:
        """Where the layer's weights stand in a Hugging Face checkpoint; ``at`` is the layer's prefix."""
        norms = (f"{at}.{norm}" for norm in self.norms)
        attn, mlp = f"{at}.self_attn", f"{at}.mlp"
        return [
            *self.qkv.weights(*norms, f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"),
            *self.attention.weights(f"{attn}.q_norm", f"{attn}.k_norm"),
            *self.output.weights(f"{attn}.o_proj"),
            *self.gated.weights(f"{at}.post_attention_layernorm", f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            *self.down.weights(f"{mlp}.down_proj"),
        ]

    def added(self, z: Tensor, residual: Tensor, rows: tuple) -> Tensor:
        """The residual stream behind the layer, which attends to z."""
        x = self.output(self.attention(self.qkv(z, rows), rows), residual, rows)
        return self.down(self.gated(x, rows), x, rows)


class DecoderLayer(Layer):
    """(x [R, hidden], rows) -> [R, hidden]: attends to the norm of what it adds to."""

    norms = ("input_layernorm",)

    def __init__(
        self, shape: LayerShape, backend: Backend, geometry: Geometry, cos: Parameter, sin: Parameter, dtype: str
    ) -> None:
        qkv = backend.NormLinear(geometry.qkv, shape.hidden_size, shape.rms_norm_eps, dtype, shape.qkv_bias)
        super().__init__(shape, qkv, backend, geometry, cos, sin, dtype)

    def construct(self, x: Tensor, rows: tuple) -> Tensor:
        return self.added(x, x, rows)


class Decoder(nn.Cell):
    """Token rows in, residual stream out; ``head`` makes logits of it, ``normed`` what the head's matrix sees.

    The output is a tuple of states [R, hidden] at the places that are ``kept``: 0 are the embeddings, k is what layer k
    leaves. All are kept, until :meth:`keep` says what somebody looks at.

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
        self.cos, self.sin = rotary(config, max_len)
        geometry = geometry_of(config, num_blocks, block_size, max_len)
        self.rows = backend.Rows(max_len, block_size)
        self.embedding = backend.Embedding(config.vocab_size, config.hidden_size, dtype)
        layers = [DecoderLayer(config, backend, geometry, self.cos, self.sin, dtype) for _ in range(config.num_layers)]
        self.layers = nn.CellList(backend.fuse(layers))
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = backend.Head(config.vocab_size, config.hidden_size, config.rms_norm_eps, dtype, tied=tied)
        self.normed = backend.Norm(config.hidden_size, config.rms_norm_eps, tied=self.head)
        self._join = backend.join
        self.keep(range(config.num_layers))

    def keep(self, places: Iterable[int]) -> None:
        """Which states are wanted, for all graphs that are compiled from now on; the last one always is.

        What layers nobody looks behind do is fewer operations.
        """
        self.kept = tuple(sorted({*places, self.config.num_layers}))
        ends = [place for place in self.kept if place]
        layers = list(self.layers)
        self.spans = nn.CellList([self._join(layers[begin:end]) for begin, end in zip([0, *ends], ends)])

    def weights(self) -> list[WeightSpec]:
        """Every parameter's place in a Hugging Face checkpoint."""
        specs = list(self.embedding.weights("model.embed_tokens.weight"))
        for i, layer in enumerate(self.layers):
            specs += layer.weights(f"model.layers.{i}")
        return [*specs, *self.head.weights("model.norm", "lm_head")]

    def construct(self, rows: tuple) -> tuple[Tensor, ...]:
        x = self.embedding(rows)
        states: tuple[Tensor, ...] = (x,) if self.kept[0] == 0 else ()
        for span in self.spans:
            x = span(x, rows)
            states += (x,)
        return states
