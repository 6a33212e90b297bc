"""EAGLE and EAGLE-3: every draft is the one that NumPy makes of the same text, in every published shape."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import drafts_oracle
import mindspore as ms
import numpy as np
import pytest
import tiny_drafts as td
from mindspore import Tensor
from proposals import check_text, distributions, engine, greedy, ids_of, prompts, watched

from ms_spec import SamplingParams
from ms_spec.models.decoder import Decoder
from ms_spec.models.drafts import open_draft
from ms_spec.models.loading import load
from ms_spec.models.ops.cpu import CpuOps
from ms_spec.models.weights import load_weights
from ms_spec.proposers.base import Site
from ms_spec.proposers.registry import build_proposer

LOUD = (17, 40, 90)
K = 3
FEW = {"max_num_batched_tokens": 64, "compilation_config": {"cudagraph_capture_sizes": [3 * (K + 1)]}}
"""Three graphs: batches of 3 with and without drafts, and one length of prompts."""


@functools.cache
def target(family: str = "llama", layers: int = 3):
    return td.target(family, layers=layers, loud=LOUD)


@functools.cache
def plain_ids():
    return ids_of(engine(target(), max_num_seqs=1, max_num_batched_tokens=64), prompts(), greedy(30))


@functools.cache
def reduced(**more: Any):
    """EAGLE-3 in its original layout with a third of the vocabulary, on the embeddings and on the last layer."""
    ids = sorted({*range(1, td.VOCAB, 3), *LOUD})
    return td.eagle3(draft_ids=ids, aux_ids=[0, 1, 3], loud=LOUD, **more)


def check_all(llm, draft, kind, alone: bool = True):
    """All drafts are the reference's, some are accepted, and the text is the target's."""
    check_text(llm, prompts(), 30, kind(draft, drafts_oracle.Target(target())), plain_ids, alone)


def test_eagle():
    draft = td.eagle()
    check_all(engine(target(), "eagle", draft, k=K, **FEW), draft, drafts_oracle.Eagle)


def test_eagle3_with_a_reduced_vocabulary():
    check_all(engine(target(), "eagle3", reduced(), k=K, **FEW), reduced(), drafts_oracle.Eagle3)


def test_drafts_that_are_drawn_and_rejected_rows_that_are_skipped():
    """At temperature 0 the same drafts as ever; above it, they come from the distributions that are kept."""
    draft = reduced(logit_scale=0.5)
    fields = {"draft_sample_method": "probabilistic", "disable_padded_drafter_batch": True}
    llm = engine(target(), "eagle3", draft, k=K, max_num_seqs=1, max_num_batched_tokens=64, speculative=fields)
    check_all(llm, draft, drafts_oracle.Eagle3, alone=False)
    reference = drafts_oracle.Eagle3(draft, drafts_oracle.Target(target()))
    with distributions(llm) as kept, watched(llm) as seen:
        ids_of(llm, [prompts()[2]], SamplingParams(temperature=0.7, seed=5, max_tokens=16, ignore_eos=True))
    compared = 0
    for one, probs in zip(seen[1:], kept):  # the first proposal is the prompt's
        text = list(one.ids)
        assert len(one.drafts) == one.limit
        for token, q in zip(one.drafts, probs):
            logits = logits_behind(reference, one.ids, text)
            p = np.exp((logits - logits.max()) / 0.7)
            np.testing.assert_allclose(q, p / p.sum(), atol=2e-5)
            assert q[token] > 0
            text.append(token)
            compared += 1
    assert compared > 16


def logits_behind(reference, ids, text):
    """Logits of the draft behind ``text``, of which ``ids`` is committed."""
    n = len(ids) - 1
    run = reference.target.run(ids[:-1])
    features = reference.features(run.states, run.normed, n)
    for end in range(n, len(text)):
        recycled, logits = reference.forward(np.array(text[1 : end + 1]), features)
        features = np.concatenate([features, recycled[-1:]])
    return logits


# Every shape, without graphs


MAX_LEN, BLOCK = 64, 16
TABLE = np.array([[3, 1, 4, 2]], np.int32)
EAGLE3 = {
    "default states": {"draft_vocab": None, "own_embedding": True},
    "the target's head": {"draft_vocab": None, "own_head": False, "aux_ids": [1, 2, 3], "norm_output": True},
    "narrower": {"hidden": 32, "norm_before_residual": True, "aux_ids": [0, 7], "aux": 2},
    "norm of each": {"layout": "specforge", "head_dim": 32, "fc_norm": True, "norm_output": True},
    "no states": {"layout": "specforge", "use_aux": False},
    "norm of all": {"layout": "speculators", "norm_before_residual": True, "norm_before_fc": True, "layers": 3},
    "qwen3": {"layout": "speculators", "qwen3": True, "attention_bias": True, "aux_ids": [1, 7], "aux": 2},
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle, the target's embeddings": ("eagle", {"bias": False, "own_embedding": False, "rope_theta": 300.0}),
    "eagle, deeper": ("eagle", {"layers": 3, "qkv_bias": True}),
    **{name: ("eagle3", fields) for name, fields in EAGLE3.items()},
}


@pytest.fixture
def eager():
    before = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    ms.set_context(mode=before)


class Alone:
    """A proposer beside its target, called one operation after the other."""

    def __init__(self, method: str, draft, layers: int) -> None:
        loaded, ops = load(str(target(layers=layers))), CpuOps()
        opened = open_draft(method, draft, loaded)
        self.target = Decoder(loaded.config, ops, 5, BLOCK, MAX_LEN, "float32")
        config = SimpleNamespace(
            method=method,
            num_speculative_tokens=K,
            draft_sample_method="greedy",
            disable_padded_drafter_batch=False,
        )
        self.proposer = build_proposer(config, ops, Site(self.target, opened, 5, BLOCK, MAX_LEN, 1, "float32"))
        load_weights(self.target.weights(), loaded.checkpoint, cache_key=None)
        load_weights(self.proposer.weights(), opened.checkpoint, cache_key=None)

    def __call__(self, tokens, following, start, limit=K):
        """One step of one request; the drafts [K]."""
        width, last = len(tokens), max(i for i, token in enumerate(following) if token >= 0)
        bounds = [Tensor(np.full(w, MAX_LEN, np.int32)) for w in self.proposer.grids(width)]
        grid = [Tensor(np.array([x], np.int32)) for x in (tokens, following)]
        at, last, limit = (Tensor(np.array([x], np.int32)) for x in (start, last, limit))
        rows = self.target.rows(grid[0], at, Tensor(TABLE), bounds[0])
        states = self.target(rows)
        features = tuple(self.target.normed(states[-1], rows) if tap < 0 else states[tap] for tap in self.proposer.taps)
        slot, uniforms = Tensor(np.array([1], np.int32)), Tensor(np.zeros((1, K), np.float32))
        drafts, counts = self.proposer(
            *(None, slot, None, *grid, last, at, rows, features, limit, bounds, None, uniforms)
        )
        assert counts.asnumpy().tolist() == [(drafts.asnumpy() >= 0).sum()]
        return drafts.asnumpy()[0].tolist()


TEXT = np.random.default_rng(4).integers(3, td.VOCAB, 25).tolist()


def steps(alone: Alone):
    """Drafts of the second chunk of a prompt, then of steps that accept two drafts of three, and none."""
    chunk = [*TEXT[:18], *[-1] * 2]  # padded
    alone(chunk, [*TEXT[1:19], -1, -1], 0, limit=0)
    yield alone([*TEXT[18:20], *[-1] * 15], [*TEXT[19:21], *[-1] * 15], 18)
    yield alone([*TEXT[20:23], 99], [*TEXT[21:24], -1], 20)
    yield alone([TEXT[23], 99, 98, 97], [TEXT[24], -1, -1, -1], 23)


def reference(method: str, depth: int, **fields: Any):
    """The draft, and what it drafts in ``steps``."""
    draft = getattr(td, method)(**fields)
    oracle = drafts_oracle.REFERENCES[method](draft, drafts_oracle.Target(target(layers=depth)))
    return draft, [oracle.after(TEXT[:length], K) for length in (21, 24, 25)]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape(name):
    method, fields = SHAPES[name]
    draft, wanted = reference(method, 7, **fields)
    for drafts, one in zip(steps(Alone(method, draft, 7)), wanted):
        assert one.compare(drafts) == K
