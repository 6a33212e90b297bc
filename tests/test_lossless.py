"""Speculation changes no token: ngram against plain decoding, on real compiled models, whatever surrounds a request."""

from __future__ import annotations

import random

import numpy as np
import pytest
from engines import Counted, alone, copying_model, greedy, idle, llm, run, sampled, token_ids
from tiny import tiny_model

from ms_spec import LLM
from ms_spec.runtime import graph_thread, setup_mindspore

LENGTH = 256
KS = [1, 4, 15]


def model(name: str = "llama"):
    """ "llama" wanders and then loops, "copying" repeats itself more often than not."""
    return copying_model() if name == "copying" else tiny_model("llama", seed=0)


def plain(name: str = "llama") -> LLM:
    return llm(model(name), max_model_len=LENGTH)


def ngram(k: int = 4, name: str = "llama", **arguments) -> LLM:
    return llm(model(name), k=k, **{"max_model_len": LENGTH, **arguments})


def crowded(name: str = "llama") -> LLM:
    """A cache for hardly more than one request, and prompts in pieces of 7."""
    arguments = {"max_model_len": 112, "num_gpu_blocks_override": 9, "long_prefill_token_threshold": 7}
    return ngram(4, name, **arguments)


def prompts(lengths=(1, 3, 7, 16, 33, 64, 65, 100), vocab: int = 160) -> list[list[int]]:
    """Every second one repeats four ids, so that there is something to look up."""
    rng = np.random.default_rng(11)
    random_ids = [rng.integers(3, vocab, n).tolist() for n in lengths]
    return [[7, 9, 11, 13] * (n // 4) + [7, 9, 11][: n % 4] if i % 2 else random_ids[i] for i, n in enumerate(lengths)]


@pytest.mark.parametrize("name, k", [*(("llama", k) for k in KS), ("copying", 4)])
def test_greedy(name, k):
    wanted = alone(plain(name), prompts(), greedy(40))
    assert len({tuple(ids) for ids in wanted}) > 5
    engine = ngram(k, name)
    with Counted(engine) as did:
        assert alone(engine, prompts(), greedy(40)) == wanted
    assert did.accepted_tokens > 20
    assert did.accepted_tokens < did.draft_tokens  # both outcomes were there
    with Counted(engine) as did:
        assert run(engine, prompts(), greedy(40)) == wanted
    assert did.accepted_tokens > 20


def test_drafts_that_adapt():
    wanted = alone(plain("copying"), prompts(), greedy(60))
    engine = ngram(4, "copying", adaptive=True)
    with Counted(engine) as did:
        assert alone(engine, prompts(), greedy(60)) == wanted
        assert run(engine, prompts(), greedy(60)) == wanted
    assert did.accepted_tokens > 20


def test_plain_decoding_in_a_batch():
    assert run(plain(), prompts(), greedy(40)) == alone(plain(), prompts(), greedy(40))


def test_order_of_the_batch():
    wanted, engine = alone(plain(), prompts(), greedy()), ngram()
    for turn in range(5):
        order = random.Random(turn).sample(range(8), 8)
        assert run(engine, [prompts()[i] for i in order], greedy()) == [wanted[i] for i in order]


@pytest.mark.parametrize("chunk", [4, 64])
def test_chunks_of_the_prompt(chunk):
    long = prompts((1, 2, 3, 4, 5, 8, 12, 13, 63, 64, 65, 129, 200))
    wanted = alone(plain(), long, greedy(20))  # in chunks of up to 512
    engine = ngram(4, long_prefill_token_threshold=chunk)
    assert run(engine, long, greedy(20)) == wanted
    assert run(engine, long, greedy(20)) == wanted


@pytest.mark.parametrize("k", KS)
def test_prompts_about_as_long_as_a_verify_step(k):
    for length in range(1, k + 4):
        three = [[5] * length, [7, 9, 11, 13, *range(20, 40)][:length], list(range(90, 90 + length))]
        assert run(ngram(k), three, greedy(12)) == alone(plain(), three, greedy(12)), length


def test_after_preemptions():
    jobs = prompts((40, 41, 30, 33, 20, 48))
    wanted = alone(plain(), jobs, greedy(60))
    with Counted(crowded()) as did:
        assert run(crowded(), jobs, greedy(60)) == wanted
    assert did.preemptions > 3
    assert did.accepted_tokens > 20


def test_a_preemption_at_every_step():
    jobs = prompts((9, 12, 5))
    wanted = alone(plain("copying"), jobs, greedy(14))
    core = ngram(4, "copying")._engine
    step, left = 0, True
    while left:
        requests = [core.add_request(job, greedy(14)) for job in jobs]
        for at in range(1000):
            left = core.has_unfinished()
            if at == step and core.scheduler.running:
                core.scheduler._preempt(core.scheduler.running[step % len(core.scheduler.running)])
            if not left:
                break
            core.step()
        assert token_ids([request.output for request in requests]) == wanted, f"preempted at step {step}"
        left = at > step
        step += 1
    assert step > 5


@pytest.mark.parametrize("name", ["llama", "copying"])
def test_sampled_ids_are_those_of_plain_decoding(name):
    """The same numbers meet the same distributions, so that even samples are equal, token for token."""
    jobs = [prompts((24, 40))[seed % 2] for seed in range(50)]
    params = [sampled(seed, 40) for seed in range(50)]
    wanted = alone(plain(name), jobs, params)
    assert len({tuple(ids) for ids in wanted}) > 45
    engine = ngram(4, name)
    with Counted(engine) as did:
        assert alone(engine, jobs, params) == wanted
    assert did.draft_tokens > 100
    assert name == "llama" or did.accepted_tokens > 100
    assert run(engine, jobs, params) == wanted  # eight at a time
    with Counted(crowded(name)) as did:
        assert run(crowded(name), jobs, params) == wanted
    assert did.preemptions > 0


def test_greedy_and_sampled_requests_share_a_batch():
    params = [greedy(), sampled(1, temperature=1.0, top_p=1.0), greedy(), sampled(2, temperature=0.7), greedy()]
    params += [sampled(3, temperature=1e-3), sampled(4, top_k=5, top_p=1.0), sampled(5, min_p=0.2, top_p=1.0)]
    wanted = alone(plain("copying"), prompts(), params)
    assert run(ngram(4, "copying"), prompts(), params) == wanted
    assert wanted[0] == alone(plain("copying"), prompts()[:1], greedy())[0]


@pytest.mark.parametrize("fields", [{"top_k": 1, "top_p": 1.0}, {"top_p": 1e-6}, {"temperature": 1e-6}])
def test_filters_that_leave_one_token_are_greedy(fields):
    wanted = alone(plain("copying"), prompts(), greedy())
    assert run(ngram(4, "copying"), prompts(), sampled(1, **{"temperature": 1.0, **fields})) == wanted


def test_requests_with_drafts_of_their_own():
    most = [0, 1, 2, 3, 4, None, 0, 1]
    for params in (greedy(40), [sampled(seed, 40) for seed in range(8)]):
        wanted = alone(plain("copying"), prompts(), params)
        outputs = ngram(4, "copying").generate(prompts(), params, use_tqdm=False, num_speculative_tokens=most)
        assert token_ids(outputs) == wanted
        for output, k in zip(outputs, most):
            assert (output.metrics.num_draft_tokens > 0) == (k != 0)
            assert len(output.metrics.acceptance_per_position) <= (4 if k is None else k)
    with Counted(ngram(4, "copying")) as did:
        ngram(4, "copying").generate(prompts(), greedy(40), use_tqdm=False, num_speculative_tokens=0)
    assert did.draft_tokens == 0


@pytest.mark.parametrize(
    "given, words",
    [
        (5, "num_speculative_tokens = 5: must be an integer from 0 .no speculation. to 4, the engine's; nearest: 4"),
        (-1, "num_speculative_tokens = -1: .*nearest: 0"),
        ([1], "num_speculative_tokens has 1 entries for 2 prompts"),
        ([1, 9], r"num_speculative_tokens\[1\] = 9: .*nearest: 4"),
        (True, "num_speculative_tokens = True: must be"),
        ("2", "num_speculative_tokens = '2': must be"),
    ],
)
def test_drafts_of_their_own_that_cannot_be(given, words):
    with pytest.raises(ValueError, match=words):
        ngram(4, "copying").generate([[5], [6]], greedy(4), num_speculative_tokens=given)


def test_several_samples_of_a_prompt():
    job, params = prompts((24,)), sampled(9, 20, n=3)
    wanted = run(plain("copying"), job, params)
    assert len({tuple(ids) for ids in wanted}) == 3
    assert run(ngram(4, "copying"), job, params) == wanted
    assert run(crowded("copying"), job, params) == wanted
    assert wanted[0] == run(plain("copying"), job, sampled(9, 20))[0]  # the first is that of n = 1


def test_without_compiled_graphs():
    wanted, sampled_ids = alone(plain(), prompts(), greedy(12)), alone(plain(), prompts()[:3], sampled(3, 8))
    try:
        engine = ngram(4, enforce_eager=True)
        assert run(engine, prompts(), greedy(12)) == wanted
        assert run(engine, prompts()[:3], sampled(3, 8)) == sampled_ids
    finally:
        graph_thread().run(setup_mindspore, "cpu")


def with_rule(k: int = 3, **rule) -> LLM:
    return ngram(k, "copying", additional_config={"rejection_sampler_config": rule})


def test_block_verification_of_looked_up_drafts_is_plain_decoding():
    engine = with_rule(enable_block_verify=True)
    params = [sampled(seed) for seed in range(8)]
    assert run(engine, prompts(), params) == alone(plain("copying"), prompts(), params)


@pytest.mark.parametrize("block", [False, True])
def test_entropy_verification_is_reproducible_and_leaves_greedy_alone(block):
    engine = with_rule(enable_entropy_verify=True, enable_block_verify=block, posterior_alpha=0.1)
    assert run(engine, prompts(), greedy()) == alone(plain("copying"), prompts(), greedy())
    params = [sampled(seed) for seed in range(8)]
    with Counted(engine) as lossy:
        first = alone(engine, prompts(), params)
    assert alone(engine, prompts(), params) == first
    assert run(engine, prompts(), params) == first  # the neighbours do not matter
    with Counted(ngram(4, "copying")) as exact:
        alone(ngram(4, "copying"), prompts(), params)
    assert lossy.accepted_tokens > 0
    assert lossy.accepted_tokens / lossy.draft_tokens > exact.accepted_tokens / exact.draft_tokens


# The real model

TEXTS = [
    "Repeat this text: The cat sat on the mat and the dog sat on the log. The cat sat on the mat and the dog sat on",
    "def add(a, b):\n    return a + b\n\ndef add_three(a, b, c):\n    return a + b",
    "Name the planets of the solar system, one on each line.\n1. Mercury\n2. Venus\n3.",
    "Once",
]


def smollm2(k: int, **arguments) -> LLM:
    return llm("smollm2-135m", k=k, max_model_len=128, **arguments)


@pytest.fixture(scope="module")
def smollm2_engines():
    made = {
        "plain": smollm2(0, max_num_seqs=1),
        "4, crowded": smollm2(4, max_num_seqs=4, num_gpu_blocks_override=8, long_prefill_token_threshold=16),
        "15": smollm2(15, max_num_seqs=4),
    }
    yield made
    assert all(idle(engine) for engine in made.values())


@pytest.mark.parametrize("params", [greedy(32), sampled(1, 32), sampled(2, 32)], ids=["greedy", "seed 1", "seed 2"])
def test_smollm2(smollm2_engines, params):
    wanted = alone(smollm2_engines["plain"], TEXTS, params)
    with Counted(smollm2_engines["15"]) as did:
        assert alone(smollm2_engines["15"], TEXTS[:2], params) == wanted[:2]
        assert run(smollm2_engines["15"], TEXTS, params) == wanted
    assert did.accepted_tokens > 10
    with Counted(smollm2_engines["4, crowded"]) as did:
        assert run(smollm2_engines["4, crowded"], TEXTS * 2, params) == wanted * 2
    assert did.preemptions > 0
    assert did.accepted_tokens > 10
