"""Medusa heads draft what they say of the state before the newest token, and never change the text."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import tiny_drafts as td
import torch
from drafts_oracle import Medusa, Target
from proposals import check, check_text, distributions, engine, greedy, ids_of, prompts, watched
from safetensors.torch import load_file, save_file

from ms_spec import SamplingParams

LOUD = (17, 40, 90)
IDS = [40, 90, 17, *range(4, 16), *range(100, 128, 3)]
ONE_CHUNK = {"max_num_batched_tokens": 64}  # a single prefill graph


@functools.cache
def target():
    return td.target(loud=LOUD, layers=2)


@functools.cache
def plain_ids():
    return ids_of(engine(target(), **ONE_CHUNK), prompts(), greedy(30))


def reduced(heads: int, shared: bool = False, broken: int | None = None):
    """Heads of two layers with biases, whose output matrices, or the one for all, have the tokens IDS only.

    ``broken``: a head that says nothing but NaN.
    """
    more = {"original_lm_head": True} if shared else {}
    path = td.medusa(layout="vllm", heads=heads, layers=2, bias=True, loud=range(3), **more)
    tensors = load_file(path / "model.safetensors")
    if broken is not None:
        tensors[f"blocks.{broken}.layers.1.bias"][:] = torch.nan
    for i in range(heads):
        head = tensors.pop(f"lm_heads.{i}.weight")
        if i == 0 or not shared:
            tensors[f"lm_heads.{i}.weight"] = head[: len(IDS)].contiguous()
    tensors["token_map"] = torch.tensor(IDS)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def test_every_draft_is_the_heads_own(caplog):
    draft = td.medusa(heads=5, loud=LOUD)
    llm = engine(target(), "medusa", draft, k=4, **ONE_CHUNK)
    assert not caplog.records  # the fifth head is left out, and that is no news
    check_text(llm, prompts(), 30, Medusa(draft, Target(target())), plain_ids)


def test_drafts_with_distributions_of_fewer_tokens():
    path, speculative = reduced(3), {"draft_sample_method": "probabilistic"}
    llm, asked = engine(target(), "medusa", path, k=3, speculative=speculative, **ONE_CHUNK), prompts()
    reference = Medusa(path, Target(target()))
    with watched(llm) as seen:
        assert ids_of(llm, asked, greedy(30)) == plain_ids()
    check(seen, reference)
    with distributions(llm) as kept, watched(llm) as seen:
        ids_of(llm, asked[:1], SamplingParams(temperature=0.7, seed=5, max_tokens=24, ignore_eos=True))
    other = 0
    for one, q in zip(seen[1:], kept):  # the first is the prefill's
        if one.limit:
            best = reference.after(one.ids, one.limit)
            wanted = np.exp((best.logits - best.logits.max(1, keepdims=True)) / 0.7)
            assert np.allclose(q[: one.limit], wanted / wanted.sum(1, keepdims=True), atol=1e-4)
            assert set(one.drafts) <= set(IDS)
            other += one.drafts != best.tokens
    assert other > 2


def test_one_output_matrix_for_all_heads_and_a_broken_head():
    """The matrix is held once; each head has layers of its own. Drafts end before a head that is not finite."""
    path = reduced(4, shared=True, broken=2)
    llm = engine(target(), "medusa", path, k=4, max_num_seqs=1, **ONE_CHUNK)
    with watched(llm) as seen:
        assert ids_of(llm, prompts(), greedy(30)) == plain_ids()
    assert {(one.limit, len(one.drafts)) for one in seen} == {(limit, min(limit, 2)) for limit in range(5)}
    check([replace(one, limit=min(one.limit, 2)) for one in seen], Medusa(path, Target(target())))
    heads = llm._engine._runner._proposer.heads
    assert heads[0].output.weight is heads[2].output.weight


def test_more_drafts_than_heads():
    with pytest.raises(ValueError, match="num_speculative_tokens = 4: the draft checkpoint drafts at most 3; use 3"):
        engine(target(), "medusa", td.medusa(heads=3), k=4)
