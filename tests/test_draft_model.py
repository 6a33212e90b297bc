"""A small model drafts for a large one: its drafts are its own greedy text, and never change the large one's."""

from __future__ import annotations

import functools

import pytest
import tiny_drafts as td
from drafts_oracle import DraftModel, Target
from proposals import check_text, engine, greedy, ids_of, prompts
from tiny import tiny_model

LOUD = (17, 40, 90)


@functools.cache
def target():
    return td.target(loud=LOUD, layers=2)


@functools.cache
def plain():
    return engine(target())


@functools.cache
def drafting():
    return engine(target(), "draft_model", td.draft_model(loud=LOUD), k=3)


def test_every_draft_is_the_small_models_own_text():
    asked, reference = prompts(), DraftModel(td.draft_model(loud=LOUD), Target(target()))
    check_text(drafting(), asked, 30, reference, lambda: ids_of(plain(), asked, greedy(30)))


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_a_model_agrees_with_itself_at_every_position(k):
    path = tiny_model("qwen3", vocab=128, max_position=512)
    llm = engine(path, "draft_model", path, k=k, max_num_seqs=1, max_model_len=288)
    ids_of(llm, [prompts()[0]], greedy(256))
    metrics = llm.metrics()
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 0
    assert metrics.acceptance_per_position[:-1] == metrics.acceptance_per_position[1:] or (
        max(metrics.acceptance_per_position) - min(metrics.acceptance_per_position) <= 1  # the last step is shorter
    )
    assert metrics.num_steps == -(-255 // (k + 1))
