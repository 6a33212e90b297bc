"""A small language model of the same vocabulary drafts for the large one.

After Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import nn, ops

from ms_spec.models.decoder import Decoder
from ms_spec.models.ops.constants import numbers
from ms_spec.proposers.base import Site
from ms_spec.proposers.draw import Draw, counted, draft_probs


def build(config: Any, backend: Any, site: Site) -> DraftModelProposer:
    """The draft checkpoint as a decoder with caches of its own."""
    shape, drafts = site.draft.shape, config.num_speculative_tokens
    model = Decoder(shape, backend, site.num_blocks, site.block_size, site.max_len, site.dtype)
    model.keep(())
    probs = draft_probs(config, site)
    known = min(shape.vocab_size, site.target.config.vocab_size)
    token_map = None if shape.vocab_size == site.target.config.vocab_size else np.arange(known)
    return DraftModelProposer(backend, model, drafts, site.max_len, probs, token_map)


class DraftModelProposer(nn.Cell):
    """Feeds the model what was committed, then its own drafts, one by one.

    See :class:`ms_spec.proposers.base.Proposer`. The model's cache holds all committed tokens, the newest included:
    each step feeds it what the step committed. The last accepted draft was never fed when it was drafted, and the
    others are fed again, now that they count.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self,
        backend: Any,
        model: Decoder,
        num_drafts: int,
        max_len: int,
        probs: Any = None,
        token_map: np.ndarray | None = None,
    ) -> None:
        super().__init__()
        self.model, self.num_drafts, self.max_len = model, num_drafts, max_len
        self.dense, self.probs = probs is not None, probs
        self.known = None if token_map is None else len(token_map)
        self.take = backend.TakeRows()
        self.draw = Draw(backend, probs, token_map)

    def grids(self, width: int) -> Sequence[int]:
        """The committed tokens with the one before them, and a single draft."""
        return (width + 1, 1)

    def weights(self) -> list[Any]:
        """Those of a Hugging Face language model."""
        return self.model.weights()

    def known_ids(self, tokens):
        """Padding of the larger vocabulary is no token of the text; should one come all the same, another stands in."""
        return tokens if self.known is None else ops.minimum(tokens, self.known - 1)

    def logits(self, state, rows):
        """Of the ids that both models have."""
        logits = self.model.head(state, rows)
        return logits if self.known is None else logits[:, : self.known]

    def construct(
        self, history, slot, length, tokens, following, last, start, rows, features, limit, bounds, sampling, uniforms
    ):
        # The token at `start` was the newest of the step before, and fed then; only a prompt's first token was not.
        first = ops.select(start == 0, tokens[:, 0], -1).reshape(-1, 1)
        fed = self.model.rows(self.known_ids(ops.cat((first, following), 1)), start, rows[5], bounds[0])
        state = self.model(fed)[-1]
        newest = ops.gather_elements(following, 1, last.reshape(-1, 1))
        width, request = following.shape[1] + 1, numbers(start.shape[0])
        at, position = request * width + last + 1, start + last + 1
        # One row a request, the newest token's, and one for each further draft that is wanted.
        end = ops.minimum(position + limit, self.max_len)
        one = self.model.rows(newest, position, rows[5], bounds[-1], end)
        state = self.take(state, fed, at.reshape(-1, 1), one)
        drafts: tuple[Any, ...] = ()
        for place in range(self.num_drafts):
            token = self.draw(self.logits(state, one), one, place, slot, sampling, uniforms[:, place : place + 1])
            drafts += (token,)
            if place + 1 < self.num_drafts:
                position = position + 1
                one = self.model.rows(token, position, rows[5], bounds[-1], end)
                state = self.model(one)[-1]
        ids = ops.cat(drafts, 1)
        return ids, counted(ids)
