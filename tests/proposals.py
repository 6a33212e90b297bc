"""Engines of every drafting method on tiny models, and what their graphs proposed step by step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ms_spec import LLM
from ms_spec.sampling_params import SamplingParams


def engine(model: Path, method: str | None = None, draft: Path | None = None, k: int = 4, **more: Any) -> LLM:
    """All drafts are verified, however bad they are. ``more``: engine arguments, or fields of speculative_config."""
    if method is not None:
        spec = {"method": method, "num_speculative_tokens": k, **more.pop("speculative", {})}
        if draft is not None:
            spec["model"] = str(draft)
        more["speculative_config"] = spec
    arguments = {"max_num_seqs": 3, "max_model_len": 128, "dtype": "float32", "generation_config": "vllm", **more}
    made = LLM(str(model), **arguments)
    made._engine.scheduler._adaptive = False
    return made


def prompts(count: int = 3, vocab: int = 128, seed: int = 0) -> list[list[int]]:
    """Random ids of different lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab, size).tolist() for size in (5, 33, 17, 2, 60, 1)[:count]]


@dataclass
class Proposal:
    """ids: committed when it was made; drafts: what was proposed; limit: the most that was asked for."""

    ids: list[int]
    drafts: list[int]
    limit: int


@contextmanager
def watched(llm: LLM) -> Any:
    """Collects every proposal that the runner makes, into the list that it gives."""
    runner, seen = llm._engine._runner, []
    history: dict[int, list[int]] = {}
    prefill, decode = runner.prefill, runner.decode

    def note(work: Any, result: Any) -> None:
        history[work.slot] = history[work.slot] + result.tokens
        if result.tokens[-1] >= 0:
            seen.append(Proposal(list(history[work.slot]), list(result.drafts), work.draft_limit))

    def watched_prefill(work: Any, last: bool) -> Any:
        result = prefill(work, last)
        history[work.slot] = history.get(work.slot, [])[: work.start] + list(work.tokens)
        if last:
            note(work, result)
        return result

    def watched_decode(works: Sequence[Any]) -> Any:
        results = decode(works)
        for work, result in zip(works, results):
            history[work.slot] = [*history[work.slot][: work.start], work.tokens[0]]
            note(work, result)
        return results

    runner.prefill, runner.decode = watched_prefill, watched_decode
    try:
        yield seen
    finally:
        runner.prefill, runner.decode = prefill, decode


@contextmanager
def distributions(llm: LLM) -> Any:
    """Collects what each decode step keeps of the first request's drafts, float32 [K, V], in the list that it gives."""
    runner, kept = llm._engine._runner, []
    decode = runner.decode

    def noted(works: Sequence[Any]) -> Any:
        results = decode(works)
        kept.append(runner._proposer.probs.asnumpy()[works[0].slot].copy())
        return results

    runner.decode = noted
    try:
        yield kept
    finally:
        runner.decode = decode


def check(seen: Sequence[Proposal], reference: Any, least: int = 32) -> None:
    """Every proposal is the reference's (see ``drafts_oracle``), and there are at least ``least`` that can differ."""
    compared = 0
    for one in seen:
        if one.limit:
            assert len(one.drafts) == one.limit, one
            compared += reference.after(one.ids, one.limit).compare(one.drafts) > 0
    assert compared >= least, f"{compared} of {len(seen)} proposals could be compared"


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def ids_of(llm: LLM, asked: Sequence[Sequence[int]], params: Any) -> list[list[int]]:
    """Ids of the answers; none failed, and all blocks are free again."""
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in asked], params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert llm._engine.num_free_blocks == llm.limits.num_blocks - 1
    return [sample.token_ids for output in outputs for sample in output.outputs]


def check_text(
    llm: LLM, asked: Sequence[Sequence[int]], tokens: int, reference: Any, plain: Any, alone: bool = True
) -> None:
    """All that is proposed is the reference's, some of it right and some wrong, and the text is plain decoding's.

    plain: gives the ids of plain decoding's answers. alone: the prompts are also asked one by one.
    """
    before = llm.metrics()
    with watched(llm) as seen:
        together = ids_of(llm, asked, greedy(tokens))
        if alone:
            assert [ids_of(llm, [ids], greedy(tokens))[0] for ids in asked] == together
    after = llm.metrics()
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    assert 0 < accepted < after.num_draft_tokens - before.num_draft_tokens
    check(seen, reference)
    assert together == plain()
