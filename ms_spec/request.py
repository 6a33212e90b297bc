"""A request and its samples while they run."""

from __future__ import annotations

from collections import deque

from ms_spec.draft_budget import DraftGate
from ms_spec.metrics import Metrics
from ms_spec.outputs import CompletionOutput, RequestOutput
from ms_spec.sampling_params import SamplingParams
from ms_spec.shaping import Shaping
from ms_spec.stopping import Stopping

WAITING, PREFILL, DECODE, FINISHED = "waiting", "prefill", "decode", "finished"


class Request:
    """One prompt. Its ``output`` grows while the request runs; it is the object that the user gets."""

    __slots__ = (
        "arrived",
        "changed",
        "failed",
        "inbox",
        "num_drafts",
        "output",
        "params",
        "seed",
        "sequences",
        "shaping",
    )

    def __init__(
        self,
        output: RequestOutput,
        params: SamplingParams,
        seed: int,
        arrived: float,
        num_drafts: int,
        shaping: Shaping | None,
    ) -> None:
        self.output = output
        self.params = params
        self.seed = seed
        self.arrived = arrived
        self.num_drafts = num_drafts
        """The most at a time."""
        self.shaping = shaping
        self.changed = False
        """Whether it stands in the inbox; whoever takes it from there clears this."""
        self.failed = False
        """Whether it ended because the model failed."""
        self.inbox: deque[Request] | None = None
        self.sequences: list[Sequence] = []

    def touch(self) -> None:
        """Tells whoever waits that the output has grown."""
        if self.inbox is not None and not self.changed:
            self.changed = True
            self.inbox.append(self)


class Sequence:
    """One sample of a request.

    ``tokens`` is prompt and output. While it decodes, the KV cache holds all of them but the last, whose row runs in
    the next step together with ``drafts``.
    """

    __slots__ = (
        "banned",
        "banned_until",
        "computed",
        "drafts",
        "first_token_at",
        "gate",
        "max_output",
        "metrics",
        "num_prompt",
        "order",
        "out",
        "request",
        "slot",
        "state",
        "stopping",
        "table",
        "tokens",
    )

    def __init__(
        self, request: Request, out: CompletionOutput, order: int, max_output: int, stopping: Stopping, gate: DraftGate
    ) -> None:
        self.request = request
        self.out = out
        self.order = order
        self.tokens = list(request.output.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.max_output = max_output
        self.stopping = stopping
        self.gate = gate
        self.metrics = Metrics()
        self.banned = sorted(stopping.stop_ids) if request.params.min_tokens else []
        self.banned_until = self.num_prompt + min(request.params.min_tokens, max_output) if self.banned else 0
        self.first_token_at: float | None = None
        self.state = WAITING
        self.slot = 0
        self.table: list[int] = []
        self.computed = 0
        self.drafts: list[int] = []

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def room(self) -> int:
        """Output tokens still to come."""
        return self.max_output - self.num_output

    @property
    def prefill_end(self) -> int:
        """Tokens that a prefill computes: the prompt; after a preemption all but the last, which is decoded next."""
        return len(self.tokens) if len(self.tokens) == self.num_prompt else len(self.tokens) - 1
