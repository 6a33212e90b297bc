"""Log-probabilities of tokens, shaped like vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Logprob:
    """Of one token at one place, by the model alone: temperature 1, no filter, no penalty, no bias.

    ``rank``: how many ids are at least as likely (1: the most likely); among the most likely ones their order.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class TokenTexts:
    """The text of single tokens. Each is decoded once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str | None:
        """None without a tokenizer."""
        if self._tokenizer is None:
            return None
        text = self._known.get(token)
        if text is None:
            text = self._known[token] = self._tokenizer.decode([token])
        return text


def no_text(token: int) -> None:
    """For requests that want no text."""


def entries(
    tokens: Iterable[int], rows: Iterable[Sequence[float]], most: int, text_of: Any = no_text
) -> list[dict[int, Logprob]]:
    """Each token's entry: itself, and the ``most`` most likely ones.

    rows: for each token its log-probability and rank, then the ids of the N most likely tokens and their
    log-probabilities, N >= ``most`` unless the vocabulary is smaller.
    """
    found = []
    for token, row in zip(tokens, rows):
        size = (len(row) - 2) // 2
        entry = {token: Logprob(row[0], int(row[1]), text_of(token))}
        for place in range(min(most, size)):
            other = int(row[2 + place])
            entry[other] = Logprob(row[2 + size + place], place + 1, text_of(other))
        found.append(entry)
    return found
