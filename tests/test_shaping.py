"""Penalties, biases, allowed ids and bad words through LLM: transformers' output, whatever the neighbours and methods.

That drafts, batches and preemptions change nothing is tested in ``test_logprobs``, together with log-probabilities.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import transformers
from engines import Counted, alone, copying_model, greedy, idle, llm, run, sampled
from shaping_oracle import COMMON_WISHES, shaped
from tiny import tiny_model

from ms_spec import LLM, SamplingParams
from ms_spec.parts import sampling_defaults

LENGTH = 128
SMALL = {"max_num_seqs": 1, "long_prefill_token_threshold": 64}
"""Three graphs."""
PROMPTS = [[7, 9, 11, 13] * 5, list(range(40, 70)), [21, 22, 23] * 3, [5, 6], [90, 91, 92, 93, 94] * 4, [8] * 9]
WISHES = [
    *COMMON_WISHES,
    {},
]


def plain() -> LLM:
    return llm(copying_model(), max_model_len=LENGTH)


def ngram(k: int, **arguments) -> LLM:
    return llm(copying_model(), k=k, max_model_len=LENGTH, **arguments)


@functools.cache
def network():
    return transformers.AutoModelForCausalLM.from_pretrained(copying_model(), dtype=torch.float32).eval()


def by_transformers(prompt: list[int], new: int, **wishes) -> list[int]:
    """Greedy output, each token from transformers' logits and NumPy's version of the wishes."""
    output: list[int] = []
    for _ in range(new):
        with torch.no_grad():
            logits = network()(torch.tensor([[*prompt, *output]])).logits[0, -1].numpy()
        output.append(int(np.argmax(shaped(logits, prompt, output, **wishes))))
    return output


@pytest.mark.parametrize("wishes", WISHES[:-1], ids=lambda wishes: "+".join(wishes))
def test_it_is_what_transformers_generates(wishes):
    wanted = [by_transformers(prompt, 20, **wishes) for prompt in PROMPTS[:3]]
    assert run(plain(), PROMPTS[:3], greedy(20, **wishes)) == wanted


def test_transformers_own_repetition_penalty():
    for prompt in PROMPTS[:3]:
        ids = network().generate(
            torch.tensor([prompt]), repetition_penalty=1.3, do_sample=False, max_new_tokens=20, eos_token_id=None
        )
        assert run(plain(), [prompt], greedy(20, repetition_penalty=1.3)) == [ids[0, len(prompt) :].tolist()]


def test_a_request_without_wishes_is_not_touched_by_its_neighbours():
    wanted = alone(plain(), PROMPTS, greedy(30))
    for engine in (plain(), ngram(4)):
        mixed = run(engine, PROMPTS, [greedy(30, **(WISHES[i] if i % 2 else {})) for i in range(6)])
        assert mixed[::2] == wanted[::2] and mixed[1::2] != wanted[1::2]
        assert run(engine, PROMPTS, greedy(30)) == wanted  # nor by those that had its slot before


@pytest.mark.parametrize(
    "rule", [{"enable_block_verify": True}, {"enable_entropy_verify": True, "posterior_alpha": 0.1}]
)
def test_other_rules(rule):
    engine = ngram(3, **SMALL, additional_config={"rejection_sampler_config": rule})
    wanted = alone(plain(), PROMPTS, [greedy(30, **wishes) for wishes in WISHES])
    assert run(engine, PROMPTS, [greedy(30, **wishes) for wishes in WISHES]) == wanted
    ids = run(engine, PROMPTS, [sampled(seed, 30, allowed_token_ids=[4, 5, 6, 7]) for seed in range(6)])
    assert {token for one in ids for token in one} <= {4, 5, 6, 7}


# Bad words


def text_of(engine: LLM, ids: list[int]) -> str:
    return engine.get_tokenizer().decode(ids)


def test_bad_words_of_several_tokens():
    """They never come, wherever their ends lie in a step, and neighbours do not notice."""
    engine, base = ngram(4), plain()
    tokenizer = base.get_tokenizer()
    free = alone(base, PROMPTS[:3], greedy(30))
    words = []
    for ids in free:
        for size in (2, 3):
            for at in range(2, 20):
                word = tokenizer.decode(ids[at : at + size])
                bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
                if bare == ids[at : at + size]:
                    words.append(word)
                    break
    assert words
    sequences = [tokenizer.encode(word.lstrip(), add_special_tokens=False) for word in words]
    wanted = alone(base, PROMPTS[:3], greedy(30, bad_words=words))
    assert wanted != free
    for ids, prompt in zip(wanted, PROMPTS):
        both = [tokenizer.encode(" " + word.lstrip(), add_special_tokens=False) for word in words]
        spaced = [b for b, a in zip(both, sequences) if len(b) == len(a) and b[0] != a[0]]
        assert ids == by_transformers(prompt, 30, bad_words=sequences + spaced)
        for word in sequences:
            assert all(ids[i : i + len(word)] != word for i in range(30))
    for place in range(3):
        params = [greedy(30, bad_words=words) if i == place else greedy(30) for i in range(3)]
        mixed = run(engine, PROMPTS[:3], params)
        assert mixed == [wanted[i] if i == place else free[i] for i in range(3)]


def test_bad_words_that_cannot_be():
    engine = plain()
    with pytest.raises(ValueError, match=r"bad_words\[1\] = .*: it has \d+ tokens, at most 32 are allowed"):
        engine.generate([[5]], SamplingParams(bad_words=["a", "q z x " * 40]))
    with pytest.raises(ValueError, match=r"bad_words: 101 words come to \d+ token sequences .* at most 100"):
        engine.generate([[5]], SamplingParams(bad_words=[f"{i}" for i in "abcdefghij" * 10 + "k"]))
    with pytest.raises(ValueError, match=r"bad_words.*the tokenizer makes no token of it"):
        engine.generate([[5]], SamplingParams(bad_words=[" "]))


# What cannot be


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"allowed_token_ids": [3, 160]}, r"allowed_token_ids\[1\] = 160: not in the vocabulary"),
        ({"logit_bias": {7: 1.0, 5000: 1.0}}, r"logit_bias\[1\] = 5000: not in the vocabulary"),
    ],
)
def test_ids_that_are_none(fields, words):
    with pytest.raises(ValueError, match=words):
        plain().generate([[5]], SamplingParams(**fields))


def test_nothing_left_to_emit():
    (one, other) = plain().generate(
        [PROMPTS[0], PROMPTS[1]],
        [greedy(5, allowed_token_ids=[9], min_tokens=2, stop_token_ids=[9], ignore_eos=True), greedy(5)],
        use_tqdm=False,
    )
    assert one.error.endswith("or logit_bias, allowed_token_ids, bad_words and min_tokens leave no token")
    assert "\n" not in one.error and one.outputs[0].token_ids == []
    assert other.error is None and len(other.outputs[0].token_ids) == 5 and idle(plain())


def test_the_penalty_of_a_checkpoint(caplog):
    caplog.set_level("INFO", logger="ms_spec")
    assert sampling_defaults({"repetition_penalty": 1.05}) == {"repetition_penalty": 1.05}
    assert "repetition_penalty = 1.05" in caplog.text
    assert sampling_defaults({"repetition_penalty": 0}) == {}


def test_no_graph_is_added():
    engine = ngram(4)
    before = engine._open().runner.num_compiled
    run(engine, PROMPTS, [greedy(10, logprobs=3, prompt_logprobs=2, **wishes) for wishes in WISHES])
    assert engine._open().runner.num_compiled == before == len(engine._open().runner.plan())


@pytest.mark.parametrize("method", ["draft_model", "suffix"])
def test_other_methods(method):
    model = tiny_model("llama", vocab=160, seed=0)
    config = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        config |= {"model": str(model), "draft_sample_method": "probabilistic"}
    base, engine = (llm(model, max_model_len=LENGTH, **SMALL, **more) for more in ({}, {"speculative_config": config}))
    params = [greedy(24, logprobs=2, **wishes) for wishes in WISHES]
    wanted = base.generate(PROMPTS, params, use_tqdm=False)
    with Counted(engine) as did:
        found = engine.generate(PROMPTS, params, use_tqdm=False)
    assert did.accepted_tokens > 10
    for one, other in zip(found, wanted):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    ids = run(engine, PROMPTS, [sampled(seed, 24, allowed_token_ids=[4, 5, 6]) for seed in range(6)])
    assert {token for one in ids for token in one} <= {4, 5, 6}
