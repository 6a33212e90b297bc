"""Whole steps, driven by the runner on emulated Ascend operators: forward pass, verification, commitment, drafts."""

from __future__ import annotations

import ascend_emulator as emulator
import numpy as np
import pytest
from mindspore import Tensor
from numpy_decoder import RandomCheckpoint, config, oracle
from shaping_oracle import log_softmax, shaped

from ms_spec.logprobs import entries
from ms_spec.models.decoder import Decoder
from ms_spec.models.ops.ascend import AscendOps
from ms_spec.models.weights import load_weights
from ms_spec.proposers.ngram import NgramProposer
from ms_spec.runner import ModelRunner
from ms_spec.shaping import Shaping
from ms_spec.verify.buckets import Buckets
from ms_spec.work import Work

BLOCK, MAX_LEN, NUM_BLOCKS, K, NEW = 16, 96, 16, 4, 10
TABLES = {1: [5, 1, 7], 2: [2, 3, 6], 3: [4, 9, 8]}


pytestmark = pytest.mark.usefixtures("eager")


@pytest.fixture
def model():
    return made()


def made(**options):
    backend = AscendOps("float16", emulator)
    target = Decoder(config("qwen3"), backend, NUM_BLOCKS, BLOCK, MAX_LEN, "float16")
    checkpoint = RandomCheckpoint("qwen3", target.weights())
    load_weights(target.weights(), checkpoint, cache_key=None)
    for layer in target.layers:  # what earlier requests left behind
        for cache in (layer.attention.k_cache, layer.attention.v_cache):
            cache.set_data(Tensor(np.full(cache.shape, 2.0, np.float16)))
    runner = ModelRunner(
        target,
        backend,
        Buckets((1, 4), (1, K + 1)),
        (16, 32),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        max_len=MAX_LEN,
        max_num_seqs=4,
        num_drafts=K,
        proposer=NgramProposer(backend, 2, 4, K),
        rule_options={},
        eager=True,
        **options,
    )
    return runner, {name: value.astype(np.float64) for name, value in checkpoint.tensors.items()}


def greedy(weights, prompt, new):
    text = list(prompt)
    for _ in range(new):
        text.append(int(np.argmax(oracle("qwen3", weights, text)[0][-1])))
    return text[len(prompt) :]


def assert_best(weights, prompt, output):
    """Each token has the highest logit after what precedes it, up to half precision."""
    text = [*prompt, *output]
    logits = oracle("qwen3", weights, text)[0]
    for i in range(len(prompt), len(text)):
        assert logits[i - 1, text[i]] >= logits[i - 1].max() - 0.06, f"token {i}"


def test_speculative_steps_emit_the_best_tokens(model):
    runner, weights = model
    rng = np.random.default_rng(5)
    prompts = {slot: rng.integers(1, 97, size).tolist() for slot, size in ((1, 38), (2, 20), (3, 5))}
    known = {slot: greedy(weights, prompt, NEW) for slot, prompt in prompts.items()}
    outputs: dict[int, list[int]] = {}
    for slot, prompt in prompts.items():
        for first in range(0, len(prompt), 32):
            chunk = prompt[first : first + 32]
            work = Work(slot, chunk, first, TABLES[slot], draft_limit=K)
            result = runner.prefill(work, first + 32 >= len(prompt))
        outputs[slot] = result.tokens
        assert len(result.tokens) == 1

    accepted = 0
    for step in range(NEW):
        works = []
        for slot, prompt in prompts.items():
            done = len(outputs[slot])
            if done >= NEW:
                continue
            drafts = known[slot][done : done + (slot + step) % (K + 1)]  # of every length, none included
            if len(drafts) > 2:
                drafts[2] = (drafts[2] + 1) % 97  # wrong: only two may pass
            works.append(Work(slot, [outputs[slot][-1], *drafts], len(prompt) + done - 1, TABLES[slot], draft_limit=K))
        if not works:
            break
        for work, result in zip(works, runner.decode(works)):
            assert len(result.tokens) == result.num_accepted + 1
            assert result.num_accepted <= len(work.tokens) - 1
            accepted += result.num_accepted
            outputs[work.slot] += result.tokens
    assert accepted >= 6
    for slot, prompt in prompts.items():
        assert len(outputs[slot]) >= NEW
        assert_best(weights, prompt, outputs[slot])


