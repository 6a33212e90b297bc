"""Answers of several engines to the same prompts, in turn, and what follows from their decode phases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

from benchmarks.bench import Answer, Bench, answer
from benchmarks.prompts import Prompt
from ms_spec import LLM


class Sides:
    """Engines by name, one of them "plain". Answers to a prompt are kept and used for every row that it is in.

    tokens: most tokens of an answer; None: as many as is usual here.
    """

    def __init__(self, bench: Bench, sides: Mapping[str, LLM], tokens: int | None = None) -> None:
        self.bench, self.sides = bench, dict(sides)
        self.tokens = min(tokens or bench.new_tokens, bench.new_tokens)
        self.seen: dict[Prompt, dict[str, list[Answer]]] = {}

    def config(self, drafts: Any) -> dict[str, Any]:
        """How they were asked, for the record. ``drafts``: see :meth:`benchmarks.bench.Bench.engine_args`."""
        return {
            "new_tokens": self.tokens,
            "chat_template": True,
            "stops_at_eos": True,
            **self.bench.engine_args(drafts),
        }

    def ids(self, prompt: Prompt) -> list[int]:
        """The prompt as all sides get it."""
        return self.bench.chat(prompt.text, self.tokens)

    def ask(self, prompts: Sequence[Prompt], rounds: int, why: str) -> None:
        """Makes up for what is missing of ``rounds`` rounds. The order of the sides alternates."""
        for number, prompt in enumerate(prompts, 1):
            self.bench.say(f"{why}: prompt {number} of {len(prompts)}")
            seen = self.seen.setdefault(prompt, {name: [] for name in self.sides})
            ids = self.ids(prompt)
            for turn in range(len(seen["plain"]), rounds):
                order: Iterable[str] = self.sides if (turn + number) % 2 == 0 else reversed(list(self.sides))
                for name in order:
                    seen[name].append(answer(self.sides[name], ids, self.tokens))

    def seconds(self, prompts: Sequence[Prompt], name: str) -> float:
        """Of all answers of a side; of each prompt the median of its rounds."""
        return sum(median(a.seconds for a in self.seen[p][name]) for p in prompts)

    def speedup(self, prompts: Sequence[Prompt], name: str, base: str = "plain") -> float:
        """Seconds of ``base`` / seconds of ``name``; 1 where there were no steps."""
        seconds = self.seconds(prompts, name)
        return self.seconds(prompts, base) / seconds if seconds else 1.0

    def details(self, prompts: Sequence[Prompt], name: str, base: str = "plain") -> dict[str, Any]:
        """Speeds, the rounds' own speed-ups, and how far the drafts of ``name`` were right."""
        one = [self.seen[p][name][0] for p in prompts]
        tokens = sum(self.seen[p]["plain"][0].tokens for p in prompts)
        each = []
        for turn in range(min(len(self.seen[p][name]) for p in prompts)):
            above, below = (sum(self.seen[p][side][turn].seconds for p in prompts) for side in (base, name))
            each.append(round(above / below, 4) if below else 1.0)
        seconds = {side: self.seconds(prompts, side) for side in self.sides}
        return {
            "prompts": len(prompts),
            "rounds": each,
            "decode_tokens": tokens,
            "tokens_per_second": {side: round(tokens / s, 2) if s else 0.0 for side, s in seconds.items()},
            "tokens_per_step": round(mean(a.tokens_per_step for a in one), 3),
            "drafted": sum(a.drafted for a in one),
            "accepted": sum(a.accepted for a in one),
            "identical": differences([self], prompts) == 0,
        }


def differences(several: Sequence[Sides], prompts: Iterable[Prompt] | None = None) -> int:
    """Prompts whose answers, of all sides and all rounds, are not all the same ids. None: all prompts."""
    first: dict[Prompt, list[int]] = {}
    wrong = set()
    for sides in several:
        for prompt in sides.seen if prompts is None else prompts:
            for one in (a for answers in sides.seen[prompt].values() for a in answers):
                if one.ids != first.setdefault(prompt, one.ids):
                    wrong.add(prompt)
    return len(wrong)
