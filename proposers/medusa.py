"""Medusa: heads beside the target's own, each for another place behind the newest token.

After Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024). The best
token of each head makes a chain, as in vLLM; the paper verifies a tree of several, and not exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_spec.models.medusa_head import MedusaHead
from ms_spec.proposers.base import NORMED, Site
from ms_spec.proposers.draw import Draw, draft_probs


def build(config: Any, backend: Any, site: Site) -> MedusaProposer:
    """The first ``num_speculative_tokens`` heads of the checkpoint."""
    shape, drafts = site.draft.shape, config.num_speculative_tokens
    heads = [MedusaHead(shape, backend, site.dtype)]
    tied = heads[0].output if shape.shared_output else None
    heads += [MedusaHead(shape, backend, site.dtype, tied) for _ in range(drafts - 1)]
    rows, probs = backend.Rows(site.max_len, site.block_size), draft_probs(config, site)
    return MedusaProposer(backend, heads, rows, probs, shape.token_map)


class MedusaProposer(nn.Cell):
    """All heads look at the state that the newest token was chosen from, and at nothing else.

    See :class:`ms_spec.proposers.base.Proposer`. Head h is for draft number h. The drafts of a step do not depend on
    each other, and nothing is cached. A head that nobody wants a draft of costs nothing.
    """

    taps: tuple[int, ...] = (NORMED,)

    def __init__(
        self, backend: Any, heads: Sequence[MedusaHead], rows: nn.Cell, probs: Any = None, token_map: Any = None
    ) -> None:
        super().__init__()
        self.heads, self.num_drafts = nn.CellList(heads), len(heads)
        self.dense, self.probs = probs is not None, probs
        self.rows = rows
        self.take = backend.TakeRows()
        self.draw = Draw(backend, probs, token_map)
        self.place = Tensor(np.arange(len(heads)), ms.int32)

    def grids(self, width: int) -> Sequence[int]:
        """One row a request."""
        return (1,)

    def weights(self) -> list[Any]:
        """Those of the heads that are used."""
        specs: list[Any] = []
        for i, head in enumerate(self.heads):
            specs += head.weights(i)
        return specs

    def construct(
        self, history, slot, length, tokens, following, last, start, rows, features, limit, bounds, sampling, uniforms
    ):
        newest = ops.gather_elements(following, 1, last.reshape(-1, 1))
        one = self.rows(ops.select(limit.reshape(-1, 1) > 0, newest, -1), start + last, rows[5], bounds[-1])
        first = ops.range(0, tokens.shape[0] * tokens.shape[1], tokens.shape[1]).astype(last.dtype)  # cell of column 0
        state = self.take(features[0], rows, (first + last).reshape(-1, 1), one)
        # A head's matrix is read once for all rows, so it has either all rows or none.
        live = ops.split((self.place < ops.amax(limit)).astype(limit.dtype) * one[4], 1)
        chosen: tuple[Any, ...] = ()
        for i in range(self.num_drafts):
            wanted = (*one[:4], live[i], *one[5:])
            logits = self.heads[i](state, wanted)
            token = self.draw(logits, wanted, i, slot, sampling, uniforms[:, i : i + 1])
            chosen += (token,)
        drafts = ops.cat(chosen, 1)
        # They end before the first that is none, or not wanted.
        counts = ops.minimum(ops.amin(ops.select(drafts < 0, self.place, self.num_drafts), 1), limit)
        return ops.select(self.place < counts.reshape(-1, 1), drafts, -1), counts
