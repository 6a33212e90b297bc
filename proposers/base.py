"""What every way to draft looks like to the step graph."""

from __future__ import annotations

from typing import Any, Protocol


class Proposer(Protocol):
    """A Cell that is called at the end of every step graph, after the step's tokens were committed.

    n requests, w columns, R = n * w rows, K drafts at most:

        (history int32 [S, L], slot int32 [n], length int32 [n], emitted int32 [n, w], num_emitted int32 [n],
         hidden, rows, limit int32 [n]) -> (drafts int32 [n, K] (-1: none), counts int32 [n])

    ``history[slot, :length]`` are the request's committed ids, this step's among them; a request of length 0 or limit 0
    gets no drafts, and padding has limit 0. ``emitted`` and ``num_emitted`` are what the rule returned. ``hidden`` and
    ``rows`` are what the target saw and computed in this step, for methods that draft from hidden states: the row in
    column ``num_emitted - 1`` (decode) is the last whose token was accepted; in a prefill step all columns of the chunk
    are. Parameters of the Cell (caches of a draft model, say) are its own, one row or block table a ``slot``, and
    updated in place.

    A proposer is pure: the same inputs and state, the same drafts. What it draws at random it draws from uniforms
    that the step is given. It may be wrong about everything without changing what is generated, only how fast.
    """

    num_drafts: int
    """K, the width of ``drafts``."""
    dense: bool
    """True when the drafts come with distributions; False when they count as one-hot."""

    def __call__(
        self,
        history: Any,
        slot: Any,
        length: Any,
        emitted: Any,
        num_emitted: Any,
        hidden: Any,
        rows: Any,
        limit: Any,
    ) -> tuple[Any, Any]:
        """See the class."""
