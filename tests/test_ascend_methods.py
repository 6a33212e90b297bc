"""Whole steps with drafters on emulated Ascend operators, driven by the runner with the bounds that it passes.

EAGLE and multi-token prediction run EAGLE-3's passes with other heads; Medusa's heads attend to nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ascend_emulator as emulator
import drafts_oracle
import numpy as np
import pytest
import tiny_drafts as td
from mindspore import Tensor

from ms_spec.models.decoder import Decoder
from ms_spec.models.drafts import open_draft
from ms_spec.models.loading import load
from ms_spec.models.ops.ascend import AscendOps
from ms_spec.models.weights import load_weights
from ms_spec.proposers.base import Site
from ms_spec.proposers.registry import build_proposer
from ms_spec.runner import ModelRunner
from ms_spec.speculative_config import SpeculativeConfig
from ms_spec.verify.buckets import Buckets
from ms_spec.work import Work

K, BLOCK, MAX_LEN, NUM_BLOCKS, LAYERS = 3, 16, 96, 13, 2
TABLES = {1: [5, 1, 7, 2, 3, 6], 2: [4, 9, 8, 12, 11, 10]}
PROMPTS = {slot: np.random.default_rng(slot).integers(3, td.VOCAB, size).tolist() for slot, size in ((1, 38), (2, 5))}
"""One in two chunks."""
CLOSE = 0.05
"""Logits that half precision may mix up."""
DRAFTS = {
    "draft_model": lambda: td.draft_model(layers=1),
    "eagle3": lambda: td.eagle3(aux=2, aux_ids=[0, 2], fc_norm=True),
    "dflash": lambda: td.dflash(target_layers=LAYERS, target_layer_ids=(0, 1), layers=2, block_size=K + 1),
}


pytestmark = pytest.mark.usefixtures("eager")


@functools.cache
def target() -> Path:
    return td.target(layers=LAYERS)


@dataclass
class Made:
    """A runner, and what it should draft."""

    runner: ModelRunner
    reference: Any

    def check(self, text: list[int], drafts: list[int], limit: int) -> int:
        """How many drafts for a text could be compared."""
        assert len(drafts) == limit
        if not limit:
            return 0
        done = self.reference.target.run(text[:-1])
        block = (K + 1,) if isinstance(self.reference, drafts_oracle.Dflash) else ()
        return self.reference.drafts(text, done.states, done.normed, limit, *block).compare(drafts, CLOSE)


def make(method: str) -> Made:
    path, draft = target(), DRAFTS[method]()
    loaded, backend = load(str(path)), AscendOps("float16", emulator)
    model = Decoder(loaded.config, backend, NUM_BLOCKS, BLOCK, MAX_LEN, "float16")
    opened = open_draft(method, draft, loaded)
    spec = SpeculativeConfig(method=method, num_speculative_tokens=K, model=str(draft))
    proposer = build_proposer(spec, backend, Site(model, opened, NUM_BLOCKS, BLOCK, MAX_LEN, 2, "float16"))
    load_weights(model.weights(), loaded.checkpoint, cache_key=None)
    load_weights(proposer.weights(), opened.checkpoint, cache_key=None)
    caches = [p for part in (model, proposer) for p in part.get_parameters() if p.name.endswith(("k_cache", "v_cache"))]
    assert sum(cache.shape[2] for cache in caches) == 2 * LAYERS * 32 + opened.kv_numbers
    for cache in caches:  # what earlier requests left behind
        cache.set_data(Tensor(np.full(cache.shape, 2.0, np.float16)))
    runner = ModelRunner(
        model,
        backend,
        Buckets((2,), (1, K + 1)),
        (32,),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        max_len=MAX_LEN,
        max_num_seqs=2,
        num_drafts=K,
        proposer=proposer,
        rule_options={},
        eager=True,
    )
    return Made(runner, drafts_oracle.REFERENCES[method](draft, drafts_oracle.Target(path)))


@pytest.mark.parametrize("method", DRAFTS)
def test_drafts_are_the_references(method):
    made, compared, accepted, wanted = make(method), 0, 0, 0
    texts, rng = {}, np.random.default_rng(7)
    for slot, prompt in PROMPTS.items():
        for first in range(0, len(prompt), 32):
            chunk, last = prompt[first : first + 32], first + 32 >= len(prompt)
            following = -1 if last else prompt[first + 32]
            work = Work(slot, chunk, first, TABLES[slot], draft_limit=K * last, next_token=following)
            result = made.runner.prefill(work, last)
        texts[slot] = [*prompt, *result.tokens]
        compared += made.check(texts[slot], result.drafts, K)
        wanted += K
    for step in range(2):
        works = []
        for slot, text in texts.items():
            tried = made.reference.target.greedy(text, (slot + step) % (K + 1))
            if len(tried) > 1 + step % 2:
                tried[-1] = int(rng.integers(3, td.VOCAB))  # most likely wrong
            limit = (3, 0, 3, 1)[(step + 2 * slot) % 4]
            works.append(Work(slot, [text[-1], *tried], len(text) - 1, TABLES[slot], draft_limit=limit))
        for work, result in zip(works, made.runner.decode(works)):
            texts[work.slot] += result.tokens
            accepted += result.num_accepted
            compared += made.check(texts[work.slot], result.drafts, work.draft_limit)
            wanted += work.draft_limit
    assert accepted >= 2
    assert compared >= wanted * 2 // 3, f"only {compared} of {wanted} drafts are clear enough to compare"
