"""What drafting can gain at most: a drafter that is always right and costs next to nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import prompts as files
from benchmarks.bench import Bench, answer
from benchmarks.figures import Figure
from benchmarks.sides import Sides

DRAFTS = 4
PROMPTS = 8
HOST = {"method": "suffix", "num_speculative_tokens": DRAFTS}
"""Any method that drafts between the steps: another drafter takes its place."""


class Replay:
    """Drafts the answer that is known already. See :class:`ms_spec.proposers.base.HostProposer`."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], list[int]] = {}
        self._running: dict[Any, tuple[list[int], int]] = {}

    def learn(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """The answer to a prompt."""
        self._known[tuple(prompt_ids)] = list(token_ids)

    def start(self, key: Any, prompt_ids: Sequence[int]) -> None:
        """A prompt that was not learnt gets no drafts."""
        self._running[key] = (self._known.get(tuple(prompt_ids), []), 0)

    def extend(self, key: Any, token_ids: Sequence[int]) -> None:
        """Goes on as far in the answer."""
        known, at = self._running[key]
        self._running[key] = (known, at + len(token_ids))

    def draft(self, key: Any, limit: int) -> list[int]:
        """What comes next in it."""
        known, at = self._running[key]
        return known[at : at + limit]

    def stop(self, key: Any) -> None:
        """It has ended."""
        self._running.pop(key, None)


def oracle(bench: Bench) -> Iterator[Figure]:
    """Plain decoding and the same answers with K = 4 right drafts in every step, alternately.

    Raises:
        RuntimeError: a right draft was not accepted.
    """
    prompts = files.read(files.OWN)[: bench.times(PROMPTS)]
    plain, llm = bench.engine(), bench.engine(HOST)
    sides = Sides(bench, {"plain": plain, "oracle": llm})
    replay = Replay()
    for prompt in prompts:
        ids = sides.ids(prompt)
        replay.learn(ids, answer(plain, ids, sides.tokens).ids)
    engine: Any = llm._engine
    usual, engine._drafter = engine._drafter, replay
    try:
        sides.ask(prompts, bench.rounds(2), "always right")
    finally:
        engine._drafter = usual
    details = sides.details(prompts, "oracle")
    if details["accepted"] < details["drafted"]:
        raise RuntimeError(f"{details['drafted'] - details['accepted']} of {details['drafted']} right drafts rejected")
    yield Figure("oracle", sides.speedup(prompts, "oracle"), details, bench.engine_args(HOST))
