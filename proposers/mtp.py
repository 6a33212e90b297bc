"""Multi-token prediction: a layer in the target's own checkpoint, trained with it, goes on from its states.

After DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2; which state is fed back, and the embedding of
position 0, as in vLLM.
"""

from __future__ import annotations

from typing import Any

from mindspore import nn

from ms_spec.models.mtp_mimo import MimoMtpLayer
from ms_spec.proposers.base import NORMED, Site
from ms_spec.proposers.chain import ChainProposer, chain

LAYERS = {"MiMoForCausalLM": MimoMtpLayer}
"""The target's architecture -> its layer."""


def build(config: Any, backend: Any, site: Site) -> ChainProposer:
    """The layer on the target's embeddings and output matrix, used again for each further draft."""
    target = site.target
    layer = LAYERS[target.config.architecture](
        site.draft.shape, target, backend, site.num_blocks, site.block_size, site.max_len, site.dtype
    )
    return chain(config, backend, site, MtpHead(backend, layer, site))


class MtpHead(nn.Cell):
    """A head for :class:`ms_spec.proposers.chain.ChainProposer`. What the layer returns is scored and fed back.

    ``layer``: a Cell (embedded [R, H], state [R, H], rows) -> [R, H], normed, with ``weights()``.
    """

    taps: tuple[int, ...] = (NORMED,)

    def __init__(self, backend: Any, layer: nn.Cell, site: Site) -> None:
        super().__init__()
        config = site.target.config
        self.rows = backend.Rows(site.max_len, site.block_size)
        self.embedding = site.target.embedding
        self.layer = layer
        self.output = backend.Linear(config.vocab_size, config.hidden_size, site.dtype, tied=site.target.head)

    def weights(self) -> list[Any]:
        """Those of the layer; the rest is the target's."""
        weights: list[Any] = self.layer.weights()
        return weights

    def context(self, features, rows):
        """What the target's head sees."""
        return features[0]

    def logits(self, state, rows):
        """By the target's output matrix."""
        return self.output(state, rows)

    def recycled(self, state, rows):
        """The same state, which stands for the target's own."""
        return state

    def construct(self, rows, context):
        embedded = self.embedding(rows)
        behind = (rows[1] > 0).astype(embedded.dtype)  # position 0 has no embedding
        return self.layer(embedded * behind.reshape(-1, 1), context, rows)
