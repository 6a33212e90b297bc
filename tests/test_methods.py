"""No method, however good or bad its drafts, changes what is generated."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tiny_drafts as td
from proposals import engine, greedy, ids_of

from ms_spec.sampling_params import SamplingParams

LOUD = (17, 40, 90)
NEW = 40


@functools.cache
def target() -> Any:
    return td.target(loud=LOUD)


@functools.cache
def mimo() -> Any:
    return td.mtp(loud=LOUD)


def made(model: Any, method: str | None = None, draft: Any = None, k: int = 4, **more: Any) -> Any:
    """Room for eight requests, but not for all they grow to."""
    sizes = {"max_num_seqs": 8, "max_model_len": 112, "num_gpu_blocks_override": 9, "long_prefill_token_threshold": 64}
    return engine(model, method, draft, k, **{**sizes, **more})


@functools.cache
def plain(of: Any) -> Any:
    return made(of(), num_gpu_blocks_override=64)


def params() -> list[SamplingParams]:
    """Greedy and sampled requests beside each other."""
    sampled = [SamplingParams(temperature=0.8, top_p=0.95, seed=s, max_tokens=NEW, ignore_eos=True) for s in range(4)]
    return [one for pair in zip([greedy(NEW)] * 4, sampled) for one in pair]


def asked() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, td.VOCAB, size).tolist() for size in (5, 14, 17, 2, 33, 1, 9, 12)]


@functools.cache
def wanted(of: Any) -> list[list[int]]:
    return ids_of(plain(of), asked(), params())


CASES = {
    "suffix": (target, lambda: None, 15),
    "draft_model": (target, lambda: td.draft_model(loud=LOUD), 4),
    "draft_model itself": (target, target, 15),
    "draft_model once": (target, lambda: td.draft_model(loud=LOUD), 1),
    "eagle": (target, td.eagle, 4),
    "eagle3": (target, lambda: td.eagle3(draft_vocab=48, loud=LOUD), 4),
    "medusa": (target, lambda: td.medusa(loud=LOUD), 4),
    "mtp": (mimo, lambda: None, 4),
    "dflash": (target, lambda: td.dflash(block_size=5), 4),
}


@pytest.mark.parametrize("case", CASES)
def test_output_is_plain_decodings(case):
    of, draft, k = CASES[case]
    llm = made(of(), case.split()[0], draft(), k)
    together = ids_of(llm, asked(), params())
    assert llm.metrics().num_preemptions > 0
    assert llm.metrics().num_accepted_tokens > 0 or case == "eagle"
    for i, (ids, one) in enumerate(zip(together, wanted(of))):
        assert ids == one, f"request {i}"
    for i in (1, 2):
        assert ids_of(llm, [asked()[i]], [params()[i]])[0] == wanted(of)[i]
    llm.close()


def test_requests_are_different():
    assert len({tuple(ids) for ids in wanted(target)}) == 8
