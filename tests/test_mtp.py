"""MiMo's layer of multi-token prediction goes on from the target's states, and never changes the text."""

from __future__ import annotations

import functools

import pytest
import tiny_drafts as td
from drafts_oracle import Mtp, Target
from proposals import check, check_text, engine, greedy, ids_of, prompts, watched

from ms_spec.config import EngineConfig
from ms_spec.draft_choice import choose_draft
from ms_spec.models.drafts.mtp import ARCHITECTURES
from ms_spec.models.loading import load
from ms_spec.proposers.mtp import LAYERS

LOUD = (17, 40, 90)
ONE_CHUNK = {"max_num_batched_tokens": 64}  # a single prefill graph; the longer prompts take several steps


@functools.cache
def mimo():
    return td.mtp(loud=LOUD, layers=2)


@functools.cache
def drafting():
    return engine(mimo(), "mtp", k=3, **ONE_CHUNK)


@functools.cache
def plain_ids():
    return ids_of(engine(mimo(), **ONE_CHUNK), asked(), greedy(30))


def asked():
    return prompts(6)[1:]  # among them one of a single token, whose row stands at position 0 alone


def test_every_draft_is_the_layers_own():
    check_text(drafting(), asked(), 30, Mtp(mimo(), Target(mimo())), plain_ids)


def test_no_embedding_at_position_0():
    """Otherwise the drafts behind short prompts would be others."""
    with watched(drafting()) as seen:
        ids_of(drafting(), [[7], [9]], greedy(12))
    check(seen, Mtp(mimo(), Target(mimo())), least=8)
    with pytest.raises(AssertionError):
        check(seen, Mtp(mimo(), Target(mimo()), zero_first=False), least=8)


def test_rejected_rows_left_out_and_as_many_drafts_as_layers():
    llm = engine(mimo(), "mtp", k=None, speculative={"disable_padded_drafter_batch": True}, **ONE_CHUNK)
    assert llm.limits.num_speculative_tokens == 1
    with watched(llm) as seen:
        assert ids_of(llm, asked(), greedy(30)) == plain_ids()
    check(seen, Mtp(mimo(), Target(mimo())))


def test_one_layer_for_several_drafts_is_said(caplog):
    target = load(str(mimo()))
    for k in (1, 2):
        caplog.clear()
        spec = {"method": "mtp", "num_speculative_tokens": k}
        config, draft = choose_draft(EngineConfig.parse(model=str(mimo()), speculative_config=spec), target)
        assert (config.speculative_config.num_speculative_tokens, draft.suggested_tokens) == (k, 1)
        assert caplog.messages == [] or k == 2
    assert "num_speculative_tokens = 2: the checkpoint has 1 multi-token-prediction layer, used again" in caplog.text


def test_every_architecture_has_its_layer():
    assert set(LAYERS) == set(ARCHITECTURES)
