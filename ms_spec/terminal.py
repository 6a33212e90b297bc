"""How results are shown: streamed text, text coloured by origin, JSON lines.

Results go to ``out``, all else to stderr.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Callable, TextIO

from ms_spec.prompts import Prompt

METRICS = (
    "num_steps",
    "num_draft_tokens",
    "num_accepted_tokens",
    "mean_acceptance_length",
    "acceptance_per_position",
    "tokens_per_second",
    "time_to_first_token_s",
)
REPLACEMENT = "\ufffd"


def note(text: str) -> None:
    """A line for the person in front of the terminal; never part of the result."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def result_stream() -> Iterator[TextIO]:
    """A stream for results only: whatever else in this process writes to stdout (native code too) goes to stderr."""
    try:
        own = sys.stdout is sys.__stdout__ and sys.stdout.fileno() == 1
    except (OSError, ValueError, AttributeError):
        own = False
    if not own:
        yield sys.stdout
        return
    sys.stdout.flush()
    saved = os.dup(1)
    encoding = sys.stdout.encoding or "utf-8"
    out = os.fdopen(os.dup(saved), "w", encoding=encoding, errors="replace", buffering=1)
    os.dup2(2, 1)
    try:
        yield out
    finally:
        try:
            sys.stdout.flush()
            out.close()
        finally:
            os.dup2(saved, 1)
            os.close(saved)


def metrics_of(output: Any) -> dict[str, Any]:
    """A request's metrics by name. A number that is not finite becomes null: JSON has no name for it."""

    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, 6) if math.isfinite(value) else None
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return value

    metrics = output.metrics
    get = metrics.get if isinstance(metrics, dict) else lambda name: getattr(metrics, name, None)
    return {name: plain(get(name)) for name in METRICS}


def summary(output: Any) -> str:
    """One line about how a request went."""
    values = metrics_of(output)
    tokens = sum(len(one.token_ids) for one in output.outputs)
    parts = [f"{tokens} tokens", str(output.outputs[0].finish_reason)]
    if values["num_draft_tokens"]:
        parts.append(f"{values['num_accepted_tokens']} of {values['num_draft_tokens']} drafts accepted")
        if values["mean_acceptance_length"]:
            parts.append(f"{values['mean_acceptance_length']:.2f} tokens a step")
    if values["tokens_per_second"]:
        parts.append(f"{values['tokens_per_second']:.1f} tokens/s")
    if values["time_to_first_token_s"] is not None:
        parts.append(f"first token after {values['time_to_first_token_s']:.2f} s")
    return ", ".join(parts)


def complain(index: int, output: Any) -> bool:
    """Tells why a request failed. False when it did not."""
    if not any(one.finish_reason == "error" for one in output.outputs):
        return False
    note(f"ms-spec: error: prompt {index + 1}: {getattr(output, 'error', None) or 'the request failed'}")
    return True


class Pieces:
    """Cuts a growing text into pieces by the token that each character came from.

    A character whose bytes lie in several tokens counts as accepted when all of those tokens were. The text is the
    engine's (cut at stop strings); decoding serves only to find where tokens end in it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._ids: list[int] = []
        self._origins: list[bool] = []
        self._window = 0  # decoding restarts here: far enough back for the decoder to put spaces as in the whole
        self._read = 0  # tokens before this one have their place in the text
        self._end = 0  # where the last of those ends
        self._marks: list[tuple[int, bool]] = []  # (end in the text, accepted), not yet shown
        self._shown = 0

    def feed(self, text: str, ids: Sequence[int], origins: Sequence[bool], done: bool) -> list[tuple[str, bool]]:
        """Takes all of a request's text and tokens so far. Returns the pieces that are new: (text, accepted draft)."""
        for token, origin in zip(ids[len(self._ids) :], origins[len(self._ids) :]):
            self._ids.append(int(token))
            self._origins.append(bool(origin))
            before = self._decode(self._ids[self._window : self._read])
            now = self._decode(self._ids[self._window :])
            if len(now) > len(before) and not now.endswith(REPLACEMENT):
                self._end += len(now) - len(before)
                self._marks.append((self._end, all(self._origins[self._read :])))
                self._window, self._read = self._read, len(self._ids)
        pieces = []
        while self._marks and self._shown < len(text):
            end, origin = self._marks[0]
            if end > len(text) and not done:
                break
            if text[self._shown : end]:
                pieces.append((text[self._shown : end], origin))
            self._shown = min(end, len(text))
            del self._marks[0]
        if done and self._shown < len(text):
            pieces.append((text[self._shown :], bool(self._origins) and all(self._origins[self._read :])))
            self._shown = len(text)
        return pieces


