"""How results are shown: streamed text, text coloured by origin, JSON lines.

Results go to ``out``, all else to stderr.
"""

from __future__ import annotations

import json
import math
import sys
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Callable, Generic, TextIO, TypeVar

from ms_spec.prompts import Prompt

T = TypeVar("T")

METRICS = (
    "num_steps",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "mean_acceptance_length",
    "acceptance_per_position",
    "tokens_per_second",
    "time_to_first_token_s",
    "draft_seconds",
    "verify_seconds",
)
"""What is told of a request, in this order, as far as it is known."""


def note(text: str) -> None:
    """A line for the person in front of the terminal; never part of the result. Lost if nobody can see it."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def metrics_of(output: Any) -> dict[str, Any]:
    """A request's figures, ready for JSON. A number that is not finite becomes null: JSON has no name for it."""
    figures = output.metrics.as_dict()
    for name, value in figures.items():
        if isinstance(value, float) and not math.isfinite(value):
            figures[name] = None
    return {name: figures[name] for name in METRICS if name in figures}


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


def complain(index: int, output: Any) -> None:
    """Tells why a request failed, if it did."""
    if output.error is not None:
        note(f"ms-spec: error: prompt {index + 1}: {output.error}")


class Pieces:
    """Cuts a growing text into pieces by the tokens that they came from.

    The text is the engine's (cut at stop strings); decoding serves only to find where tokens end in it. A character
    whose bytes lie in several tokens belongs to the last of them.

    push: an incremental decoder's, from token ids to the text that they settle.
    """

    def __init__(self, push: Callable[[list[int]], str]):
        self._push = push
        self._seen = 0  # tokens
        self._end = 0  # where they end in the text
        self._marks: deque[tuple[int, bool]] = deque()  # (end in the text, accepted) of what has not been given out
        self._given = 0

    def feed(self, text: str, ids: list[int], accepted: list[bool], done: bool) -> list[tuple[str, bool]]:
        """Takes all of a text and its tokens so far. Returns the pieces that are new: (text, accepted)."""
        for token, flag in zip(ids[self._seen :], accepted[self._seen :]):
            self._end += len(self._push([token]))
            self._marks.append((self._end, flag))
        self._seen = len(ids)
        pieces = []
        while self._marks and self._given < len(text):
            end, flag = self._marks[0]
            if end > len(text) and not done:
                break  # held back by the engine: it may become a stop string
            if end > self._given:
                pieces.append((text[self._given : end], flag))
                self._given = min(end, len(text))
            self._marks.popleft()
        if done and self._given < len(text):  # bytes that never became a character
            pieces.append((text[self._given :], bool(accepted) and accepted[-1]))
            self._given = len(text)
        return pieces


class Painter:
    """Writes pieces of text, accepted drafts green. Where there is no colour they stand in brackets."""

    def __init__(self, out: TextIO, tokenizer: Any):
        from rich.console import Console

        self._console = Console(file=out, highlight=False, soft_wrap=True)
        self._colour = self._console.color_system is not None
        self._tokenizer = tokenizer
        self._cutters: dict[tuple[int, int], Pieces] = {}

    def write(self, index: int, one: Any) -> None:
        """What is new of sample ``one`` of request ``index``."""
        from rich.style import Style

        pieces = self._cutters.get((index, one.index))
        if pieces is None:
            pieces = self._cutters[index, one.index] = Pieces(self._tokenizer.stream_decoder().push)
        for text, accepted in pieces.feed(one.text, one.token_ids, one.from_draft, one.finished()):
            if self._colour:
                self._console.out(text, end="", style=Style(color="green") if accepted else None, highlight=False)
            else:
                self._console.out(f"[{text}]" if accepted else text, end="", highlight=False)

    @property
    def legend(self) -> str:
        mark = "green" if self._colour else "in brackets"
        return f"[{mark}: drafted and accepted; the rest: the model's own tokens]"


class InOrder(Generic[T]):
    """Shows what comes in any order in the order of its index: each waits until those before it are there."""

    def __init__(self, show: Callable[[T], None]):
        self._show = show
        self._waiting: dict[int, T] = {}
        self._next = 0

    def put(self, index: int, item: T) -> None:
        self._waiting[index] = item
        while self._next in self._waiting:
            self._next += 1
            self._show(self._waiting.pop(self._next - 1))

    def close(self) -> None:
        """Shows the rest: of a run that broke off, nothing that has finished is lost."""
        for index in sorted(self._waiting):
            self._show(self._waiting.pop(index))


