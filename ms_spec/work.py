"""What the engine hands to the compiled graphs, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from ms_spec.shaping import Shaping

MAX_BANNED = 32
"""Most ids that one request can ban (its stop ids while min_tokens holds): the width of the graphs' input."""


@dataclass
class Work:
    """One request's share of a graph call."""

    slot: int
    """Row of the device state, 1..max_num_seqs (row 0 is padding)."""
    tokens: list[int]
    """Prefill: the chunk. Decode: the last committed token, then its drafts."""
    start: int
    """Absolute position of ``tokens[0]``."""
    block_table: list[int]
    """Physical KV blocks (1 or more; block 0 is nobody's) covering positions 0 .. start + len(tokens) - 1."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    banned: list[int] = field(default_factory=list)
    """Ids that may not be emitted at absolute positions below ``banned_until``."""
    banned_until: int = 0
    shaping: Shaping | None = None
    """What the request wants of its logits; None: nothing."""
    logprobs: bool = False
    """Whether the log-probabilities of what is emitted are wanted."""
    prompt_logprobs: bool = False
    """Prefill: whether those of the prompt's tokens behind each of the chunk's are wanted."""
    seed: int = 0
    sample: int = 0
    output_index: int = 0
    """Index, among the request's output tokens, of the first token that this call emits."""
    draft_limit: int = 0
    """The most drafts to propose for the next step."""
    carried: bool = False
    """Decode: the request's last step is still running. What it leaves decides about the row: ``start`` and
    ``output_index`` are the least that it can begin at, ``tokens`` are as many as it can have, whichever they are."""
    slack: int = 0
    """By how much more than that they can turn out to be."""
    next_token: int = -1
    """Prefill: the token behind the chunk; -1 where the chunk is the end and the model says what follows."""


@dataclass
class Result:
    """What one request gets from a graph call."""

    tokens: list[int]
    """The accepted drafts and one token more. -1 stands where the logits were not finite."""
    drafts: list[int]
    """Drafts for the next step."""
    num_accepted: int = 0
    draft_seconds: float | None = None
    """This request's share of the call's time for drafting, so that the shares of its requests add up to that time.
    None where the device has no clock inside a graph."""
    verify_seconds: float | None = None
    """The same of the time before drafting: scoring and verifying."""
    states: np.ndarray | None = None
    """Prefill, where hidden states are extracted: those of the chunk, float32 [tokens, layers, hidden]."""
    logprobs: list[list[float]] | None = None
    """For each of ``tokens``, if they were asked for: see :func:`ms_spec.logprobs.entries`."""
    prompt_logprobs: list[list[float]] | None = None
    """Prefill: the same for the token behind each of the chunk's, the sampled one among them."""


class Runner(Protocol):
    """The compiled model. All calls come from the process's one graph thread."""

    num_blocks: int
    """KV blocks, the null block 0 among them."""
    num_compiled: int
    """Graphs compiled so far."""

    def prefill(self, work: Work, last: bool) -> Result | None:
        """Runs one chunk of a prompt. Samples a token when ``last``, else returns None, or what else is told."""

    def decode(self, works: list[Work]) -> list[Result]:
        """Verifies each request's drafts, commits what was accepted and proposes the next drafts."""
