"""The network of DFlash (z-lab/dflash): a block of masks is filled in at once.

Every layer of it attends to two kinds of rows: the context, made of the target's states at all committed positions,
and the block itself, whose rows see each other.
"""

from __future__ import annotations

from mindspore import Tensor, nn, ops

from ms_spec.models.decoder import Decoder, DecoderLayer, geometry_of, rotary
from ms_spec.models.drafts import DflashShape
from ms_spec.models.ops.interface import Backend
from ms_spec.models.weights import WeightSpec


class Dflash(nn.Cell):
    """Block rows in, their states [R, hidden] out; ``head`` makes logits [R, draft_vocab] of them.

    ``remember`` has to be called first with the target's states of every position before the block. A block may stand
    where context was: what is written last counts.

    Args:
        shape: the draft's shape.
        target: whose embeddings and output matrix serve where the draft has none.
        backend: the device operations.
        num_blocks, block_size: the paged KV cache, of the same numbering as the target's.
        max_len: positions that the rotary tables cover; no more than the window of a layer that has one.
        dtype: how weights are stored.
    """

    def __init__(
        self,
        shape: DflashShape,
        target: Decoder,
        backend: Backend,
        num_blocks: int,
        block_size: int,
        max_len: int,
        dtype: str,
    ) -> None:
        super().__init__()
        s, eps = shape, shape.rms_norm_eps
        self.cos, self.sin = rotary(s, max_len)
        geometry = geometry_of(s, num_blocks, block_size, max_len)
        self.rows, self.block = backend.Rows(max_len, block_size), backend.Block()
        self.causal = s.causal
        self.own_embeddings = s.own_embeddings
        self.embedding = backend.Embedding(s.vocab_size, s.hidden_size, dtype) if s.own_embeddings else target.embedding
        layers = [DecoderLayer(s, backend, geometry, self.cos, self.sin, dtype) for _ in range(s.num_layers)]
        self.layers = nn.CellList(backend.fuse(layers))
        # Keys and values of a position's context are one linear map for all layers: it sees none of their inputs.
        self.fc = backend.Linear(s.hidden_size, len(s.aux_layers) * s.target_hidden_size, dtype)
        kv = s.num_layers * 2 * s.num_kv_heads * s.head_dim
        self.context = backend.NormLinear(kv, s.hidden_size, eps, dtype, s.qkv_bias)
        self.write = backend.Writer(list(self.layers))
        tied = None if s.own_head else target.head
        self.head = backend.NormLinear(s.draft_vocab_size, s.hidden_size, eps, dtype, tied=tied)

    def weights(self) -> list[WeightSpec]:
        """Under the names of z-lab/dflash; ``embed_tokens`` and ``lm_head`` as in vllm-project/speculators."""
        specs = list(self.embedding.weights("embed_tokens.weight")) if self.own_embeddings else []
        specs += self.fc.weights("fc")
        cached = []
        for i, layer in enumerate(self.layers):
            specs += layer.weights(f"layers.{i}")
            cached += [f"layers.{i}.self_attn.{name}_proj" for name in "kv"]
        return [*specs, *self.context.weights("hidden_norm", *cached), *self.head.weights("norm", "lm_head")]

    def remember(self, features: tuple, rows: tuple) -> None:
        """Caches the context of the target's rows. features: one [R, target_hidden] for each of ``aux_layers``."""
        self.write(self.context(self.fc(ops.cat(features, 1), rows), rows), rows)

    def construct(self, rows: tuple) -> Tensor:
        whole = self.block(rows)
        x = self.embedding(rows)
        for i, layer in enumerate(self.layers):
            x = layer(x, rows if self.causal[i] else whole)
        return x