class TextPrinter:
    """Text as it comes. One prompt streams; of several, each is printed as a block when it has finished."""

    def __init__(self, out: TextIO, total: int, show_drafts: bool = False, quiet: bool = False):
        self.out, self.total, self.show_drafts, self.quiet = out, total, show_drafts, quiet
        self._decode: Callable[[Sequence[int]], str] = lambda ids: ""
        self._pieces: dict[tuple[int, int], Pieces] = {}
        self._written = 0
        self._open_line = False
        self._console: Any = None

    def start(self, tokenizer: Any) -> None:
        if self.show_drafts:
            from rich.console import Console

            self._decode = lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)
            self._console = Console(file=self.out, highlight=False, soft_wrap=True)

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()
        if text:
            self._open_line = not text.endswith("\n")

    def _paint(self, pieces: list[tuple[str, bool]]) -> None:
        from rich.text import Text

        for text, accepted in pieces:
            if not accepted:
                self._console.out(text, end="", highlight=False)
            elif self._console.color_system is None:
                self._console.out(f"[{text}]", end="", highlight=False)
            else:
                self._console.print(Text(text, style="green"), end="")
            self._open_line = not text.endswith("\n")
        self.out.flush()

    def _show(self, index: int, output: Any, number: int, streaming: bool) -> None:
        one = output.outputs[number]
        if self.show_drafts:
            pieces = self._pieces.setdefault((index, number), Pieces(self._decode))
            self._paint(pieces.feed(one.text, one.token_ids, origins_of(one), output.finished))
        elif streaming:
            self._write(one.text[self._written :])
            self._written = max(self._written, len(one.text))
        else:
            self._write(one.text)

    def update(self, index: int, prompt: Prompt, output: Any) -> None:
        streaming = self.total == 1 and len(output.outputs) == 1
        if not output.finished and not streaming:
            return
        if output.finished and complain(index, output):
            return
        for number in range(len(output.outputs)):
            if not streaming:
                sample = f", sample {number + 1}" if len(output.outputs) > 1 else ""
                self._write(f"--- prompt {index + 1} of {self.total}{sample}: {str(prompt.content)[:60]!r}\n")
            self._show(index, output, number, streaming)
            if output.finished and self._open_line:
                self._write("\n")
        if output.finished and not self.quiet:
            note(f"[{summary(output)}]")

    def close(self) -> None:
        if self._open_line:
            self._write("\n")
        if self.show_drafts:
            plain = self._console is None or self._console.color_system is None
            mark = "[in brackets]" if plain else "green"
            note(f"[{mark}: drafted and accepted; the rest: the model's own tokens]")


def origins_of(completion: Any) -> list[bool]:
    """For each token, whether it came as a draft that was accepted."""
    found = getattr(completion, "from_draft", None)
    return list(found) if found is not None else [False] * len(completion.token_ids)


class JsonPrinter:
    """One JSON object a request, in the order of the prompts: a result waits until those before it are there."""

    def __init__(self, out: TextIO):
        self.out = out
        self._waiting: dict[int, str] = {}
        self._next = 0
        self._ascii = "utf" not in (getattr(out, "encoding", None) or "utf-8").lower()

    def start(self, tokenizer: Any) -> None:
        """Needs nothing of it."""

    def record(self, prompt: Prompt, output: Any) -> dict[str, Any]:
        first = output.outputs[0]
        record: dict[str, Any] = {
            "prompt": prompt.content,
            "text": first.text,
            "token_ids": [int(i) for i in first.token_ids],
            "finish_reason": first.finish_reason,
            "metrics": metrics_of(output),
        }
        if len(output.outputs) > 1:
            record["outputs"] = [
                {"text": one.text, "token_ids": [int(i) for i in one.token_ids], "finish_reason": one.finish_reason}
                for one in output.outputs
            ]
        if getattr(output, "error", None):
            record["error"] = output.error
        return record

    def update(self, index: int, prompt: Prompt, output: Any) -> None:
        if not output.finished:
            return
        complain(index, output)
        self._waiting[index] = json.dumps(self.record(prompt, output), ensure_ascii=self._ascii)
        while self._next in self._waiting:
            self.out.write(self._waiting.pop(self._next) + "\n")
            self.out.flush()
            self._next += 1

    def close(self) -> None:
        for index in sorted(self._waiting):  # a run that broke off: what has finished is not lost
            self.out.write(self._waiting[index] + "\n")
        self._waiting.clear()
        self.out.flush()
