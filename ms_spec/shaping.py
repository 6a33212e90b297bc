"""What a request wants of its logits before tokens are sampled from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ms_spec.errors import RequestError
from ms_spec.sampling_params import SamplingParams

MAX_BAD_WORDS = 100
"""Most id sequences that the bad words of a request may come to."""
MAX_BAD_WORD_TOKENS = 32


@dataclass(frozen=True, eq=False)
class Shaping:
    """Known when the request comes, and the same in all of its steps; two of them are the same if they are one object.

    ``bad_words``: id sequences of which none may be completed. ``allowed``: the only ids that may come; None: all.
    """

    num_prompt_tokens: int
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: Mapping[int, float] | None = None
    allowed: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()

    @property
    def penalties(self) -> tuple[float, float, float]:
        """In the order of the graphs' input."""
        return self.repetition_penalty, self.frequency_penalty, self.presence_penalty

    @property
    def biased(self) -> bool:
        """Whether something is added to the logits."""
        return bool(self.bias) or self.allowed is not None

    @property
    def bans(self) -> bool:
        """Whether it can leave no token at all."""
        return self.biased or bool(self.bad_words)


def shaping_of(params: SamplingParams, num_prompt_tokens: int, tokenizer: Any) -> Shaping | None:
    """None where the logits stay as they are.

    tokenizer: for bad words; None where there is none.

    Raises:
        RequestError: bad words that are too long, too many, or cannot be encoded.
    """
    made = Shaping(
        num_prompt_tokens,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        params.logit_bias,
        params.allowed_token_ids,
        _sequences(params.bad_words or [], tokenizer),
    )
    return made if made.bans or made.penalties != (1.0, 0.0, 0.0) else None


def _sequences(words: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """The ids of each word, and with a space in front of it where that makes another first id of as many."""
    if words and tokenizer is None:
        raise RequestError("bad_words needs text, and this engine has no tokenizer; use logit_bias")
    found: list[list[int]] = []
    for place, word in enumerate(words):
        bare = word.lstrip()
        ids, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in (bare, " " + bare))
        if not ids:
            raise RequestError(f"bad_words[{place}] = {word!r:.60}: the tokenizer makes no token of it; remove it")
        found.append(ids)
        if len(spaced) == len(ids) and spaced[0] != ids[0]:
            found.append(spaced)
        if len(ids) > MAX_BAD_WORD_TOKENS:
            raise RequestError(
                f"bad_words[{place}] = {word!r:.60}: it has {len(ids)} tokens, at most {MAX_BAD_WORD_TOKENS} are "
                "allowed; use a shorter part of it"
            )
    if len(found) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words: {len(words)} words come to {len(found)} token sequences (with and without a space in front), "
            f"at most {MAX_BAD_WORDS} are allowed; use fewer"
        )
    return found
