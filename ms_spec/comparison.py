"""Methods side by side: the same prompts in the same order, one engine after the other."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ms_spec import job as jobs
from ms_spec.check import preview
from ms_spec.compare_methods import PLAIN, Method
from ms_spec.config import EngineConfig
from ms_spec.errors import ConfigError, RequestError
from ms_spec.job import Job
from ms_spec.metrics import Metrics
from ms_spec.sampling_params import SamplingParams
from ms_spec.terminal import note

# Nobody's prompt, so that a method that remembers earlier answers learns nothing from it; full of drafts.
WARM_UP = "One, two, three, four. One, two, three, four. One, two,"
WARM_UP_PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@dataclass
class Answers:
    """What one method said. Prompts go by their number, from 0."""

    method: Method
    token_ids: dict[int, list[list[int]]] = field(default_factory=dict)
    """Of each sample of each prompt that was answered."""
    metrics: dict[int, Metrics] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    """Why the other prompts were refused."""


class Comparison:
    """All that is needed to run methods on the same prompts.

    methods: in the order in which they run.
    job: prompts, sampling and the engine's arguments without ``speculative_config``. Prompts run one at a time.

    Raises:
        ValueError: something in it cannot work. MindSpore is not imported for that.
    """

    def __init__(self, methods: Sequence[Method], job: Job) -> None:
        self.methods = list(methods)
        self.job = job
        self._told: set[tuple[int, str]] = set()
        job.batch = 1
        self._params = jobs.prepare(job)
        for method in methods:
            try:
                preview(EngineConfig.parse(**self._arguments(method)))
            except ValueError as error:
                raise _of_method(method, error) from None

    def _arguments(self, method: Method) -> dict[str, Any]:
        return {**self.job.engine, **({} if method.config is None else {"speculative_config": dict(method.config)})}

    def run(self) -> Iterator[Answers]:
        """Runs one method after the other; there is never more than one engine.

        Raises:
            ValueError: an engine refuses its model or its drafts, or not a single prompt can be answered.
            EngineError: a model failed.
        """
        for number, method in enumerate(self.methods, 1):
            note(f"[{method.name}: method {number} of {len(self.methods)}]")
            yield self._run(method)
            gc.collect()  # what is left of a model holds on to itself in circles

    def _run(self, method: Method) -> Answers:
        try:
            llm = jobs.make_llm(self._arguments(method))
        except ValueError as error:
            raise _of_method(method, error) from None
        try:
            return self._answer(method, llm)
        finally:
            llm.close()

    def _answer(self, method: Method, llm: Any) -> Answers:
        from tqdm import tqdm

        tokenizer, answers = llm.get_tokenizer(), Answers(method)
        for _ in jobs.stream_prompts(llm, [WARM_UP], [WARM_UP_PARAMS], alone=False):
            pass
        prompts = tqdm(self.job.prompts, desc=method.name, delay=2, disable=None, dynamic_ncols=True)
        for index, prompt in enumerate(prompts):
            content = jobs.encode_prompt(prompt, tokenizer, self.job.chat)
            *_, (_, output) = jobs.stream_prompts(llm, [content], [self._params[index]], alone=False)
            if output.error is not None:
                answers.errors[index] = output.error
                if (index, output.error) not in self._told:  # as a rule all methods refuse it
                    note(f"ms-spec: error: prompt {index + 1}: {output.error}")
                    self._told.add((index, output.error))
                continue
            answers.token_ids[index] = [list(one.token_ids) for one in output.outputs]
            answers.metrics[index] = output.metrics
        if not answers.metrics:
            raise RequestError(f"{method.name}: no prompt could be answered")
        return answers


def _of_method(method: Method, error: ValueError) -> ValueError:
    """The error under the method's name, if it is one line and not of plain decoding."""
    if method.config is None or "\n" in str(error).strip():
        return error
    return ConfigError(f"{method.name}: {error}")


@dataclass(frozen=True)
class Figures:
    """One method's line of the comparison. All figures are over the prompts that every method answered."""

    method: Method
    num_prompts: int
    num_refused: int
    num_tokens: int
    metrics: Metrics
    """All prompts' together. They ran one after the other, so that its seconds are seconds."""
    speedup: float | None
    """Over the baseline, of the decode phase; None where one of them decoded nothing."""
    num_identical: int | None
    """Prompts with the baseline's very tokens; None for the baseline."""

    @property
    def tokens_per_second(self) -> float | None:
        """Of the decode phase; None where all answers had one token only."""
        return self.metrics.tokens_per_second or None

    @property
    def acceptance_rate(self) -> float | None:
        """None where nothing was drafted."""
        return self.metrics.acceptance_rate if self.metrics.num_draft_tokens else None

    @property
    def identical(self) -> bool | None:
        """Whether all answers are the baseline's; None for the baseline."""
        return None if self.num_identical is None else self.num_identical == self.num_prompts


def baseline_of(methods: Sequence[Method]) -> Method:
    """What the others are measured against: plain decoding, or the first where that is left out."""
    return next((method for method in methods if method.name == PLAIN), methods[0])


def figures_of(runs: Sequence[Answers]) -> list[Figures]:
    """The comparison's figures, in the order of the runs; none if there is no prompt that all of them answered."""
    if not runs:
        return []
    base_method = baseline_of([run.method for run in runs])
    base = next(run for run in runs if run.method is base_method)
    common = [index for index in base.metrics if all(index in run.metrics for run in runs)]
    if not common:
        return []
    speed = _together(base, common).tokens_per_second
    made = []
    for run in runs:
        total = _together(run, common)
        same = sum(run.token_ids[index] == base.token_ids[index] for index in common)
        faster = total.tokens_per_second / speed if speed and total.tokens_per_second else None
        tokens = sum(len(ids) for index in common for ids in run.token_ids[index])
        made.append(
            Figures(run.method, len(common), len(run.errors), tokens, total, faster, None if run is base else same)
        )
    return made


def _together(run: Answers, indices: Sequence[int]) -> Metrics:
    total = Metrics()
    for index in indices:
        total.add(run.metrics[index])
    return total
