"""What a user gets back, shaped like vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ms_spec.logprobs import Logprob
from ms_spec.metrics import Metrics


@dataclass
class CompletionOutput:
    """One sample. ``finish_reason`` is "stop", "length", "abort", "error", or None while it runs.

    ``stop_reason`` is the stop string or the stop token id that ended it, None for EOS and for the other reasons.
    ``token_ids`` ends with the token that completed the stop; ``text`` ends before the stop.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    """Sum over ``token_ids``, where ``logprobs`` are asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token: itself first, then the most likely ones, by id."""
    from_draft: list[bool] = field(default_factory=list, repr=False)
    """For each token: whether it was drafted and accepted, or else the model's own."""

    def finished(self) -> bool:
        """Whether this sample is complete."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """One prompt's result. ``error`` says in one line why finish_reason is "error"."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    metrics: Metrics = field(default_factory=Metrics)
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each token of the prompt the same; None for the first. Complete when there is an output token."""
    kv_transfer_params: dict[str, Any] | None = None

    @classmethod
    def failed(cls, request_id: str, prompt: str | None, ids: list[int], error: str) -> RequestOutput:
        """The output of a request that could not be served."""
        return cls(request_id, prompt, ids, [CompletionOutput(0, finish_reason="error")], error=error)


@dataclass
class Delta:
    """What one step added to one sample of one request."""

    request: RequestOutput
    index: int
    text: str
    """May be empty: text that could turn out to be the beginning of a stop string is held back."""
    token_ids: list[int]
