"""Thousands of samples drawn through LLM with drafts follow the model's own distribution, which transformers gives."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from engines import Counted, llm, token_ids
from safetensors.torch import load_file, save_file
from scipy import stats
from tiny import copy_of, tiny_model

from ms_spec import SamplingParams

SAMPLES, TEMPERATURE, TOP_K = 20_000, 0.9, 6
EXACT = {"enable_entropy_verify": True, "posterior_alpha": 0.0, "posterior_threshold": 1.0}
"""Loosens nothing, but makes looked-up drafts go through the acceptance rules instead of being matched."""


@functools.cache
def model():
    return tiny_model("llama", vocab=64, layers=1, hidden=32, heads=2, kv_heads=1, intermediate=48, scale=0.25, seed=4)


def next_tokens(contexts: list[list[int]], path: Path | None = None) -> np.ndarray:
    """The exact distributions behind contexts of one length, float64 [len(contexts), 64]."""
    network = transformers.AutoModelForCausalLM.from_pretrained(path or model(), dtype=torch.float32)
    with torch.no_grad():
        logits = network(torch.tensor(contexts)).logits[:, -1].double().numpy()
    logits /= TEMPERATURE
    kept = logits >= np.sort(logits, 1)[:, [-TOP_K]]
    p = np.where(kept, np.exp(logits - logits.max(1, keepdims=True)), 0)
    return p / p.sum(1, keepdims=True)


@functools.cache
def prompt() -> tuple[int, ...]:
    """Pairs of an id and the one most likely to follow it, so that whatever is said first, a good draft is at hand."""
    rng = np.random.default_rng(0)
    ids = rng.permutation(64)[:40].tolist()
    for _ in range(4):  # what is likely depends a little on the prompt itself
        firsts = np.argsort(-next_tokens([ids])[0])[:TOP_K].tolist()
        best = next_tokens([[*ids, token] for token in firsts]).argmax(1).tolist()
        seconds = next_tokens([[*ids, a, b] for a, b in zip(firsts, best)]).argmax(1).tolist()
        ids = [int(t) for triple in zip(firsts, best, seconds) for t in triple] + ids[-20:]
    return tuple(ids)


@functools.cache
def exact_joint(prompt: tuple[int, ...]) -> dict[tuple[int, int, int], float]:
    """The probability of each possible beginning of three tokens."""
    paths = {(): 1.0}
    for _ in range(3):
        rows = next_tokens([[*prompt, *path] for path in paths])
        paths = {
            (*path, t): q * row[t] for (path, q), row in zip(paths.items(), rows) for t in np.flatnonzero(row).tolist()
        }
    return paths


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square; cells that expect fewer than 5 are put together."""
    expected = probabilities * counts.sum()
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    keep = expected > 0
    return stats.chisquare(observed[keep], expected[keep] * observed[keep].sum() / expected[keep].sum()).pvalue


@pytest.mark.parametrize(
    "rule",
    [{}, {"enable_block_verify": True}, EXACT, {**EXACT, "enable_block_verify": True}],
    ids=["matched", "block, matched", "standard", "block"],
)
def test_samples_follow_the_model(rule):
    # 20,000 for the path that ngram takes by default; the others share its sampler, and differ in what is accepted.
    samples, seed = SAMPLES if not rule else SAMPLES // 5, 1000 * len(rule)
    engine = llm(
        model(),
        k=3,
        speculative={"prompt_lookup_max": 2},
        max_model_len=64,
        max_num_seqs=64,
        additional_config={"rejection_sampler_config": rule},
    )
    n = 100
    fields = {"temperature": TEMPERATURE, "top_k": TOP_K, "max_tokens": 5, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(n=n, seed=seed + i, **fields) for i in range(samples // n)]
    with Counted(engine) as did:
        ids = token_ids(engine.generate([list(prompt())] * len(params), params, use_tqdm=False))
    assert did.accepted_tokens > 0.2 * samples
    assert did.accepted_tokens < 0.9 * did.draft_tokens
    first = np.array([row[:3] for row in ids])
    assert first.shape == (samples, 3)

    check(first, prompt())


def check(first: np.ndarray, prompt: tuple[int, ...]) -> None:
    """The first three tokens of each sample, int [samples, 3], follow the model."""
    joint = exact_joint(prompt)
    paths = list(joint)
    index = {path: i for i, path in enumerate(paths)}
    counts = np.bincount([index[tuple(row)] for row in first.tolist()], minlength=len(paths))  # KeyError: impossible
    probabilities = np.array([joint[path] for path in paths])
    assert p_value(counts, probabilities) > 1e-3
    for place in range(3):
        token = np.array([path[place] for path in paths])
        marginal = np.bincount(token, probabilities, 64)
        assert p_value(np.bincount(first[:, place], minlength=64), marginal) > 1e-3

    # The test can fail: probabilities a tenth away would not have passed.
    wrong = probabilities * np.array([1.1 if path[1] % 2 else 0.9 for path in paths])
    if len(first) == SAMPLES:
        assert p_value(counts, wrong / wrong.sum()) < 1e-3


def changed(seed: int | None) -> Path:
    """The model without attention, so that a token depends on the one before it alone; ``seed``: with another head."""
    path = copy_of(model())
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight"] *= 0
    if seed is not None:
        noise = torch.randn(tensors["lm_head.weight"].shape, generator=torch.Generator().manual_seed(seed))
        tensors["lm_head.weight"] += 0.7 * tensors["lm_head.weight"].std() * noise
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("block", [False, True], ids=["standard", "block"])
def test_probabilistic_drafts_leave_the_distribution_as_it_is(block):
    chain, new, n = changed(None), 26, 100
    engine = llm(
        chain,
        max_model_len=64,
        max_num_seqs=64,
        speculative_config={
            "method": "draft_model",
            "model": str(changed(1)),
            "num_speculative_tokens": 3,
            "draft_sample_method": "probabilistic",
        },
        additional_config={"rejection_sampler_config": {"enable_block_verify": block}},
    )
    fields = {"temperature": TEMPERATURE, "top_k": TOP_K, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(n=n, seed=900 * (1 + block) + i, max_tokens=new, **fields) for i in range(8)]
    with Counted(engine) as did:
        ids = np.array(token_ids(engine.generate([[7]] * len(params), params, use_tqdm=False)))
    assert 0.2 * did.draft_tokens < did.accepted_tokens < 0.9 * did.draft_tokens
    before, after = ids[:, :-1].ravel(), ids[:, 1:].ravel()
    assert len(after) == SAMPLES
    counts = np.zeros((64, 64))
    np.add.at(counts, (before, after), 1)
    p = next_tokens([[token] for token in range(64)], chain)
    assert not counts[p == 0].any()
    assert transitions(counts, p) > 1e-3
    assert transitions(counts, p * np.where(np.arange(64) % 2, 1.1, 0.9)) < 1e-3, "the test can fail"


def transitions(counts: np.ndarray, p: np.ndarray) -> float:
    """Chi-square p-value of a Markov chain's transition counts [64, 64]; p: what follows each token."""
    p = p / p.sum(1, keepdims=True)
    expected = p * counts.sum(1, keepdims=True)
    used = expected >= 5
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    # Cells that were left out take the dependence within a row with them, so only whole rows lose a degree of freedom.
    freedom = used.sum() - (used == (p > 0)).all(1).sum()
    return float(stats.chi2.sf(statistic, freedom))
