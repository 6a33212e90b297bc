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
LAYERS = 2  # a graph takes long to compile, and longer with more layers


@functools.cache
def target() -> Any:
    return td.target(loud=LOUD, layers=LAYERS)


@functools.cache
def mimo() -> Any:
    return td.mtp(loud=LOUD, layers=LAYERS)


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


DRAFTERS = {
    "suffix": (target, lambda k: None),
    "draft_model": (target, lambda k: td.draft_model(loud=LOUD, layers=1)),
    "eagle": (target, lambda k: td.eagle()),
    "eagle3": (target, lambda k: td.eagle3(draft_vocab=48, loud=LOUD, aux_ids=(0, 1, 2))),
    "medusa": (target, lambda k: td.medusa(loud=LOUD, heads=max(k, 2))),
    "mtp": (mimo, lambda k: None),
    "dflash": (target, lambda k: td.dflash(block_size=k + 1, layers=1, target_layers=LAYERS, target_layer_ids=(0, 1))),
}


CASES = [*((method, 4) for method in DRAFTERS), *((method, k) for method in ("draft_model", "eagle3") for k in (1, 15))]


@pytest.mark.parametrize(("method", "k"), CASES)
def test_output_is_plain_decodings(method, k):
    of, draft = DRAFTERS[method]
    one_batch = {"cudagraph_capture_sizes": [8 * (k + 1)]}  # graphs for one request would take seconds to compile
    llm = made(of(), method, draft(k), k, compilation_config=one_batch)
    together = ids_of(llm, asked(), params())
    assert llm.metrics().num_preemptions > 0 and llm.metrics().num_draft_tokens > 0
    for i, (ids, one) in enumerate(zip(together, wanted(of))):
        assert ids == one, f"request {i}"
    for i in (1, 2):
        assert ids_of(llm, [asked()[i]], [params()[i]])[0] == wanted(of)[i], f"request {i} alone"
    llm.close()


def test_drafts_are_accepted():
    """What is tested above is not only how drafts are refused: a model agrees with itself, whoever is beside it."""
    llm = made(target(), "draft_model", target(), 4)
    assert ids_of(llm, asked(), params()) == wanted(target)
    metrics = llm.metrics()
    assert (
        0 < metrics.num_accepted_tokens < metrics.num_draft_tokens
    )  # greedy drafts of sampled text are wrong at times
    assert metrics.num_preemptions > 0


def test_requests_are_different():
    assert len({tuple(ids) for ids in wanted(target)}) == 8
