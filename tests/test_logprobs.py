"""Log-probabilities through LLM: transformers' numbers, and the same bits with drafts, batches and preemptions."""

from __future__ import annotations

import functools
import json
import math

import pytest
import torch
import transformers
from engines import Counted, alone, copying_model, greedy, llm, run, sampled
from shaping_oracle import COMMON_WISHES, check_entry

from ms_spec import LLM, SamplingParams
from ms_spec.terminal import JsonPrinter

LENGTH = 128
PROMPTS = [[7, 9, 11, 13] * 5, list(range(20, 100)), [21, 22, 23] * 3, [5], [90, 91, 92, 93, 94] * 14, [8] * 9]


def plain(**arguments) -> LLM:
    return llm(copying_model(), max_model_len=LENGTH, **arguments)


def ngram(k: int, **arguments) -> LLM:
    return llm(copying_model(), k=k, **{"max_model_len": LENGTH, **arguments})


def crowded() -> LLM:
    """A cache for hardly more than one request, and prompts in pieces of 7."""
    return ngram(4, num_gpu_blocks_override=9, long_prefill_token_threshold=7)


@functools.cache
def network():
    return transformers.AutoModelForCausalLM.from_pretrained(copying_model(), dtype=torch.float32).eval()


def logits(ids: list[int]):
    with torch.no_grad():
        return network()(torch.tensor([ids])).logits[0].numpy()


def generate(engine: LLM, prompts, params):
    return engine.generate(list(prompts), params, use_tqdm=False)


def told(outputs) -> list[object]:
    """Everything that must be equal to the bit."""
    found = []
    for output in outputs:
        assert output.error is None
        one = output.outputs[0]
        found.append((one.token_ids, one.logprobs, one.cumulative_logprob, output.prompt_logprobs))
    return found


def each(engine: LLM, prompts, params) -> list[object]:
    return [one for prompt, own in zip(prompts, params) for one in told(generate(engine, [prompt], own))]


PARAMS = [
    greedy(30, logprobs=5, prompt_logprobs=3),
    sampled(1, 30, temperature=1.0, logprobs=3, repetition_penalty=1.4),
    greedy(30, logprobs=0, prompt_logprobs=0, frequency_penalty=1.0),
    sampled(2, 30, logprobs=20, prompt_logprobs=20),
    greedy(20),
    greedy(30, prompt_logprobs=1, allowed_token_ids=[8, 9, 10]),
]
WISHES = [
    *COMMON_WISHES,
    {"bad_words": ["a", "th", "e"], "presence_penalty": 0.5},
]
MORE = [
    *(greedy(40, logprobs=1, **wishes) for wishes in WISHES),
    *(sampled(seed, 40, logprobs=2, **wishes) for seed, wishes in enumerate(WISHES)),
]


def test_numbers_are_those_of_transformers():
    tokenizer = plain().get_tokenizer()
    for output, prompt, params in zip(generate(plain(), PROMPTS, PARAMS), PROMPTS, PARAMS):
        one = output.outputs[0]
        raw = logits([*prompt, *one.token_ids])
        assert (one.logprobs is None) == (params.logprobs is None)
        if one.logprobs is None:
            assert one.cumulative_logprob is None
        else:
            assert len(one.logprobs) == len(one.token_ids) == 30
            for i, entry in enumerate(one.logprobs):
                check_entry(entry, one.token_ids[i], raw[len(prompt) - 1 + i], params.logprobs, 1e-4)
                assert all(said.decoded_token == tokenizer.decode([token]) for token, said in entry.items())
            total = sum(entry[token].logprob for entry, token in zip(one.logprobs, one.token_ids))
            assert math.isclose(one.cumulative_logprob, total, rel_tol=1e-12)
        if params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
            for i in range(1, len(prompt)):
                check_entry(output.prompt_logprobs[i], prompt[i], raw[i - 1], params.prompt_logprobs, 1e-4)


@pytest.mark.parametrize("k", [1, 4])
def test_drafts_change_no_bit(k):
    jobs, params = PROMPTS * 3, PARAMS + MORE
    wanted = each(plain(), jobs, params)
    assert told(generate(plain(), jobs, params)) == wanted
    with Counted(ngram(k)) as did:
        assert each(ngram(k), jobs, params) == wanted
    assert 50 < did.accepted_tokens < did.draft_tokens
    with Counted(ngram(k)) as did:
        assert told(generate(ngram(k), jobs, params)) == wanted  # eight at a time, each with wishes of its own
    assert did.accepted_tokens > 50
    assert all(output.outputs[0].token_ids for output in generate(ngram(k), PROMPTS, greedy(3)))


