"""The decode phase with suffix decoding against n-gram drafts (K = 4) and plain decoding, prompt by prompt.

Whatever was answered stays in the common tree, so the order matters: an engine that has answered nothing gets one
prompt after the other, then all of them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.bench import Bench
from benchmarks.drafting import DRAFTS, nothing_repeats
from benchmarks.figures import Figure
from benchmarks.prompts import first_of
from benchmarks.sides import Sides, differences
from ms_spec.proposers.registry import build_host_proposer

SUFFIX = {"method": "suffix"}
CATEGORIES = ("summarization", "rag")
PER_CATEGORY = 20
TOKENS = 64


def suffix(bench: Bench) -> Iterator[Figure]:
    """All rows of suffix."""
    plain, llm = bench.engine(), bench.engine(SUFFIX)
    asked = [p for name in CATEGORIES for p in first_of(bench.prompts, name, bench.times(PER_CATEGORY))]
    first = Sides(bench, {"plain": plain, "ngram": bench.engine(DRAFTS), "suffix": llm}, TOKENS)
    config = first.config(SUFFIX)
    again = Sides(bench, {"plain": plain, "suffix": llm}, TOKENS)
    if asked:
        forget(llm)
        first.ask(asked, 1, "suffix")
        to_plain = {name: round(first.speedup(asked, name), 3) for name in ("ngram", "suffix")}
        details = {**first.details(asked, "suffix", "ngram"), "to_plain": to_plain}
        yield Figure("suffix_ngram", first.speedup(asked, "suffix", "ngram"), details, config)
        again.ask(asked, 1, "suffix, once more")
        yield Figure("suffix_again", again.speedup(asked, "suffix"), again.details(asked, "suffix"), config)

    new = Sides(bench, {"plain": plain, "suffix": llm}, TOKENS)
    unrepeated = nothing_repeats(bench)
    if unrepeated:
        for turn in range(bench.rounds(2)):
            forget(llm)
            remember(llm, first)
            new.ask(unrepeated, turn + 1, "suffix, nothing repeats")
        details = new.details(unrepeated, "suffix")
        yield Figure("suffix_nothing_repeats", new.speedup(unrepeated, "suffix"), details, config)
    wrong = differences([first, again, new])
    yield Figure("suffix_differences", wrong, {"prompts": len({**first.seen, **new.seen})}, config)


def forget(llm: Any) -> None:
    """An engine whose drafter has seen nothing yet."""
    llm._engine._drafter = build_host_proposer(llm.config.speculative_config, llm.limits.max_model_len)


def remember(llm: Any, sides: Sides) -> None:
    """Its common tree then holds what these sides have answered, in the same order."""
    drafter = llm._engine._drafter
    for number, (prompt, answers) in enumerate(sides.seen.items()):
        key = ("remembered", number)
        drafter.start(key, sides.ids(prompt))
        drafter.extend(key, answers["suffix"][0].ids)
        drafter.stop(key)
