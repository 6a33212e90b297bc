"""The decode phase with n-gram drafts (K = 4) against plain decoding, prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import mean, median
from typing import Any

from benchmarks import prompts as files
from benchmarks.bench import Answer, Bench, answer
from benchmarks.figures import Figure
from benchmarks.prompts import CATEGORIES, NOTHING_REPEATS, Prompt, first_of

DRAFTS = 4
PER_CATEGORY = 4
SUMMARIES = 10
"""Prompts of the summarization row."""
UNREPEATED = 6
"""Prompts of writing, and of roleplay, in the row where nothing repeats."""


class Pairs:
    """Answers of both engines to prompts, alternately; those of a prompt are kept and used for every row it is in."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.sides = {"plain": bench.engine(), "ngram": bench.engine(drafts=DRAFTS)}
        self.seen: dict[Prompt, dict[str, list[Answer]]] = {}

    def ask(self, prompts: Sequence[Prompt], rounds: int, why: str) -> None:
        """Makes up for what is missing of ``rounds`` rounds. The order of the sides alternates."""
        rounds = 1 if self.bench.quick else rounds
        for number, prompt in enumerate(prompts, 1):
            self.bench.say(f"{why}: prompt {number} of {len(prompts)}")
            seen = self.seen.setdefault(prompt, {name: [] for name in self.sides})
            ids = self.bench.chat(prompt.text)
            for turn in range(len(seen["plain"]), rounds):
                order: Iterable[str] = self.sides if (turn + number) % 2 == 0 else reversed(list(self.sides))
                for name in order:
                    seen[name].append(answer(self.sides[name], ids, self.bench.new_tokens))

    def speedup(self, prompts: Sequence[Prompt]) -> float:
        """Seconds of all plain answers / of all ngram answers; of each the median of its rounds. 1 for no steps."""
        seconds = {name: sum(median(a.seconds for a in self.seen[p][name]) for p in prompts) for name in self.sides}
        return seconds["plain"] / seconds["ngram"] if seconds["ngram"] else 1.0

    def details(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Speeds, the rounds' own speed-ups, and how far the drafts were right."""
        one = {name: [self.seen[p][name][0] for p in prompts] for name in self.sides}
        tokens = sum(a.tokens for a in one["plain"])
        rounds = min(len(self.seen[p]["plain"]) for p in prompts)
        each = []
        speeds = {}
        for name in self.sides:
            seconds = sum(median(a.seconds for a in self.seen[p][name]) for p in prompts)
            speeds[name] = round(tokens / seconds, 2) if seconds else 0.0
        for turn in range(rounds):
            plain, ngram = (sum(self.seen[p][name][turn].seconds for p in prompts) for name in ("plain", "ngram"))
            each.append(round(plain / ngram, 4) if ngram else 1.0)
        return {
            "prompts": len(prompts),
            "rounds": each,
            "decode_tokens": tokens,
            "tokens_per_second": speeds,
            "tokens_per_step": round(mean(a.tokens_per_step for a in one["ngram"]), 3),
            "drafted": sum(a.drafted for a in one["ngram"]),
            "identical": self.differences(prompts) == 0,
        }

    def differences(self, prompts: Iterable[Prompt]) -> int:
        """Prompts whose answers are not all the same ids."""
        wrong = 0
        for prompt in prompts:
            answers = [a.ids for side in self.seen[prompt].values() for a in side]
            wrong += any(ids != answers[0] for ids in answers)
        return wrong


def drafting(bench: Bench) -> Iterator[Figure]:
    """All rows of ngram against plain."""
    pairs = Pairs(bench)
    config = {
        "new_tokens": bench.new_tokens,
        "chat_template": True,
        "stops_at_eos": True,
        **bench.engine_args(DRAFTS),
    }
    repeat = files.read(files.REPEAT)[: bench.times(6)]
    pairs.ask(repeat, 2, "repeat this text")
    yield Figure("ngram_repeat", pairs.speedup(repeat), pairs.details(repeat), config)

    summaries = first_of(bench.prompts, "summarization", bench.times(SUMMARIES))
    if summaries:
        pairs.ask(summaries, 2, "summarization")
        yield Figure("ngram_summarization", pairs.speedup(summaries), pairs.details(summaries), config)

    unrepeated = [p for name in NOTHING_REPEATS for p in first_of(bench.prompts, name, bench.times(UNREPEATED))]
    if unrepeated:
        pairs.ask(unrepeated, 2, "nothing repeats")
        yield Figure("ngram_nothing_repeats", pairs.speedup(unrepeated), pairs.details(unrepeated), config)

    groups = {
        name: first_of(bench.prompts, name, 1 if bench.quick else PER_CATEGORY) for name in _categories(bench.prompts)
    }
    for name, prompts in groups.items():
        pairs.ask(prompts, 1, name)
    speedups = {name: pairs.speedup(prompts) for name, prompts in groups.items()}
    details = {
        "speedup": {name: round(value, 3) for name, value in speedups.items()},
        "categories": {name: pairs.details(prompts) for name, prompts in groups.items()},
    }
    yield Figure("ngram_categories", mean(speedups.values()), details, config)
    yield Figure("ngram_differences", pairs.differences(pairs.seen), {"prompts": len(pairs.seen)}, config)


def _categories(prompts: Sequence[Prompt]) -> list[str]:
    """Spec-Bench's in their order, then whatever else the file has."""
    present = {prompt.category for prompt in prompts}
    return [name for name in CATEGORIES if name in present] + sorted(present - set(CATEGORIES))
