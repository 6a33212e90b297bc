"""EAGLE-3: one decoder layer drafts from several of the target's states, low, middle and high.

After Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025),
and the checkpoints of SafeAILab/EAGLE, sgl-project/SpecForge and vllm-project/speculators.
"""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops

from ms_spec.models.draft_layers import FedLayers
from ms_spec.proposers.base import NORMED, Site
from ms_spec.proposers.chain import ChainProposer, chain


def build(config: Any, backend: Any, site: Site) -> ChainProposer:
    """An EAGLE-3 head beside the target."""
    return chain(config, backend, site, Eagle3Head(backend, site), site.draft.shape.token_map)


class Eagle3Head(nn.Cell):
    """A decoder layer attends to [norm(embedding of x_{t+1}), norm(c_t)] and adds to c_t = fc(states of the target).

    The output stands in for c where the target has not been. The switches are those of
    :class:`ms_spec.models.drafts.Eagle3Shape`; see also :class:`ms_spec.proposers.chain.ChainProposer`.
    """

    def __init__(self, backend: Any, site: Site) -> None:
        super().__init__()
        s, width, dtype, eps = site.draft.shape, site.draft.shape.hidden_size, site.dtype, site.draft.shape.rms_norm_eps
        self.taps: tuple[int, ...] = tuple(s.aux_layers) or (NORMED,)
        self.fed = len(s.aux_layers)
        self.norm_before_fc, self.fc_norm, self.norm_output = s.norm_before_fc, s.fc_norm, s.norm_output
        self.norm_before_residual, self.scale = s.norm_before_residual, float(s.logit_scale)
        states = self.fed * s.target_hidden_size
        self.rows = backend.Rows(site.max_len, site.block_size)
        self.own = s.own_embeddings
        self.embedding = backend.Embedding(s.vocab_size, width, dtype) if self.own else site.target.embedding
        each = [backend.Norm(s.target_hidden_size, eps) for _ in range(self.fed if s.fc_norm else 0)]
        self.each_norm = nn.CellList(each)
        self.all_norm: Any = backend.Norm(states, eps) if s.norm_before_fc else None
        self.fc: Any = backend.Linear(width, states, dtype) if self.fed else None
        self.token_norm, self.hidden_norm = backend.Norm(width, eps), backend.Norm(width, eps)
        self.layers = FedLayers(s, 2 * width, backend, site.num_blocks, site.block_size, site.max_len, dtype)
        self.norm: Any = backend.Norm(width, eps) if s.norm_output else None
        tied, rows = None if s.own_head else site.target.head, s.draft_vocab_size
        if s.norm_output:
            self.head = backend.Linear(rows, width, dtype, tied=tied)
        else:
            self.head = backend.NormLinear(rows, width, eps, dtype, tied=tied)

    def weights(self) -> list[Any]:
        """Under the names of SafeAILab/EAGLE."""
        specs = list(self.embedding.weights("embed_tokens.weight")) if self.own else []
        for i, norm in enumerate(self.each_norm):
            specs += norm.weights(f"fc_norm.{i}")
        if self.all_norm is not None:
            specs += self.all_norm.weights("input_norm")
        if self.fc is not None:
            specs += self.fc.weights("fc")
        specs += self.token_norm.weights("midlayer.input_layernorm")
        specs += self.hidden_norm.weights("midlayer.hidden_norm")
        specs += self.layers.weights("midlayer")
        if self.norm is None:
            return [*specs, *self.head.weights("norm", "lm_head")]
        return [*specs, *self.norm.weights("norm"), *self.head.weights("lm_head")]

    def context(self, features, rows):
        """c of the target's states; its normed last one where there is no ``fc``."""
        if self.fed == 0:
            return features[0]
        states: tuple[Any, ...] = ()
        for i in range(self.fed):
            states += (self.each_norm[i](features[i], rows) if self.fc_norm else features[i],)
        x = ops.cat(states, 1)
        return self.fc(self.all_norm(x, rows) if self.norm_before_fc else x, rows)

    def construct(self, rows, context):
        normed = self.hidden_norm(context, rows)
        z = ops.cat((self.token_norm(self.embedding(rows), rows), normed), 1)
        x = self.layers(z, normed if self.norm_before_residual else context, rows)
        return self.norm(x, rows) if self.norm_output else x

    def logits(self, state, rows):
        """Of the draft ids."""
        logits = self.head(state, rows)
        return logits if self.scale == 1 else logits * self.scale

    def recycled(self, state, rows):
        """The output stands in for c."""
        return state
