"""Prompts as people keep them: on the command line, in a text file, in JSON lines."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

from ms_spec.models.text import check_unicode

Content = Union[str, "list[int]"]


@dataclass
class Prompt:
    """One request: a text or token ids, and what it samples differently from the rest of the job."""

    content: Content
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def is_text(self) -> bool:
        return isinstance(self.content, str)


def _read_text(source: str | Path) -> str:
    """The text of a file, or of standard input for ``-``.

    Raises:
        ValueError: it is not there, or it is not text.
    """
    path = Path(source)
    if str(source) == "-" and sys.stdin is None:
        raise ValueError("prompts: standard input is closed")
    try:
        data = sys.stdin.buffer.read() if str(source) == "-" else path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"prompts: no such file: {source}") from None
    except OSError as error:
        raise ValueError(f"prompts: cannot read {source}: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"prompts: {source} is not UTF-8 text") from None
    if "\0" in text:
        raise ValueError(f"prompts: {source} is a binary file, expected text lines or JSON lines")
    return text


def from_record(record: Any, where: str) -> Prompt:
    """One request out of a JSON or YAML value.

    A string or a list of token ids is the prompt itself. An object has it under ``prompt``, ``text``,
    ``prompt_token_ids`` or ``turns`` (Spec-Bench: the first turn) and may have ``sampling_params``. Other columns of a
    data set are left alone.

    Raises:
        ValueError: there is no prompt in it, or it has the wrong type. ``where`` names the place.
    """
    sampling: Any = {}
    if isinstance(record, dict):
        names = [name for name in ("prompt", "text", "prompt_token_ids", "turns") if name in record]
        if not names:
            raise ValueError(f"{where}: no prompt; expected one of prompt, text, prompt_token_ids, turns")
        content = record[names[0]]
        if names[0] == "turns":
            if not isinstance(content, list) or not content:
                raise ValueError(f"{where}: turns must be a list with at least one text, got {content!r:.60}")
            content = content[0]
        sampling = record.get("sampling_params") or {}
        if not isinstance(sampling, dict):
            raise ValueError(f"{where}: sampling_params must be an object, got {type(sampling).__name__}")
    else:
        content = record
    ids = isinstance(content, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in content)
    if not isinstance(content, str) and not ids:
        raise ValueError(f"{where}: a prompt must be a text or a list of token ids, got {content!r:.60}")
    if isinstance(content, str):
        check_unicode(content, f"{where}: the prompt")
    return Prompt(content, sampling)


def from_option(text: str) -> Prompt:
    """The prompt of ``--prompt``; ``-`` is standard input. ValueError for bytes that are no UTF-8."""
    if text == "-":
        return read_stdin_prompt()
    check_unicode(text, "--prompt")
    return Prompt(text)


def read_prompts(source: str | Path) -> list[Prompt]:
    """Reads a file of prompts: JSON lines if it is named so or starts with a JSON object, else one prompt a line.

    Raises:
        ValueError: the file is missing, empty, binary, or a line of it is wrong. One line, which says where.
    """
    lines = [(number, line) for number, line in enumerate(_read_text(source).split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"prompts: {source} is empty")
    if not str(source).endswith((".jsonl", ".ndjson")) and not lines[0][1].lstrip().startswith('{"'):
        return [Prompt(line.rstrip("\r")) for _, line in lines]
    prompts = []
    for number, line in lines:
        where = f"prompts: {source}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None
        prompts.append(from_record(record, where))
    return prompts


def read_stdin_prompt() -> Prompt:
    """All of standard input as one prompt, without the line end that ``echo`` puts there."""
    text = _read_text("-")
    return Prompt(text[:-1] if text.endswith("\n") else text)
