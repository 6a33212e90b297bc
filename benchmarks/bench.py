"""What all measurements share: the model, the prompts, the engines, and how much is done."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

from benchmarks import prompts as prompt_files
from benchmarks.prompts import Prompt, chat_ids
from ms_spec import LLM, SamplingParams

MAX_LEN = 2048
NEW_TOKENS = 128


def ngram(drafts: int) -> dict[str, Any]:
    """The speculative_config of all benchmarks, by K."""
    return {
        "method": "ngram",
        "num_speculative_tokens": drafts,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }


Speculation = Union[int, Mapping[str, Any]]
"""K of n-gram drafts (0: plain decoding), or a whole speculative_config."""


def silent(text: str) -> None:
    """Nothing is shown."""


@dataclass
class Bench:
    """quick: only a trial of the benchmarks themselves; its figures mean nothing. say: shows how far it is."""

    model: str
    prompts: Sequence[Prompt]
    quick: bool = False
    say: Callable[[str], None] = silent
    _engines: dict[str, LLM] = field(default_factory=dict)

    @functools.cached_property
    def loaded(self) -> Any:
        """The model on disk, see ``ms_spec.models.loading``."""
        from ms_spec.models.loading import load

        return load(self.model)

    @property
    def max_len(self) -> int:
        """max_model_len of every engine here."""
        return int(min(MAX_LEN, self.loaded.config.max_position_embeddings))

    @property
    def new_tokens(self) -> int:
        """Most tokens of an answer."""
        return 12 if self.quick else NEW_TOKENS

    def times(self, count: int) -> int:
        """How often something is done: ``count``, hardly ever when quick."""
        return min(count, 2) if self.quick else count

    def rounds(self, count: int) -> int:
        """How often the same is done: ``count``, once when quick."""
        return 1 if self.quick else count

    def engine_args(self, drafts: Speculation = 0, seqs: int = 1) -> dict[str, Any]:
        """All that engines differ in, or that is not a default."""
        args: dict[str, Any] = {"model": self.model, "max_num_seqs": seqs, "max_model_len": self.max_len}
        if drafts:
            args["speculative_config"] = ngram(drafts) if isinstance(drafts, int) else dict(drafts)
        return args

    def engine(self, drafts: Speculation = 0, seqs: int = 1) -> LLM:
        """An engine for ``seqs`` requests, made once and warmed up."""
        key = json.dumps([drafts, seqs], sort_keys=True)
        if key not in self._engines:
            self._engines[key] = self.new_engine(drafts, seqs)
        return self._engines[key]

    def new_engine(self, drafts: Speculation = 0, seqs: int = 1, **other: Any) -> LLM:
        """The same, of the caller's own. ``other``: engine arguments in place of the usual ones."""
        args = {**self.engine_args(drafts, seqs), **other}
        method = args.get("speculative_config", {"method": "plain"})["method"]
        self.say(f"starting an engine: {method}, max_num_seqs = {seqs}")
        llm = LLM(**args)
        llm.generate([[1] * 8] * seqs, greedy(4), use_tqdm=False)
        return llm

    def close(self) -> None:
        """Lets all engines go."""
        for llm in self._engines.values():
            llm.close()
        self._engines.clear()

    def chat(self, text: str, room: int | None = None) -> list[int]:
        """A message as ids, cut so that ``room`` new tokens fit behind it."""
        room = self.new_tokens if room is None else room
        return chat_ids(self.loaded.tokenizer, text, self.max_len - room)

    def text_ids(self, count: int) -> list[int]:
        """Ids of running text, as many as wanted: the prompts of our own, over and over."""
        text = "\n\n".join(prompt.text for prompt in prompt_files.read(prompt_files.OWN))
        ids = list(self.loaded.tokenizer.encode(text, add_special_tokens=False))
        return (ids * (1 + count // len(ids)))[:count]


def greedy(tokens: int, stops: bool = False) -> SamplingParams:
    """Greedy decoding of ``tokens`` tokens; ``stops``: or up to the end of the text."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=not stops)


@dataclass
class Answer:
    """ids; tokens that decode steps emitted (all but the first) and the seconds that they took; tokens per step;
    drafts that were verified, and those of them that were right."""

    ids: list[int]
    tokens: int
    seconds: float
    tokens_per_step: float
    drafted: int
    accepted: int


def answer(llm: LLM, ids: Sequence[int], tokens: int, stops: bool = True) -> Answer:
    """One greedy answer, timed from outside: from the first token's arrival to the last one's."""
    times: list[tuple[float, int]] = []
    output: Any = None
    for _, output in llm.stream({"prompt_token_ids": list(ids)}, greedy(tokens, stops)):
        times.append((time.perf_counter(), len(output.outputs[0].token_ids)))
    (start, first), (end, last) = times[0], times[-1]
    metrics = output.metrics
    got = list(output.outputs[0].token_ids)
    drafted, accepted = metrics.num_draft_tokens, metrics.num_accepted_tokens
    return Answer(got, last - first, end - start, metrics.mean_acceptance_length, drafted, accepted)


ROOT = Path(__file__).resolve().parent.parent
"""Where ``python -m benchmarks`` works."""
