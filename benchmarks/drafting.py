"""The decode phase with n-gram drafts (K = 4) against plain decoding, prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean

from benchmarks import prompts as files
from benchmarks.bench import Bench
from benchmarks.figures import Figure
from benchmarks.prompts import CATEGORIES, NOTHING_REPEATS, Prompt, first_of
from benchmarks.sides import Sides, differences

DRAFTS = 4
PER_CATEGORY = 4
SUMMARIES = 10
"""Prompts of the summarization row."""
UNREPEATED = 6
"""Prompts of writing, and of roleplay, in the row where nothing repeats."""


def drafting(bench: Bench) -> Iterator[Figure]:
    """All rows of ngram against plain."""
    sides = Sides(bench, {"plain": bench.engine(), "ngram": bench.engine(DRAFTS)})
    twice = bench.rounds(2)
    config = sides.config(DRAFTS)

    def figure(name: str, prompts: Sequence[Prompt]) -> Figure:
        return Figure(name, sides.speedup(prompts, "ngram"), sides.details(prompts, "ngram"), config)

    repeat = files.read(files.REPEAT)[: bench.times(6)]
    sides.ask(repeat, twice, "repeat this text")
    yield figure("ngram_repeat", repeat)

    summaries = first_of(bench.prompts, "summarization", bench.times(SUMMARIES))
    if summaries:
        sides.ask(summaries, twice, "summarization")
        yield figure("ngram_summarization", summaries)

    unrepeated = nothing_repeats(bench)
    if unrepeated:
        sides.ask(unrepeated, twice, "nothing repeats")
        yield figure("ngram_nothing_repeats", unrepeated)

    groups = {
        name: first_of(bench.prompts, name, 1 if bench.quick else PER_CATEGORY) for name in _categories(bench.prompts)
    }
    for name, prompts in groups.items():
        sides.ask(prompts, 1, name)
    speedups = {name: sides.speedup(prompts, "ngram") for name, prompts in groups.items()}
    details = {
        "speedup": {name: round(value, 3) for name, value in speedups.items()},
        "categories": {name: sides.details(prompts, "ngram") for name, prompts in groups.items()},
    }
    yield Figure("ngram_categories", mean(speedups.values()), details, config)
    yield Figure("ngram_differences", differences([sides]), {"prompts": len(sides.seen)}, config)


def nothing_repeats(bench: Bench) -> list[Prompt]:
    """The prompts of that row."""
    return [p for name in NOTHING_REPEATS for p in first_of(bench.prompts, name, bench.times(UNREPEATED))]


def _categories(prompts: Sequence[Prompt]) -> list[str]:
    """Spec-Bench's in their order, then whatever else the file has."""
    present = {prompt.category for prompt in prompts}
    return [name for name in CATEGORIES if name in present] + sorted(present - set(CATEGORIES))
