"""Whether a request can be served. Each fault is a RequestError of one line."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ms_spec.blocks import BlockManager
from ms_spec.errors import RequestError
from ms_spec.inputs import token_ids
from ms_spec.limits import Limits
from ms_spec.sampling_params import SamplingParams
from ms_spec.work import MAX_BANNED


class RequestChecks:
    """What one engine takes.

    eos: ids that end a request unless it ignores them.
    has_text: whether there is a tokenizer.
    saves_states: whether hidden states are extracted.
    """

    def __init__(
        self,
        limits: Limits,
        blocks: BlockManager,
        vocab_size: int,
        eos: Collection[int],
        has_text: bool,
        saves_states: bool,
    ) -> None:
        self._limits, self._blocks, self._vocab_size = limits, blocks, vocab_size
        self._eos, self._has_text, self._saves_states = frozenset(eos), has_text, saves_states

    def prompt(self, prompt_ids: Iterable[int]) -> list[int]:
        """The ids of a prompt that has room for one more."""
        ids = token_ids(prompt_ids)
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        longest = self._limits.max_model_len - 1
        if len(ids) > longest:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; with max_model_len = {longest + 1} at most {longest} are allowed, "
                f"one less for the first output token; shorten it or raise max_model_len to {len(ids) + 1} or more"
            )
        self._in_vocabulary("prompt_token_ids", ids)
        return ids

    def params(self, ids: list[int], params: SamplingParams) -> int:
        """The most output tokens of a prompt with these ids."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self._in_vocabulary(name, list(getattr(params, name) or ()))
        for name in ("logprobs", "prompt_logprobs"):
            count, most = getattr(params, name), self._limits.max_logprobs
            if count is not None and count > most:
                raise RequestError(
                    f"{name} = {count}: must be at most max_logprobs = {most}; use {most}, or give the engine a larger "
                    "max_logprobs"
                )
        if self._saves_states and params.max_tokens != 1:
            raise RequestError(
                f"max_tokens = {params.max_tokens}: must be 1 with method 'extract_hidden_states', which saves the "
                "states of prompts; use max_tokens = 1"
            )
        if params.stop and not self._has_text:
            raise RequestError("stop needs text, and this engine has no tokenizer; use stop_token_ids")
        banned = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else self._eos)
        if params.min_tokens and len(banned) > MAX_BANNED:
            raise RequestError(
                f"min_tokens = {params.min_tokens}: at most {MAX_BANNED} stop ids can be held back, these are "
                f"{len(banned)}; use fewer stop_token_ids or min_tokens = 0"
            )
        room = self._limits.max_model_len - len(ids)
        max_output = room if params.max_tokens is None else min(params.max_tokens, room)
        need = self._blocks.needed(self._limits.span(len(ids) + max_output - 1))
        if need > self._blocks.num_usable:
            raise RequestError(
                f"a prompt of {len(ids)} tokens with max_tokens = {max_output} needs {need} KV blocks of "
                f"{self._blocks.block_size} tokens; there are {self._blocks.num_usable}; lower max_tokens or enlarge "
                "the cache"
            )
        return max_output

    def _in_vocabulary(self, name: str, ids: list[int]) -> None:
        if ids and (max(ids) >= self._vocab_size or min(ids) < 0):
            place, wrong = next((i, token) for i, token in enumerate(ids) if not 0 <= token < self._vocab_size)
            raise RequestError(
                f"{name}[{place}] = {wrong}: not in the vocabulary; ids go from 0 to {self._vocab_size - 1} "
                f"(size {self._vocab_size})"
            )
