"""Token ids to text, a few at a time, never a broken character.

What ``push`` and ``finish`` return joins to exactly ``decode`` of all ids. The work per token does not grow with the
length of the text.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CONTEXT = 4
_PATIENCE = 16


class StreamDecoder:
    """Incremental detokenizer. ``backend``: a ``tokenizers.Tokenizer``."""

    def __init__(self, backend: Any, skip_special_tokens: bool = True) -> None:
        special = backend.get_added_tokens_decoder() if skip_special_tokens else {}
        skipped = frozenset(i for i, t in special.items() if t.special)
        kind = Bytes if _is_byte_level(backend) else Windowed
        self._decoder: Bytes | Windowed = kind(backend, skipped)

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens settle. Bytes of an unfinished character wait."""
        return "".join([self._decoder.push(i) for i in ids])

    def finish(self) -> str:
        """What was waiting. The decoder starts anew afterwards."""
        return self._decoder.finish()


class Bytes:
    """Byte-level vocabularies: every token is some bytes, and text is their concatenation read as UTF-8."""

    def __init__(self, backend: Any, skipped: frozenset[int]) -> None:
        self._backend, self._skipped = backend, skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        text = self._backend.id_to_token(token)
        return "" if text is None else self._utf8.decode(_token_bytes(text))

    def finish(self) -> str:
        rest = self._utf8.decode(b"", True)
        self._utf8.reset()
        return rest


class Windowed:
    """Any other tokenizer: decodes the new tokens behind a few old ones and returns what is new in the text.

    Byte tokens such as <0xE4> are held until the run of them ends: a run that is no UTF-8 becomes as many
    replacement characters as it has bytes, so no character of it is settled before.
    """

    def __init__(self, backend: Any, skipped: frozenset[int]) -> None:
        self._backend, self._skipped = backend, skipped
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        text = self._backend.id_to_token(token)
        if text is None:
            return ""
        self._pending.append(token)
        if _BYTE_TOKEN.fullmatch(text):
            return ""
        new = self._new_text()
        if not new or (new.endswith("\ufffd") and len(self._pending) < _PATIENCE):
            return ""
        self._settle()
        return new

    def finish(self) -> str:
        new = self._new_text() if self._pending else ""
        self._context, self._pending = [], []
        return new

    def _new_text(self) -> str:
        before = self._backend.decode(self._context, skip_special_tokens=False)
        return self._backend.decode(self._context + self._pending, skip_special_tokens=False)[len(before) :]

    def _settle(self) -> None:
        self._context = (self._context + self._pending)[-_CONTEXT:]
        self._pending = []


def _is_byte_level(backend: Any) -> bool:
    """True if the decoder is nothing but ByteLevel."""
    if backend.decoder is None:
        return False
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return [s["type"] for s in steps] == ["ByteLevel"]


@functools.lru_cache(maxsize=1)
def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's way to write any byte as a printable character, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    table.update({chr(256 + i): b for i, b in enumerate(others)})
    return table


@functools.lru_cache(maxsize=1 << 17)
def _token_bytes(text: str) -> bytes:
    table = _bytes_of_characters()
    try:
        return bytes([table[c] for c in text])
    except KeyError:  # an added token, written as it is
        return text.encode("utf-8")
