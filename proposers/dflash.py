"""DFlash: a small network fills in a whole block of masks behind the newest token in one pass.

After z-lab/dflash ("DFlash: Block Diffusion for Flash Speculative Decoding", 2026).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops

from ms_spec.models.dflash import Dflash
from ms_spec.models.ops.constants import numbers
from ms_spec.proposers.base import Site
from ms_spec.proposers.draw import Draw, draft_probs


def build(config: Any, backend: Any, site: Site) -> DflashProposer:
    """The network beside the target. ValueError (one line) if one of its layers would not see a whole text."""
    shape, drafts = site.draft.shape, config.num_speculative_tokens
    if shape.sliding_window is not None and shape.sliding_window < site.max_len:
        raise ValueError(
            f"speculative_config.model: sliding_window = {shape.sliding_window} of the draft is below max_model_len = "
            f"{site.max_len}, and sliding windows are not supported; use max_model_len <= {shape.sliding_window}"
        )
    network = Dflash(shape, site.target, backend, site.num_blocks, site.block_size, site.max_len, site.dtype)
    draw = Draw(backend, draft_probs(config, site), shape.token_map)
    return DflashProposer(backend, network, drafts, shape.mask_token_id, shape.aux_layers, draw)


class DflashProposer(nn.Cell):
    """A block of the newest token and K masks; the row of mask b predicts the token at its own place, draft b.

    See :class:`ms_spec.proposers.base.Proposer`. The network's cache holds the context of every position before the
    newest token: each step adds that of all its rows. What it adds for rejected tokens stands where the block's
    own keys go next, or where the next step's context does, before anything looks there.

    A draft depends on how many masks there are, so the block has all of them, however few drafts are wanted; where the
    longest text ends, it ends.
    """

    def __init__(
        self, backend: Any, network: Dflash, num_drafts: int, mask_token_id: int, taps: tuple[int, ...], draw: Draw
    ) -> None:
        super().__init__()
        self.network, self.num_drafts, self.taps = network, num_drafts, tuple(taps)
        self.dense, self.probs = draw.probs is not None, draw.probs
        self.masks = Tensor(np.full((1, num_drafts), mask_token_id, np.int32))
        self.places = Tensor(np.arange(num_drafts, dtype=np.int32).reshape(1, -1))
        self.take = backend.TakeRows()
        self.draw = draw

    def grids(self, width: int) -> Sequence[int]:
        """The block, and the rows of it that drafts come from."""
        return (self.num_drafts + 1, self.num_drafts)

    def weights(self) -> list[Any]:
        """Those of the network."""
        return self.network.weights()

    def construct(
        self, history, slot, length, tokens, following, last, start, rows, features, limit, bounds, sampling, uniforms
    ):
        self.network.remember(features, rows)
        requests, width = tokens.shape[0], self.num_drafts + 1
        newest = ops.gather_elements(following, 1, last.reshape(-1, 1))
        limit = limit.reshape(-1, 1)
        alive = ops.logical_and(limit > 0, newest >= 0)
        filled = ops.cat((newest, ops.broadcast_to(self.masks, (requests, self.num_drafts))), 1)
        filled = ops.select(alive, filled, ops.full_like(filled, -1))
        position = start + last + 1
        block = self.network.rows(filled, position, rows[5], bounds[0])
        state = self.network(block)
        # The output matrix is large: it sees no row that no draft is wanted from.
        wanted = ops.select(self.places < limit, filled[:, 1:], ops.full_like(filled[:, 1:], -1))
        asked = self.network.rows(wanted, position + 1, rows[5], bounds[-1])
        cells = numbers(requests * width).reshape(-1, width)[:, 1:]
        state = self.take(state, block, cells, asked)
        drafts = self.draw(self.network.head(state, asked), asked, 0, slot, sampling, uniforms)
        # Drafts end at the first that is none.
        kept = ops.cumsum((drafts < 0).astype(start.dtype), 1) == 0
        return ops.select(kept, drafts, ops.full_like(drafts, -1)), kept.astype(start.dtype).sum(1).astype(start.dtype)
