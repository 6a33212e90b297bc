"""EAGLE: one decoder layer continues the target's last states, and the target's own output matrix reads its drafts.

After Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (2024), and the checkpoints of
SafeAILab/EAGLE. EAGLE-2 has the same heads; drafts are a chain here, not a tree.
"""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops

from ms_spec.models.draft_layers import FedLayers
from ms_spec.proposers.base import NORMED, Site
from ms_spec.proposers.chain import ChainProposer, chain


def build(config: Any, backend: Any, site: Site) -> ChainProposer:
    """An EAGLE head beside the target."""
    return chain(config, backend, site, EagleHead(backend, site))


class EagleHead(nn.Cell):
    """u_t = fc([embedding of x_{t+1}, h_t]), then decoder layers of which the first norms nothing before its attention.

    h_t is what the target's final norm gives. The output is fed back and scored as it is. See
    :class:`ms_spec.proposers.chain.ChainProposer`.
    """

    taps: tuple[int, ...] = (NORMED,)

    def __init__(self, backend: Any, site: Site) -> None:
        super().__init__()
        s, width, dtype = site.draft.shape, site.draft.shape.hidden_size, site.dtype
        self.rows = backend.Rows(site.max_len, site.block_size)
        self.own = s.own_embeddings
        self.embedding = backend.Embedding(s.vocab_size, width, dtype) if self.own else site.target.embedding
        self.fc = backend.Linear(width, 2 * width, dtype, s.fc_bias)
        self.layers = FedLayers(s, width, backend, site.num_blocks, site.block_size, site.max_len, dtype)
        self.head = backend.Linear(s.vocab_size, width, dtype, tied=site.target.head)

    def weights(self) -> list[Any]:
        """Under the names of SafeAILab/EAGLE."""
        own = self.embedding.weights("embed_tokens.weight") if self.own else []
        return [*own, *self.fc.weights("fc"), *self.layers.weights("layers.0")]

    def context(self, features, rows):
        """The target's normed states, as they are."""
        return features[0]

    def construct(self, rows, context):
        u = self.fc(ops.cat((self.embedding(rows), context), 1), rows)
        return self.layers(u, u, rows)

    def logits(self, state, rows):
        """Without a norm."""
        return self.head(state, rows)

    def recycled(self, state, rows):
        """The output stands in for the target's state."""
        return state