class TextPrinter:
    """Text as it comes: a single answer streams; several are printed as blocks, in the order of the prompts."""

    def __init__(self, out: TextIO, total: int, streams: bool, show_drafts: bool = False):
        self._out, self._total, self._streams, self._show_drafts = out, total, streams, show_drafts
        self._painter: Painter | None = None
        self._written = ""
        self._finished = InOrder(self._block)

    def start(self, tokenizer: Any) -> None:
        if self._show_drafts:
            self._painter = Painter(self._out, tokenizer)

    def _show(self, index: int, one: Any) -> None:
        if self._painter:
            self._painter.write(index, one)
        else:
            self._out.write(one.text[len(self._written) :])
        self._out.flush()
        self._written = one.text

    def _end_line(self) -> None:
        if self._written and not self._written.endswith("\n"):
            self._out.write("\n")
            self._out.flush()
        self._written = ""

    def update(self, index: int, prompt: Prompt, output: Any) -> None:
        if self._streams:
            self._show(index, output.outputs[0])
        if not output.finished:
            return
        self._end_line()
        complain(index, output)
        self._finished.put(index, (index, prompt, output))

    def _block(self, item: tuple[int, Prompt, Any]) -> None:
        index, prompt, output = item
        if output.error is not None:
            return
        if not self._streams:
            for number, one in enumerate(output.outputs, 1):
                sample = f", sample {number}" if len(output.outputs) > 1 else ""
                self._out.write(f"--- prompt {index + 1} of {self._total}{sample}: {str(prompt.content)[:60]!r}\n")
                self._show(index, one)
                self._end_line()
        note(f"[{summary(output)}]")

    def close(self) -> None:
        self._end_line()
        self._finished.close()
        if self._painter:
            note(self._painter.legend)


def _finite(value: float) -> float | None:
    """A number as JSON has it: null where it is not finite."""
    return value if math.isfinite(value) else None


def _places(logprobs: Iterable[Any]) -> list[Any]:
    """Log-probabilities, place by place, with the ids as keys."""
    return [
        entry
        and {
            str(token): {"logprob": _finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
            for token, one in entry.items()
        }
        for entry in logprobs
    ]


def _sample(one: Any) -> dict[str, Any]:
    """One sample, ready for JSON."""
    ids = [int(i) for i in one.token_ids]
    sample: dict[str, Any] = {"text": one.text, "token_ids": ids, "finish_reason": one.finish_reason}
    if one.logprobs is not None:
        sample["cumulative_logprob"] = _finite(one.cumulative_logprob)
        sample["logprobs"] = _places(one.logprobs)
    return sample


class JsonPrinter:
    """One JSON object a request, in the order of the prompts."""

    def __init__(self, out: TextIO):
        self.out = out
        self._finished = InOrder(self._line)
        self._ascii = "utf" not in (getattr(out, "encoding", None) or "utf-8").lower()

    def record(self, prompt: Prompt, output: Any) -> dict[str, Any]:
        """What is told of a request. With several samples, all of them are under ``outputs``."""
        samples = [_sample(one) for one in output.outputs]
        record: dict[str, Any] = {"prompt": prompt.content, **samples[0], "metrics": metrics_of(output)}
        if len(samples) > 1:
            record["outputs"] = samples
        if output.prompt_logprobs is not None:
            record["prompt_logprobs"] = _places(output.prompt_logprobs)
        if output.error is not None:
            record["error"] = output.error
        if output.kv_transfer_params is not None:
            record["kv_transfer_params"] = output.kv_transfer_params
        return record

    def start(self, tokenizer: Any) -> None:
        """Needs none."""

    def update(self, index: int, prompt: Prompt, output: Any) -> None:
        if not output.finished:
            return
        complain(index, output)
        record = self.record(prompt, output)
        # Half a character, in a prompt that was refused for it, can only be written as an escape.
        halves = any("\ud800" <= letter <= "\udfff" for letter in str(prompt.content))
        self._finished.put(index, json.dumps(record, ensure_ascii=self._ascii or halves))

    def _line(self, text: str) -> None:
        self.out.write(text + "\n")
        self.out.flush()

    def close(self) -> None:
        self._finished.close()
