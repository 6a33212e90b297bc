"""``speculative_config``: which method drafts, how far, and how drafts are verified."""

# No `from __future__ import annotations`: pydantic evaluates the annotations, on Python 3.9 too.
from typing import Any, Literal, Optional

from pydantic import field_validator, model_validator

from ms_spec.config_errors import knob, shown
from ms_spec.config_section import Section
from ms_spec.errors import unknown_name
from ms_spec.extraction import METHOD as EXTRACTION
from ms_spec.extraction import check_speculation, layer_ids
from ms_spec.proposers import registry

METHODS = tuple(registry.METHODS)
FILLED = ("mtp", "dflash", "suffix")
"""Methods whose K need not be given: the checkpoint or another field says it."""

_NEURAL = ("eagle", "eagle3", "mtp", "dflash", "draft_model")
_WITH_MODEL = ("medusa", *_NEURAL)
_NAMED = ("eagle", "eagle3", "dflash", "draft_model")
"""Methods with a checkpoint of their own. Medusa's heads may stand in the target's."""
MAX_TOKENS = 4096
"""Most drafts per step, and the longest n-gram. Nobody is right that often; the engine bounds a step's rows further."""
OWN_FIELDS = {
    "model": _WITH_MODEL,
    "draft_tensor_parallel_size": _WITH_MODEL,
    "disable_padded_drafter_batch": (*_NEURAL, EXTRACTION),
    "prompt_lookup_max": ("ngram",),
    "prompt_lookup_min": ("ngram",),
    "suffix_decoding_max_tree_depth": ("suffix",),
    "suffix_decoding_max_cached_requests": ("suffix",),
    "suffix_decoding_max_spec_factor": ("suffix",),
    "suffix_decoding_min_token_prob": ("suffix",),
    "draft_sample_method": _WITH_MODEL,
    "draft_model_config": (*_WITH_MODEL, EXTRACTION),
}
"""Fields that mean something with some methods only. Their default is allowed with every method."""


