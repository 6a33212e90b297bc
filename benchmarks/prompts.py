"""Prompts in the format of Spec-Bench: JSON lines with question_id, category and turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWN = Path(__file__).parent / "prompts.jsonl"
"""Two short prompts for each of the categories."""
REPEAT = Path(__file__).parent / "repeat.jsonl"
"""Texts to be repeated word for word."""
CATEGORIES = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
    "translation",
    "summarization",
    "qa",
    "math_reasoning",
    "rag",
)
NOTHING_REPEATS = ("writing", "roleplay")


@dataclass(frozen=True)
class Prompt:
    """One question. Only the first turn of a conversation is asked."""

    question_id: int
    category: str
    turns: tuple[str, ...]

    @property
    def text(self) -> str:
        return self.turns[0]


def read(path: Path) -> list[Prompt]:
    """All prompts of a file. ValueError (one line) names the first line that is wrong."""
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
            prompt = Prompt(int(one["question_id"]), str(one["category"]), tuple(map(str, one["turns"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: expected an object with question_id, category, turns ({error})"
            ) from None
        if not prompt.turns or not prompt.text.strip():
            raise ValueError(f"{path}, line {number}: turns has no text")
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path}: no prompts")
    return prompts


def first_of(prompts: Sequence[Prompt], category: str, count: int) -> list[Prompt]:
    """The first ``count`` prompts of a category."""
    return [prompt for prompt in prompts if prompt.category == category][:count]


def chat_ids(tokenizer: Any, text: str, limit: int) -> list[int]:
    """A user's message as token ids with the chat template around it (the bare text where the model has none).

    Of a text that is too long the end is left out, so that all of it, template included, is at most ``limit`` ids.
    """

    def encoded(message: str) -> list[int]:
        try:
            rendered = tokenizer.render_chat([{"role": "user", "content": message}], add_generation_prompt=True)
        except ValueError:
            return list(tokenizer.encode(message))
        return list(tokenizer.encode(rendered, add_special_tokens=False))

    ids = encoded(text)
    while len(ids) > limit:
        if len(text) < 2:
            raise ValueError(f"the chat template alone takes {len(ids)} ids, more than {limit}")
        text = text[: min(len(text) - 1, int(len(text) * limit / len(ids)))]
        ids = encoded(text)
    return ids
