"""DFlash: a draft is its mask's best token, given the target's states of all positions before and the whole block."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import tiny_drafts as td
from drafts_oracle import Dflash, Drafted, Target
from proposals import check, check_text, distributions, engine, greedy, ids_of, prompts, watched
from safetensors.numpy import load_file, save_file

from ms_spec import LLM, SamplingParams

LOUD = (17, 40, 90)
LAYERS, IDS = 3, (0, 1, 2)
"""Of the target, and the layers whose output the drafts look at: the last one's is taken before the final norm."""
MAX_LEN, KNOWN = 128, 40
BLOCK = 4


@functools.cache
def target() -> Path:
    return td.target(loud=LOUD, layers=LAYERS)


@functools.cache
def plain() -> LLM:
    return engine(target(), max_num_seqs=1, long_prefill_token_threshold=64)


def draft(**options) -> Path:
    return td.dflash(target_layers=LAYERS, target_layer_ids=IDS, layers=2, **options)


class Blocks:
    """The reference, with a block that is always whole, except where the longest text ends."""

    def __init__(self, path: Path, rows: int) -> None:
        self.reference, self.rows = Dflash(path, Target(target())), rows
        self.run = self.reference.target.run

    def after(self, ids, k: int) -> Drafted:
        done, rows = self.run(ids[:-1]), min(self.rows, MAX_LEN - len(ids) + 1)
        return self.reference.drafts(ids, done.states, done.normed, k, rows)


@functools.cache
def drafting() -> LLM:
    """Prompts are read in pieces, and the cache is too small for three texts and their blocks."""
    more = {"long_prefill_token_threshold": 14, "num_gpu_blocks_override": 8}
    llm = engine(target(), "dflash", draft(block_size=BLOCK), speculative={"num_speculative_tokens": None}, **more)
    assert llm.limits.num_speculative_tokens == BLOCK - 1
    return llm


def test_every_draft_is_the_references():
    llm, asked, reference = drafting(), prompts(), Blocks(draft(block_size=BLOCK), BLOCK)
    before = llm.metrics().num_preemptions
    check_text(llm, asked, 40, reference, lambda: ids_of(plain(), asked, greedy(40)))
    assert llm.metrics().num_preemptions > before


def test_the_block_ends_where_the_longest_text_does():
    llm, ids = drafting(), prompts(5)[4]
    with watched(llm) as seen:
        out = ids_of(llm, [ids], greedy(MAX_LEN - len(ids)))
    assert len(ids) + len(out[0]) == MAX_LEN and out == ids_of(plain(), [ids], greedy(MAX_LEN - len(ids)))
    check([one for one in seen if one.limit and len(one.ids) - 1 + BLOCK > MAX_LEN], Blocks(draft(), BLOCK), least=1)
    assert {one.limit for one in seen} > {BLOCK - 1, 0}


def test_a_window_shorter_than_the_text_is_refused():
    path = draft(layer_types=["full_attention", "sliding_attention"], sliding_window=MAX_LEN - 1)
    with pytest.raises(ValueError, match=r"sliding_window = 127 .*max_model_len = 128.*use max_model_len <= 127"):
        engine(target(), "dflash", path, k=3)


# A smaller block, biases, a causal layer with a window as long as the text, and the draft's own vocabulary


@functools.cache
def special() -> Path:
    """Its own embeddings, and an output matrix for some of the tokens."""
    kinds = ["sliding_attention", "full_attention"]
    path = draft(block_size=6, attention_bias=True, layer_types=kinds, sliding_window=MAX_LEN)
    tensors, rng = load_file(path / "model.safetensors"), np.random.default_rng(3)
    tensors["d2t"] = np.sort(rng.choice(td.VOCAB, KNOWN, replace=False)) - np.arange(KNOWN)
    tensors["lm_head.weight"] = rng.normal(0, 0.2, (KNOWN, td.HIDDEN)).astype(np.float32)
    tensors["embed_tokens.weight"] = rng.normal(0, 1, (td.VOCAB, td.HIDDEN)).astype(np.float32)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "draft_vocab_size": KNOWN}))
    return path


class SpecialBlocks(Blocks):
    """What the draft brings stands for what it otherwise takes from the target."""

    def __init__(self) -> None:
        super().__init__(special(), rows=3)
        w, self.ids = self.reference.w, np.arange(KNOWN) + self.reference.w["d2t"]
        self.reference.target.embedding, self.reference.target.head = w["embed_tokens.weight"], w["lm_head.weight"]
        self.run = Target(target()).run

    def after(self, ids, k: int) -> Drafted:
        drafted = super().after(ids, k)
        wide = np.full((k, td.VOCAB), -np.inf)
        wide[:, self.ids] = drafted.logits
        return Drafted(self.ids[drafted.tokens].tolist(), drafted.gaps, wide, chained=False)


@functools.cache
def drawing() -> LLM:
    more = {"max_num_seqs": 1, "long_prefill_token_threshold": 64}
    return engine(target(), "dflash", special(), k=2, speculative={"draft_sample_method": "probabilistic"}, **more)


def test_fewer_drafts_are_those_of_a_smaller_block(caplog):
    with caplog.at_level(logging.WARNING, "ms_spec"):
        llm = drawing()
    assert any("num_speculative_tokens = 2: the draft was trained for 5" in said for said in caplog.messages)
    with watched(llm) as seen:
        out = ids_of(llm, prompts(), greedy(20))
    check(seen, SpecialBlocks())
    assert out == ids_of(plain(), prompts(), greedy(20))


def test_drafts_are_drawn_from_the_distributions_that_are_kept():
    llm, reference, temperature = drawing(), SpecialBlocks(), 1.5
    with distributions(llm) as kept, watched(llm) as seen:
        ids_of(llm, prompts(1), SamplingParams(temperature=temperature, seed=1, max_tokens=40, ignore_eos=True))
    drawn, best = [], []
    for one, q in zip(seen[-len(kept) :], kept):
        if one.limit == 2:
            drafted = reference.after(one.ids, one.limit)
            wanted = np.exp(drafted.logits / temperature)
            np.testing.assert_allclose(q, wanted / wanted.sum(1, keepdims=True), atol=1e-5)
            assert all(q[i, token] > 0 for i, token in enumerate(one.drafts))
            drawn += one.drafts
            best += drafted.tokens
    assert len(drawn) > 30 and drawn != best