class SpeculativeConfig(Section):
    """See the field texts. K is ``num_speculative_tokens``."""

    method: Optional[Literal[METHODS]] = knob(None, "one of " + ", ".join(METHODS))  # type: ignore[valid-type]
    num_speculative_tokens: Optional[int] = knob(None, f"an integer from 1 to {MAX_TOKENS}", ge=1, le=MAX_TOKENS)
    model: Optional[str] = knob(None, "the path or name of a draft model", min_length=1)
    draft_tensor_parallel_size: Optional[int] = knob(None, "1 or tensor_parallel_size", ge=1)
    disable_padded_drafter_batch: bool = knob(False, "true or false")
    prompt_lookup_max: Optional[int] = knob(
        None, f"an integer from 1 to {MAX_TOKENS} and >= prompt_lookup_min", ge=1, le=MAX_TOKENS
    )
    prompt_lookup_min: Optional[int] = knob(
        None, f"an integer from 1 to {MAX_TOKENS} and <= prompt_lookup_max", ge=1, le=MAX_TOKENS
    )
    suffix_decoding_max_tree_depth: int = knob(24, "an integer >= 1", ge=1)
    suffix_decoding_max_cached_requests: int = knob(10000, "an integer >= 0", ge=0)
    suffix_decoding_max_spec_factor: float = knob(1.0, "a number >= 0", ge=0)
    suffix_decoding_min_token_prob: float = knob(0.1, "a number from 0 to 1", ge=0, le=1)
    draft_model_config: Optional[dict[str, Any]] = knob(None, "a dict with hf_config")
    rejection_sample_method: Optional[Literal["standard", "block", "synthetic"]] = knob(
        None, "one of standard, block, synthetic"
    )
    draft_sample_method: Literal["greedy", "probabilistic"] = knob("greedy", "greedy or probabilistic")
    num_speculative_tokens_per_batch_size: Optional[list[list[int]]] = knob(
        None, "a list of [first_n, last_n, K] in rising order with 0 <= K <= num_speculative_tokens"
    )
    synthetic_acceptance_rates: Optional[list[float]] = knob(None, "a list of numbers from 0 to 1")
    synthetic_acceptance_length: Optional[float] = knob(None, "a number >= 1", ge=1)

    @field_validator("num_speculative_tokens_per_batch_size", mode="before")
    @classmethod
    def _lists(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [list(part) if isinstance(part, tuple) else part for part in value]
        return value

    @model_validator(mode="after")
    def _check(self) -> "SpeculativeConfig":
        method = self.method
        if method is None:
            if self.model is None:
                raise ValueError(f"method is missing; it must be one of {', '.join(METHODS)}")
            return self  # the draft checkpoint says it; see ``resolved``
        self._check_owners(method)
        self._check_overrides()
        if method == EXTRACTION:
            check_speculation(self.num_speculative_tokens, self.draft_model_config)
        if method in _NAMED and self.model is None:
            raise ValueError(f"model is missing; with method '{method}' it must be the path or name of a draft model")
        if self.num_speculative_tokens is None:
            if method not in FILLED:
                raise ValueError(
                    f"num_speculative_tokens is missing; with method '{method}' it must be an integer >= 1; use 4"
                )
            if method == "suffix":
                object.__setattr__(self, "num_speculative_tokens", self.suffix_decoding_max_tree_depth)
        if method == "ngram":
            self._fill_lookup()
        if self.rejection_sample_method == "synthetic":
            raise ValueError(
                "rejection_sample_method = 'synthetic': not available in this version; allowed: standard, block"
            )
        for field in ("synthetic_acceptance_rates", "synthetic_acceptance_length"):
            if getattr(self, field) is not None:
                raise ValueError(f"{field} is only allowed with rejection_sample_method = 'synthetic'; remove it")
        if self.num_speculative_tokens is not None:
            self._check_table(self.num_speculative_tokens)
        return self

    @property
    def complete(self) -> bool:
        """Whether method and K are known, without a look at the draft checkpoint."""
        return self.method is not None and self.num_speculative_tokens is not None

    @property
    def hidden_layer_ids(self) -> tuple[int, ...]:
        """The states that ``extract_hidden_states`` saves, rising, each once."""
        return layer_ids(self.draft_model_config)

    def _check_overrides(self) -> None:
        """``draft_model_config`` is {"hf_config": {field: value}}."""
        given = self.draft_model_config or {}
        for field in given:
            if field != "hf_config":
                raise ValueError(unknown_name("draft_model_config field", field, ("hf_config",)))
        if not isinstance(given.get("hf_config", {}), dict):
            raise ValueError(
                f"draft_model_config.hf_config = {shown(given['hf_config'])}: must be a dict of fields of the draft's "
                'config.json, such as {"rope_theta": 10000}'
            )

    def _check_owners(self, method: str) -> None:
        for field, methods in OWN_FIELDS.items():
            value = getattr(self, field)
            if method not in methods and value != type(self).model_fields[field].default:
                raise ValueError(
                    f"{field} = {value!r:.60}: only for method {', '.join(methods)}, not for '{method}'; remove it"
                )

    def _fill_lookup(self) -> None:
        """A missing end of the n-gram range equals the other; both missing: 5."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        both = low if high is None else high
        both = 5 if both is None else both
        low, high = both if low is None else low, both if high is None else high
        if low > high:
            raise ValueError(
                f"prompt_lookup_min = {low}: must be <= prompt_lookup_max = {high}; "
                f"use prompt_lookup_min <= {high} or prompt_lookup_max >= {low}"
            )
        object.__setattr__(self, "prompt_lookup_min", low)
        object.__setattr__(self, "prompt_lookup_max", high)

    def _check_table(self, most: int) -> None:
        """Raises unless the ranges are [first, last, K], rise, do not overlap, and 0 <= K <= num_speculative_tokens."""
        before = 0
        for row in self.num_speculative_tokens_per_batch_size or ():
            name = f"num_speculative_tokens_per_batch_size entry {row}"
            if len(row) != 3:
                raise ValueError(f"{name}: must be [first_n, last_n, K]")
            first, last, tokens = row
            if first <= before:
                raise ValueError(f"{name}: first_n must be above the range before it (>= {before + 1})")
            if last < first:
                raise ValueError(f"{name}: last_n must be >= first_n = {first}")
            if not 0 <= tokens <= most:
                raise ValueError(
                    f"{name}: K must be from 0 to num_speculative_tokens = {most}; use {min(max(tokens, 0), most)}"
                )
            before = last
