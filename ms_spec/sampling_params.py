"""How a request samples and when it stops. Fields and defaults are vLLM's."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from ms_spec.errors import is_neutral, unknown_name

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, [], ()),
    "logprobs": (None, False),
    "prompt_logprobs": (None, False),
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
    as ``max_model_len`` leaves. ``seed`` None means a fresh one for every request.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
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
            object.__setattr__(self, name, value)
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
        self.n = _integer("n", self.n, 1, f"an integer from 1 to {MOST_SAMPLES}", most=MOST_SAMPLES)
        self.temperature = _number("temperature", self.temperature, "a number >= 0", 0.0, math.inf)
        self.temperature = min(self.temperature, HOTTEST)
        self.top_p = _number("top_p", self.top_p, "a number above 0 and at most 1", 0.0, 1.0, open_below=True)
        self.top_k = _integer(
            "top_k", 0 if self.top_k is None else self.top_k, -1, "an integer >= 1, or -1 or 0 for off"
        )
        self.min_p = _number("min_p", self.min_p, "a number from 0 to 1", 0.0, 1.0)
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, 0, "an integer from 0 to 2**64 - 1", most=2**64 - 1)
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, 1)
        self.min_tokens = _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens = {self.min_tokens}: must be <= max_tokens = {self.max_tokens}; "
                f"use {self.max_tokens} or a larger max_tokens"
            )
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be True or False")
        self.stop = _strings(self.stop)
        self.stop_token_ids = _ids(self.stop_token_ids)
        if self.stop and not self.detokenize:
            raise ValueError("stop needs text; use detokenize = True, or stop_token_ids instead of stop")
        if self.greedy and self.n > 1:
            raise ValueError(f"n = {self.n}: must be 1 with temperature = 0, where all samples are the same; use n = 1")


_FIELDS: dict[str, Any] = {field.name: field.default for field in fields(SamplingParams)}


def _integer(name: str, value: Any, least: int, allowed: str = "", most: int | None = None) -> int:
    allowed, given = allowed or f"an integer >= {least}", value
    if isinstance(value, bool) or not isinstance(value, int):
        try:
            value = value.__index__() if not isinstance(value, bool) else None
        except (AttributeError, TypeError):
            value = None
    if value is None:
        raise ValueError(f"{name} = {given!r}: must be {allowed}")
    if value < least or (most is not None and value > most):
        near = least if value < least else most
        raise ValueError(f"{name} = {value}: must be {allowed}; nearest: {near}")
    return int(value)


def _number(name: str, value: Any, allowed: str, least: float, most: float, open_below: bool = False) -> float:
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (least <= number <= most) or math.isinf(number) or (open_below and number == least):
        raise ValueError(f"{name} = {value!r}: must be {allowed}")
    return number


def _strings(value: Any) -> list[str]:
    if value is None:
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"stop = {value!r}: must be a string or a list of strings")
    if "" in texts:
        raise ValueError("stop contains an empty string, which would stop at once; remove it")
    return list(texts)


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise ValueError(f"stop_token_ids = {value!r}: must be a list of token ids")
    ids = [_integer("stop_token_ids entry", token, 0, "a token id (an integer >= 0)") for token in value]
    return sorted(ids) if isinstance(value, (set, frozenset)) else ids
