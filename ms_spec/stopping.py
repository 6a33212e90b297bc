"""The one place that decides where a request ends, token by token.

A step may emit several tokens. They are looked at one by one in order, so that the earliest end wins, whatever else
lies in the same block of accepted drafts: at one token EOS comes before stop_token_ids, these before stop strings, and
all of them before the length limit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Optional, Protocol, Union

from ms_spec.sampling_params import SamplingParams

Verdict = tuple[str, Optional[str], Union[int, str, None]]
"""Text released, finish reason (None: go on), stop reason."""


class Decoder(Protocol):
    """Ids to text, as they come. May hold back bytes of an unfinished character."""

    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class Stopping:
    """Text and end of one sample.

    Stop strings are matched in the text, so they may lie across tokens and steps. Of several the one that is complete
    first wins (if two end at the same character, the one that begins first), which does not depend on how the text
    was cut into tokens. Text that may be the beginning of a stop string is held back until it is decided.
    """

    def __init__(self, params: SamplingParams, eos: Collection[int], decoder: Decoder | None, max_output: int) -> None:
        self._eos = frozenset() if params.ignore_eos else frozenset(eos)
        self.stop_ids = self._eos | frozenset(params.stop_token_ids or ())
        self._stops = list(params.stop or ())
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._decoder = decoder
        self._max_output = max_output
        self._count = 0
        self._held = ""

    def push(self, token: int) -> Verdict:
        """The next token. It belongs to the output even if it ends it."""
        self._count += 1
        armed = self._count > self._min_tokens
        if armed and token in self.stop_ids:
            text = self._decoder.push((token,)) if self._decoder and self._include else ""
            text = self._held + text + (self._decoder.finish() if self._decoder else "")
            return text, "stop", None if token in self._eos else token
        text = self._decoder.push((token,)) if self._decoder else ""
        if self._stops:
            text, hit = self._search(text, armed)
            if hit is not None:
                return text, "stop", hit
        if self._count >= self._max_output:
            rest, hit = self._flush(armed)
            return text + rest, "length" if hit is None else "stop", hit
        return text, None, None

    def close(self) -> str:
        """The text still held back, for a request that ends from outside (abort, error)."""
        return self._flush(False)[0]

    def _flush(self, armed: bool) -> tuple[str, str | None]:
        text, hit = (self._decoder.finish() if self._decoder else ""), None
        if self._stops:
            text, hit = self._search(text, armed)
            text, self._held = text + self._held, ""
        return text, hit

    def _search(self, new: str, armed: bool) -> tuple[str, str | None]:
        """Text that can be released, and the stop string that became complete in ``new``."""
        text, old = self._held + new, len(self._held)
        best: tuple[int, int, str] | None = None
        for stop in self._stops if armed else ():
            begin = text.find(stop, max(0, old - len(stop) + 1))
            if begin >= 0 and (best is None or (begin + len(stop), begin) < best[:2]):
                best = (begin + len(stop), begin, stop)
        if best is not None:
            self._held = ""
            return text[: best[0] if self._include else best[1]], best[2]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning, not the whole, of ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
