"""How a request samples and when it stops. Fields and defaults are vLLM's."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from ms_spec import values
from ms_spec.errors import is_neutral, unknown_name

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "logits_processors": (None, [], ()),
    "truncate_prompt_tokens": (None,),
    "guided_decoding": (None,),
    "structured_outputs": (None,),
    "spaces_between_special_tokens": (None, True),
    "flat_logprobs": (None, False),
    "extra_args": (None, {}),
}
"""vLLM's other fields, with the values that change nothing. Only those are accepted."""
HOTTEST = 1e6
"""Temperatures above it are taken as it: every token that the filters leave is as likely as any other long before."""
MOST_SAMPLES = 16384


@dataclass(init=False)
class SamplingParams:
    """Sampling of one request. Every fault is a ValueError of one line that names the field.

    ``temperature`` 0 is greedy, whatever the filters say. ``top_k`` -1 or 0 is off. ``max_tokens`` None means as many
    as ``max_model_len`` leaves; to other fields None gives their default. ``seed`` None means a fresh one for every
    request. ``logprobs`` and ``prompt_logprobs`` None means none, 0 those of the tokens alone.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __init__(self, **given: Any) -> None:
        for name, value in {**_FIELDS, **given}.items():
            setattr(self, name, value)
        self._check()

    def __setattr__(self, name: str, value: Any) -> None:
        """Values are checked together, when the parameters are made and when they are used; names at once."""
        if name in _FIELDS:
            means_default = value is None and name != "max_tokens"
            object.__setattr__(self, name, _FIELDS[name] if means_default else value)
        elif name not in NEUTRAL:
            raise ValueError(unknown_name("sampling parameter", name, [*_FIELDS, *NEUTRAL]))
        elif not is_neutral(value, NEUTRAL[name]):
            neutral = " or ".join(repr(same) for same in NEUTRAL[name])
            raise ValueError(f"{name} = {value!r}: not supported yet; leave it out (or use {neutral})")

    def clone(self) -> SamplingParams:
        """A copy, checked: values may have been assigned since these were made."""
        return type(self)(**{name: getattr(self, name) for name in _FIELDS})

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    def _check(self) -> None:
        self.n = values.integer("n", self.n, 1, f"an integer from 1 to {MOST_SAMPLES}", most=MOST_SAMPLES)
        self.temperature = values.number("temperature", self.temperature, "a number >= 0", 0.0, math.inf)
        self.temperature = min(self.temperature, HOTTEST)
        self.top_p = values.number("top_p", self.top_p, "a number above 0 and at most 1", 0.0, 1.0, open_below=True)
        self.top_k = values.integer("top_k", self.top_k, -1, "an integer >= 1, or -1 or 0 for off")
        self.min_p = values.number("min_p", self.min_p, "a number from 0 to 1", 0.0, 1.0)
        self._check_shaping()
        if self.seed is not None:
            self.seed = values.integer("seed", self.seed, 0, "an integer from 0 to 2**64 - 1", most=2**64 - 1)
        if self.max_tokens is not None:
            self.max_tokens = values.integer("max_tokens", self.max_tokens, 1)
        self.min_tokens = values.integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens = {self.min_tokens}: must be <= max_tokens = {self.max_tokens}; "
                f"use {self.max_tokens} or a larger max_tokens"
            )
        self.logprobs = _count("logprobs", self.logprobs)
        self.prompt_logprobs = _count("prompt_logprobs", self.prompt_logprobs)
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be True or False")
        self.stop = values.strings("stop", self.stop, "which would stop at once")
        self.stop_token_ids = values.ids("stop_token_ids", self.stop_token_ids)
        if self.stop and not self.detokenize:
            raise ValueError("stop needs text; use detokenize = True, or stop_token_ids instead of stop")
        if self.greedy and self.n > 1:
            raise ValueError(f"n = {self.n}: must be 1 with temperature = 0, where all samples are the same; use n = 1")

    def _check_shaping(self) -> None:
        """What changes the logits."""
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            setattr(
                self, name, values.number(name, 0.0 if value is None else value, "a number from -2 to 2", -2.0, 2.0)
            )
        value = 1.0 if self.repetition_penalty is None else self.repetition_penalty
        allowed = "a finite number above 0 (1: none)"
        self.repetition_penalty = values.number("repetition_penalty", value, allowed, 0.0, math.inf, open_below=True)
        self.bad_words = values.strings("bad_words", self.bad_words, "which bans nothing")
        self.logit_bias = values.biases("logit_bias", self.logit_bias) or None
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = values.ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids = []: would leave no token; name at least one id, or use None")


_FIELDS: dict[str, Any] = {field.name: field.default for field in fields(SamplingParams)}


def _count(name: str, value: Any) -> int | None:
    """How many of the most likely tokens to tell; True is one."""
    if value is None or value is False:
        return None
    return values.integer(name, 1 if value is True else value, 0, "an integer >= 0, or None for none at all")
