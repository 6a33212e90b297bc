"""What speculation did for one request, or for all of them together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Metrics:
    """Counts of decode steps and drafts.

    A *step* is one decode pass over a request: it verifies the drafts at hand (maybe none) and emits the accepted
    ones and one token more. *Drafted* counts ids really sent to verification. *Accepted* counts drafts that were
    emitted: one that was accepted but lies behind a stop or beyond max_tokens does not count. The first token comes
    from the prompt's pass and belongs to no step.
    """

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_decode_tokens: int = 0
    """Tokens emitted by decode steps."""
    num_drafts: int = 0
    """Steps that had at least one draft."""
    acceptance_per_position: list[int] = field(default_factory=list)
    """How many drafts at position 1, 2, ... were accepted. Never increases; sums to num_accepted_tokens."""
    num_preemptions: int = 0
    decode_seconds: float = 0.0
    """From the first token to the last."""
    draft_seconds: float = 0.0
    """Shares of the steps' time that drafting took; 0.0 where nothing measured it."""
    verify_seconds: float = 0.0
    """Shares of the steps' time that scoring and verifying took; 0.0 where nothing measured it."""
    time_to_first_token_s: float | None = None

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per decode step, the model's own token included; 0.0 before the first step."""
        return self.num_decode_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted, from 0 to 1; 0.0 when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Speed of the decode phase: tokens after the first, over the time since the first."""
        return self.num_decode_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def undrafted_steps(self) -> float:
        """Share of the steps that had no draft, from 0 to 1; 0.0 before the first step."""
        return 1 - self.num_drafts / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """How often, of the steps that had drafts, position 1, 2, ... was accepted, from 0 to 1."""
        return [count / self.num_drafts for count in self.acceptance_per_position]

    def count_step(
        self,
        drafted: int,
        accepted: int,
        emitted: int,
        draft_seconds: float | None = 0.0,
        verify_seconds: float | None = 0.0,
    ) -> None:
        """One step: ``drafted`` ids verified, ``accepted`` of them right, ``emitted`` tokens kept after stops.

        The seconds are this request's shares of what the step took (see :class:`ms_spec.work.Result`), None where
        nothing measured them.
        """
        accepted = min(accepted, emitted)
        self.num_steps += 1
        self.num_decode_tokens += emitted
        self.draft_seconds += draft_seconds or 0.0
        self.verify_seconds += verify_seconds or 0.0
        if not drafted:
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        counts = self.acceptance_per_position
        if len(counts) < drafted:
            counts.extend([0] * (drafted - len(counts)))
        for position in range(accepted):
            counts[position] += 1

    def add(self, other: Metrics) -> None:
        """Adds another request's counts. Times: seconds add up, the first token is the earlier one."""
        for name in (
            "num_steps",
            "num_draft_tokens",
            "num_accepted_tokens",
            "num_decode_tokens",
            "num_drafts",
            "num_preemptions",
            "decode_seconds",
            "draft_seconds",
            "verify_seconds",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        mine, theirs = self.acceptance_per_position, other.acceptance_per_position
        mine.extend([0] * (len(theirs) - len(mine)))
        for position, count in enumerate(theirs):
            mine[position] += count
        if other.time_to_first_token_s is not None:
            first = self.time_to_first_token_s
            self.time_to_first_token_s = min(
                other.time_to_first_token_s, other.time_to_first_token_s if first is None else first
            )

    def as_dict(self) -> dict[str, Any]:
        """The figures that are printed, ready for JSON. ``draft_seconds``, ``verify_seconds``: only where measured."""
        first = self.time_to_first_token_s
        times = {"draft_seconds": self.draft_seconds, "verify_seconds": self.verify_seconds}
        return {
            "num_steps": self.num_steps,
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "acceptance_per_position": list(self.acceptance_per_position),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "time_to_first_token_s": None if first is None else round(first, 6),
            **{name: round(seconds, 6) for name, seconds in times.items() if seconds > 0},
            "num_preemptions": self.num_preemptions,
        }


@dataclass
class EngineMetrics(Metrics):
    """All requests since the engine started."""

    num_requests: int = 0
    num_finished: int = 0
    num_engine_steps: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The figures that are printed, ready for JSON. Times per request mean nothing here and are left out."""
        figures = super().as_dict()
        for name in ("time_to_first_token_s", "tokens_per_second"):
            del figures[name]
        counts = {name: getattr(self, name) for name in ("num_requests", "num_finished", "num_engine_steps")}
        return {**counts, **figures}
