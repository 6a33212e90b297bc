"""A head that continues the target's own states drafts a chain: what EAGLE, EAGLE-3 and MTP share.

At position t the head sees the token that comes next, x_{t+1}, and the target's feature h_t, and predicts x_{t+2}.
Where the target has not been yet, the head's own output stands in for its feature.

After Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import nn, ops

from ms_spec.models.ops.constants import numbers
from ms_spec.proposers.base import Site
from ms_spec.proposers.draw import Draw, counted, draft_probs


def chain(config: Any, backend: Any, site: Site, head: nn.Cell, token_map: Any = None) -> ChainProposer:
    """What ``config`` (``speculative_config``) makes of a head."""
    drafts, probs = config.num_speculative_tokens, draft_probs(config, site)
    return ChainProposer(backend, head, drafts, site.max_len, probs, token_map, config.disable_padded_drafter_batch)


class ChainProposer(nn.Cell):
    """See :class:`ms_spec.proposers.base.Proposer`.

    Args:
        head: a Cell with
            ``rows``: the backend's Rows;
            ``taps``: the target's states that it wants;
            ``context(features, rows) -> [R, H]``: what it makes of them;
            ``(rows, context [R, H]) -> [R, H]``: its layers, on the rows' tokens and positions;
            ``logits(state [R, H], rows) -> [R, Vd]`` and ``recycled(state, rows) -> [R, H]``: of what it returned;
            ``weights()``.
        max_len: positions from here on have no place in the cache.
        compact: rows of rejected tokens are dead. Otherwise they are computed, and mean nothing.
        token_map: see :class:`ms_spec.proposers.draw.Draw`.

    The head's cache holds every position before the newest token. The first pass runs all columns of the step again,
    now that their successors are known and their features are the target's own.
    """

    def __init__(
        self,
        backend: Any,
        head: nn.Cell,
        num_drafts: int,
        max_len: int,
        probs: Any,
        token_map: Any = None,
        compact: bool = False,
    ) -> None:
        super().__init__()
        self.head, self.num_drafts, self.max_len = head, num_drafts, max_len
        self.taps: tuple[int, ...] = tuple(head.taps)
        self.dense, self.probs = probs is not None, probs
        self.compact = compact
        self.take = backend.TakeRows()
        self.draw = Draw(backend, probs, token_map)

    def grids(self, width: int) -> Sequence[int]:
        """All columns of the step, and a single draft."""
        return (width, 1)

    def weights(self) -> list[Any]:
        """Those of the head."""
        weights: list[Any] = self.head.weights()
        return weights

    def construct(
        self, history, slot, length, tokens, following, last, start, rows, features, limit, bounds, sampling, uniforms
    ):
        context = self.head.context(features, rows)
        request, width = numbers(start.shape[0]), tokens.shape[1]
        if self.compact:
            fed = self.head.rows(following, start, rows[5], bounds[0])
            cells = numbers(start.shape[0] * width).reshape(-1, width)
            context = self.take(context, rows, cells, fed)
        else:  # the rows that the target had
            something = ops.select(tokens >= 0, ops.maximum(following, 0), tokens)
            fed = self.head.rows(something, start, rows[5], bounds[0])
        state = self.head(fed, context)
        newest = ops.gather_elements(following, 1, last.reshape(-1, 1))
        position = start + last
        end = ops.minimum(position + limit, self.max_len)  # one row for each draft that is wanted
        one = self.head.rows(newest, position, rows[5], bounds[-1], end)
        state = self.take(state, fed, (request * width + last).reshape(-1, 1), one)
        drafts: tuple[Any, ...] = ()
        for place in range(self.num_drafts):
            logits = self.head.logits(state, one)
            token = self.draw(logits, one, place, slot, sampling, uniforms[:, place : place + 1])
            drafts += (token,)
            if place + 1 < self.num_drafts:
                context, before = self.head.recycled(state, one), one
                position = position + 1
                one = self.head.rows(token, position, rows[5], bounds[-1], end)
                if start.shape[0] > 1:  # a single request's row stays where it is
                    context = self.take(context, before, request.reshape(-1, 1), one)
                state = self.head(one, context)
        ids = ops.cat(drafts, 1)
        return ids, counted(ids)