def test_steps_that_the_host_hands_over_before_it_has_looked():
    """What they begin with comes from the step before; the lengths that the host gives are the most there can be."""
    (told, weights), (blind, _) = made(), made(carries=True)
    prompt = [5, 6, 7, 8, 9] * 6
    results = [runner.prefill(Work(2, prompt, 0, TABLES[2], draft_limit=K), True) for runner in (told, blind)]
    output, least, slack = list(results[0].tokens), 1, 0
    accepted, drafts = 0, results[0].drafts
    for step in range(8):
        limit = 3 if step % 2 else K
        work = Work(2, [output[-1], *drafts], len(prompt) + len(output) - 1, TABLES[2], draft_limit=limit)
        known = {"draft_limit": limit, "carried": True, "slack": slack}
        carried = Work(2, [0] * (1 + K), len(prompt) + least - 1, TABLES[2], **known)
        (wanted,), (got,) = told.decode([work]), blind.decode([carried])
        assert (got.tokens, got.drafts, got.num_accepted) == (wanted.tokens, wanted.drafts, wanted.num_accepted)
        least, slack = len(output) + 1, len(drafts)
        output += wanted.tokens
        accepted, drafts = accepted + wanted.num_accepted, wanted.drafts
    assert accepted > 3
    assert_best(weights, prompt, output)


def test_drafts_are_looked_up_in_the_committed_text(model):
    runner, weights = model
    prompt = [5, 6, 7, 8, 9, 5, 6, 7]
    for repeat in range(2):  # the second run finds the state that the first left
        result = runner.prefill(Work(1, prompt, 0, TABLES[1], draft_limit=K), True)
        text = [*prompt, *result.tokens]
        want = next(
            (text[i + n : i + n + K] for n in (4, 3, 2) for i in range(len(text) - n) if text[i : i + n] == text[-n:]),
            [],
        )
        assert result.drafts == want, repeat
    assert_best(weights, prompt, result.tokens)


def test_what_requests_want_of_their_logits(model):
    """Right and wrong drafts under penalties, a bias and bad words; log-probabilities of all that comes."""
    runner, weights = model
    rng = np.random.default_rng(7)
    prompt = rng.integers(1, 97, 20).tolist()
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    first = int(np.argmax(shaped(oracle("qwen3", weights, prompt)[0][-1], prompt, [], **penalties)))
    words = [[first, 3], [first, 40, 5], [11]]
    wishes = {**penalties, "logit_bias": {4: 3.0}, "bad_words": words}
    known = {"shaping": Shaping(len(prompt), *penalties.values(), {4: 3.0}, None, words), "logprobs": True}

    result = runner.prefill(Work(1, prompt, 0, TABLES[1], **known, prompt_logprobs=True, draft_limit=K), True)
    told = log_softmax(oracle("qwen3", weights, prompt)[0])
    assert len(result.prompt_logprobs) == len(prompt)
    for place, token in enumerate(prompt[1:]):
        (entry,) = entries([token], [result.prompt_logprobs[place]], 2)
        assert abs(entry[token].logprob - told[place, token]) < 0.06

    output: list[int] = []
    for step in range(6):
        if output:
            raw = oracle("qwen3", weights, [*prompt, *output])[0][-1]
            drafts = [int(np.argmax(shaped(raw, prompt, output, **wishes))), *rng.integers(1, 97, step % 3).tolist()]
            work = Work(1, [output[-1], *drafts], len(prompt) + len(output) - 1, TABLES[1], **known, draft_limit=K)
            (result,) = runner.decode([work])
        for token, row in zip(result.tokens, result.logprobs):
            raw = oracle("qwen3", weights, [*prompt, *output])[0][-1]
            wanted = shaped(raw, prompt, output, **wishes)
            assert wanted[token] >= wanted.max() - 0.06
            (entry,) = entries([token], [row], 3)
            assert abs(entry[token].logprob - log_softmax(raw)[token]) < 0.06
            assert 3 <= len(entry) <= 4 and entry[max(entry, key=lambda t: entry[t].logprob)].rank == 1
            output.append(token)
    assert len(output) > 8
