"""What every way to draft looks like to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

NORMED = -1
"""Among a proposer's ``taps``: the output of the target's final norm, which its head sees."""


class Proposer(Protocol):
    """A Cell that is called at the end of every step graph, after the step's tokens were committed.

    n requests, w columns, R = n * w rows, K drafts at most:

        (history int32 [S, L], slot int32 [n], length int32 [n], tokens int32 [n, w], following int32 [n, w],
         last int32 [n], start int32 [n], rows, features, limit int32 [n], bounds, sampling float32 [n, 4],
         uniforms float32 [n, K]) -> (drafts int32 [n, K] (-1: none), counts int32 [n])

    ``history[slot, :length]`` are the request's committed ids, this step's among them; a request of length 0 or limit 0
    gets no drafts, and padding has limit 0. ``tokens``, ``start`` and ``rows`` are what the target was fed: in a decode
    step the last committed token and the drafts, in a prefill step a chunk of the prompt (-1: no token).
    ``following`` is the committed token behind each column: the emitted ones, or the chunk moved by one; -1 where the
    column's token was rejected. ``last`` is the column whose ``following`` is the newest committed token. ``features``
    are the target's states [R, H] in the order of ``taps``. ``bounds`` are upper bounds of attention lengths, one
    tensor for each of ``grids(w)``. ``sampling`` is temperature, top_k, top_p, min_p.

    Caches of a proposer are paged by the target's block tables (``rows[5]``). What is written behind the newest
    committed token is junk of this step: nothing may read it before writing it anew.

    A proposer is pure: the same inputs and state, the same drafts. What it draws at random it draws from ``uniforms``.
    It may be wrong about everything without changing what is generated, only how fast. Also where ``limit`` is 0 its
    caches have to take in what was committed.

    With an attribute ``exported`` that is true, what it taps in prefill steps goes to the host, and nothing is decoded.
    """

    num_drafts: int
    """K, the width of ``drafts``."""
    dense: bool
    """True when the drafts come with distributions, in ``probs``; False when they count as one-hot."""
    probs: Any
    """Parameter float32 [S, K, V], by slot: the distributions that the drafts were drawn from. None unless dense."""
    taps: tuple[int, ...]
    """States that it wants: 0: the embeddings, k: what layer k leaves, NORMED: the final norm of the last."""

    def grids(self, width: int) -> Sequence[int]:
        """Columns of the grids that it runs rows in, in a step of ``width`` columns."""

    def weights(self) -> list[Any]:
        """Where its weights stand in the draft checkpoint; [] without one."""

    def __call__(self, *arguments: Any) -> tuple[Any, Any]:
        """See the class."""


class Weightless:
    """What proposers that only look at what there is have in common: no rows, no weights, no distributions."""

    dense = False
    probs = None
    taps: tuple[int, ...] = ()

    def grids(self, width: int) -> Sequence[int]:
        """None: it runs no rows."""
        return ()

    def weights(self) -> list[Any]:
        """None."""
        return []


class HostProposer(Protocol):
    """A method that drafts on the host, between steps. ``key`` names a sequence."""

    def start(self, key: Any, prompt_ids: Sequence[int]) -> None:
        """A new sequence."""

    def extend(self, key: Any, token_ids: Sequence[int]) -> None:
        """Tokens that were emitted."""

    def draft(self, key: Any, limit: int) -> list[int]:
        """At most ``limit`` ids that may come next."""

    def stop(self, key: Any) -> None:
        """The sequence has ended."""


@dataclass(frozen=True)
class Site:
    """Where a proposer is built: the target beside it, the draft checkpoint, and the sizes of the paged cache."""

    target: Any
    """:class:`ms_spec.models.decoder.Decoder`."""
    draft: Any
    """:class:`ms_spec.models.drafts.Draft`; None for methods without a checkpoint."""
    num_blocks: int
    block_size: int
    max_len: int
    max_num_seqs: int
    dtype: str
    """How weights are stored."""