def test_preemptions_and_chunks_change_no_bit():
    jobs, params = PROMPTS * 3, [*MORE, *PARAMS[::-1]]
    wanted = each(plain(), jobs, params)
    with Counted(crowded()) as did:
        assert told(generate(crowded(), jobs, params)) == wanted
    assert did.preemptions > 3 and did.accepted_tokens > 10


def test_asking_changes_no_token():
    fields = [{name: getattr(p, name) for name in ("temperature", "top_p", "seed", "max_tokens")} for p in PARAMS]
    bare = [SamplingParams(ignore_eos=True, **own) for own in fields]
    asked = [SamplingParams(ignore_eos=True, logprobs=4, prompt_logprobs=2, **own) for own in fields]
    for engine in (plain(), ngram(4)):
        assert run(engine, PROMPTS, asked) == alone(plain(), PROMPTS, bare)


def test_a_stop_inside_a_block_of_drafts_cuts_them_too():
    (free,) = generate(plain(), PROMPTS[:1], greedy(30, logprobs=2))
    ids = free.outputs[0].token_ids
    ends = sorted({ids.index(token) for token in ids})[1:]
    assert ends
    with Counted(ngram(4)) as did:
        for end in ends:
            params = greedy(30, logprobs=2, stop_token_ids=[ids[end]])
            (cut,) = generate(ngram(4), PROMPTS[:1], params)
            one = cut.outputs[0]
            assert (one.token_ids, one.finish_reason) == (ids[: end + 1], "stop")
            assert one.logprobs == free.outputs[0].logprobs[: end + 1]
            assert told([cut]) == told(generate(plain(), PROMPTS[:1], params))
    assert did.accepted_tokens > 0
    text = free.outputs[0].text
    (cut,) = generate(ngram(4), PROMPTS[:1], greedy(30, logprobs=2, stop=[text[len(text) // 2 : len(text) // 2 + 3]]))
    assert len(cut.outputs[0].logprobs) == len(cut.outputs[0].token_ids) < 30


def test_several_samples_and_streams():
    params = sampled(3, 12, n=3, logprobs=2, prompt_logprobs=1)
    (output,) = generate(ngram(4), PROMPTS[:1], params)
    (wanted,) = generate(plain(), PROMPTS[:1], params)
    for one, other in zip(output.outputs, wanted.outputs):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    assert output.prompt_logprobs == wanted.prompt_logprobs and len(output.prompt_logprobs) == len(PROMPTS[0])
    for _, part in ngram(4).stream(PROMPTS[:1], greedy(12, logprobs=1)):
        assert len(part.outputs[0].logprobs) == len(part.outputs[0].token_ids)


def test_without_text():
    (output,) = generate(plain(), PROMPTS[:1], greedy(2, logprobs=1, detokenize=False))
    assert all(said.decoded_token is None for entry in output.outputs[0].logprobs for said in entry.values())


def test_how_many():
    assert SamplingParams(logprobs=True).logprobs == 1 and SamplingParams(prompt_logprobs=False).prompt_logprobs is None
    with pytest.raises(ValueError, match="logprobs = 21: must be at most max_logprobs = 20; use 20"):
        generate(plain(), [[5]], greedy(2, logprobs=21))
    with pytest.raises(ValueError, match="prompt_logprobs = 21: must be at most max_logprobs = 20; use 20"):
        generate(plain(), [[5]], greedy(2, prompt_logprobs=21))
    with pytest.raises(ValueError, match="logprobs = -1: must be an integer >= 0"):
        SamplingParams(logprobs=-1)
    few = plain(max_num_seqs=1, max_logprobs=2)
    assert told(generate(few, [[5]], greedy(2, logprobs=2))) == told(generate(plain(), [[5]], greedy(2, logprobs=2)))
    with pytest.raises(ValueError, match="logprobs = 3: must be at most max_logprobs = 2"):
        generate(few, [[5]], greedy(2, logprobs=3))


def test_json(capsys):
    import sys

    from ms_spec.prompts import Prompt

    (output,) = generate(plain(), PROMPTS[3:4], greedy(2, logprobs=1, prompt_logprobs=0))
    output.outputs[0].logprobs[1][output.outputs[0].token_ids[1]].logprob = -math.inf
    JsonPrinter(sys.stdout).update(0, Prompt(PROMPTS[3]), output)
    record = json.loads(capsys.readouterr().out)
    one = output.outputs[0]
    assert record["prompt_logprobs"] == [None] and record["cumulative_logprob"] == one.cumulative_logprob
    assert record["logprobs"][0][str(one.token_ids[0])] == vars(one.logprobs[0][one.token_ids[0]])
    assert record["logprobs"][1][str(one.token_ids[1])]["logprob"] is None
