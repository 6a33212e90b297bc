"""``async_scheduling``: steps that are planned while the one before them runs emit what they emit otherwise."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import mindspore as ms
import numpy as np
import pytest
import tiny_drafts as td
from engines import Counted, copying_model, llm
from engines import idle as nothing_held
from engines import run as ids_from
from proposals import engine, ids_of
from test_llm import make
from test_methods import LOUD, asked, params, target
from test_methods import wanted as plain_ids
from toy_runner import ToyDecoder, checked_step, finish, greedy, idle, reference, run, sampled, toy_engine

from ms_spec import LLM
from ms_spec.async_scheduling import obstacle, runs_ahead
from ms_spec.config import EngineConfig
from ms_spec.models.ops import plain_rows
from ms_spec.models.ops.cpu import layers

DRAFTERS = ("none", "ngram", "oracle", "oracle2", "junk")
PROMPTS = [[(7 * i + j * j) % 64 for j in range(3 + 4 * i)] for i in range(7)]


def jobs(most: int = 30):
    return [(prompt, sampled(i, most) if i % 2 else greedy(most)) for i, prompt in enumerate(PROMPTS)]


def wanted(job, **more):
    prompt, params = job
    return reference(prompt, params, seed=params.seed or 0, **more)


# The engine, on a model whose steps run as late as they can


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_equal_to_plain_decoding(drafter, tokens):
    for blocks in (129, 30):
        engine, toy = toy_engine(
            drafter, overlapped=True, adaptive=False, num_speculative_tokens=tokens, num_blocks=blocks, max_num_seqs=7
        )
        outputs = run(engine, jobs())
        assert [one.outputs[0].token_ids for one in outputs] == [wanted(job) for job in jobs()]
        preempted = sum(one.metrics.num_preemptions for one in outputs)
        assert toy.carried > 20
        assert (preempted > 0) == (blocks == 30)


def test_counts_are_those_of_what_ran():
    engine, toy = toy_engine("oracle2", overlapped=True, adaptive=False)
    (output,) = run(engine, [([5, 6, 7], greedy(40))])
    metrics = output.metrics
    rounds = toy.rounds[: metrics.num_steps]  # one more may have run for nothing
    assert len(toy.rounds) <= metrics.num_steps + 1
    assert metrics.num_draft_tokens == sum(drafted for _, drafted, _ in rounds)
    assert metrics.num_decode_tokens == 39 and sum(output.outputs[0].from_draft) <= metrics.num_accepted_tokens
    assert toy.carried == len(toy.rounds)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 6])
def test_never_more_than_max_tokens(most):
    for drafter in DRAFTERS:
        engine, _ = toy_engine(drafter, overlapped=True, num_speculative_tokens=5)
        (output,) = run(engine, [([9, 8, 7], greedy(most))])
        assert output.outputs[0].token_ids == reference([9, 8, 7], greedy(most))
        assert output.outputs[0].finish_reason == "length"


def test_up_to_max_model_len():
    for drafter in ("none", "oracle", "oracle2"):
        engine, _ = toy_engine(drafter, overlapped=True, max_model_len=64, num_speculative_tokens=5)
        for length in range(50, 64):
            prompt = [(3 * i) % 64 for i in range(length)]
            (output,) = run(engine, [(prompt, greedy(None))])
            assert output.outputs[0].token_ids == reference(prompt, greedy(None), max_model_len=64)
            assert len(output.outputs[0].token_ids) == 64 - length


def test_stops_in_the_middle_of_a_step():
    for drafter in ("none", "oracle"):
        engine, _ = toy_engine(drafter, overlapped=True, text=True, eos=(3, 5), num_speculative_tokens=5)
        plain = [reference(prompt, greedy(40), eos=(3, 5)) for prompt in PROMPTS]
        stop = ToyDecoder.text(plain[1][6])
        outputs = run(engine, [(prompt, greedy(40, stop=[stop])) for prompt in PROMPTS])
        for ids, output in zip(plain, outputs):
            kept = output.outputs[0].token_ids
            assert kept == ids[: len(kept)] and (len(kept) == len(ids) or output.outputs[0].stop_reason == stop)
        assert outputs[1].outputs[0].finish_reason == "stop"


def test_several_samples():
    params = sampled(9, 24, n=3)
    for blocks in (129, 21):
        engine, _ = toy_engine(overlapped=True, num_blocks=blocks)
        (output,) = run(engine, [(PROMPTS[2], params)])
        assert [one.token_ids for one in output.outputs] == [
            reference(PROMPTS[2], params, seed=9, sample=i) for i in range(3)
        ]


def test_abort_with_a_step_in_flight():
    for steps in (0, 1, 2, 3, 5):
        engine, _ = toy_engine("oracle", overlapped=True, max_num_seqs=2, num_blocks=41)
        requests = [engine.add_request([i, 4, 5], greedy(40)) for i in range(5)]
        for _ in range(steps):
            checked_step(engine)
        for request in requests[::2]:
            engine.abort(request.output.request_id)
            assert request.output.outputs[0].finish_reason == "abort"
        late = engine.add_request([9, 9, 9], greedy(10))  # gets blocks and a slot that the step in flight writes to
        finish(engine)
        for i in (1, 3):
            assert requests[i].output.outputs[0].token_ids == reference([i, 4, 5], greedy(40))
        assert late.output.outputs[0].token_ids == reference([9, 9, 9], greedy(10))
        engine.add_request([1, 2], greedy(40))
        checked_step(engine)
        engine.abort_all()
        idle(engine)
        assert not engine.has_unfinished() and engine.step() == []


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_model_failure_ends_all_and_leaves_a_usable_engine(call):
    engine, toy = toy_engine(overlapped=True, max_num_seqs=2)
    toy.fail_at = call
    outputs = run(engine, [([5, 6, i], greedy()) for i in range(4)])
    assert {output.error for output in outputs} == {"the model failed: RuntimeError: out of luck"}
    assert run(engine, [([5, 6], greedy())])[0].outputs[0].token_ids == reference([5, 6], greedy())


def test_not_finite_logits_end_one_request():
    engine, toy = toy_engine("oracle", overlapped=True)
    toy.poison, toy.poison_at = 1, 6
    outputs = run(engine, jobs(20))
    assert [one.outputs[0].finish_reason for one in outputs] == ["length", "error", *["length"] * 5]
    assert outputs[1].outputs[0].token_ids == wanted(jobs(20)[1])[:6]


def test_the_gate_gives_up_on_bad_drafts():
    engine, _ = toy_engine("junk", overlapped=True)
    (output,) = run(engine, [([5, 6, 7], greedy(100))])
    assert output.outputs[0].token_ids == reference([5, 6, 7], greedy(100))
    assert output.metrics.num_draft_tokens < 80


# What a step leaves for the next one, on the device


def carried_on(history, carry, slot, tokens, start, carried, uniforms):
    """One request at a time, written out."""
    tokens, start, uniforms = tokens.copy(), start.copy(), uniforms.copy()
    for i in np.flatnonzero(carried):
        length, *drafts = carry[slot[i]].tolist()
        known = [history[slot[i], length - 1], *drafts]
        room = history.shape[1] - 1 - (length - 1)
        count = min((tokens[i] >= 0).sum(), [*known, -1].index(-1), max(room, 0))
        tokens[i] = [*known[:count], *[-1] * (tokens.shape[1] - count)]
        shift = length - 1 - start[i]
        uniforms[i, : tokens.shape[1]] = uniforms[i, shift : shift + tokens.shape[1]]
        start[i] = length - 1
    return tokens, start, uniforms


@pytest.mark.parametrize("make", [plain_rows.ReadCarry, layers.ReadCarry])
@pytest.mark.parametrize("k, w", [(0, 1), (1, 1), (1, 2), (4, 1), (4, 5), (15, 16)])
def test_reading_the_carry(make, k, w):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    rng = np.random.default_rng(k + w)
    slots, size, n = 6, 41, 5
    history = rng.integers(0, 100, (slots, size)).astype(np.int32)
    carry = np.concatenate([rng.integers(20, size, (slots, 1)), rng.integers(0, 100, (slots, k))], 1).astype(np.int32)
    carry[1, 0], carry[2, 0] = size - 1, size  # one place left, and none
    for row in carry[3:]:
        row[1 + rng.integers(0, k + 1) :] = -1
    slot = np.array([1, 5, 2, 3, 4], np.int32)
    carried = np.array([1, 0, 1, 1, 1], np.int32)
    start = (carry[slot, 0] - 1 - rng.integers(0, k + 1, n)).astype(np.int32)
    tokens = rng.integers(0, 100, (n, w)).astype(np.int32)
    tokens[4, rng.integers(1, w + 1) :] = -1
    given = history, carry, slot, tokens, start, carried, rng.random((n, w + k), np.float32)
    got = make()(*map(ms.Tensor, given))
    for one, right in zip(got, carried_on(*given)):
        assert np.array_equal(one.asnumpy(), right)
    ms.set_context(mode=ms.GRAPH_MODE)


# LLMs

SIZES = {"max_num_seqs": 8, "max_model_len": 112, "long_prefill_token_threshold": 16}
FEW = {"num_gpu_blocks_override": 9}
METHODS = {
    "none": (None, lambda k: None),
    "ngram": ("ngram", lambda k: None),
    "eagle3": ("eagle3", lambda k: td.eagle3(draft_vocab=48, loud=LOUD, aux_ids=(0, 1, 2))),
    "draft_model": ("draft_model", lambda k: td.draft_model(loud=LOUD, layers=1)),
    "medusa": ("medusa", lambda k: td.medusa(loud=LOUD, heads=max(k, 2))),
}
CASES = [("none", 0), *((method, k) for method in ("ngram", "eagle3", "draft_model", "medusa") for k in (1, 4))]


def made(method: str, k: int, **more) -> LLM:
    name, draft = METHODS[method]
    extra = {"speculative": {"prompt_lookup_min": 1, "prompt_lookup_max": 3}} if name == "ngram" else {}
    one_batch = {"compilation_config": {"cudagraph_capture_sizes": [8 * (k + 1)]}}
    return engine(target(), name, draft(k), k, **{**SIZES, **one_batch, **extra, "async_scheduling": True, **more})


@contextmanager
def carried(llm: LLM) -> Iterator[list[int]]:
    """How many requests of each decode step were handed over before the host knew what they begin with."""
    runner, counts = llm._engine._runner, []
    decode = runner.decode

    def watched(works):
        counts.append(sum(work.carried for work in works))
        return decode(works)

    runner.decode = watched
    try:
        yield counts
    finally:
        runner.decode = decode


@pytest.mark.parametrize(("method", "k"), CASES)
def test_ids_are_those_of_plain_decoding(method, k):
    """Greedy and sampled requests, more than fit: what is preempted is read again."""
    ahead = made(method, k, **FEW)
    before = compiled(ahead)
    with carried(ahead) as counts:
        assert ids_of(ahead, asked(), params()) == plain_ids(target)
        assert sum(counts) > 0
        counts.clear()
        for i in (0, 3):
            assert ids_of(ahead, [asked()[i]], [params()[i]]) == [plain_ids(target)[i]]
        assert set(counts) == {1}  # nothing is in the way of a single request
    metrics = ahead.metrics()
    assert metrics.num_preemptions > 0 and (metrics.num_draft_tokens > 0) == (k > 0)
    assert compiled(ahead) == before
    assert nothing_held(ahead)
    ahead.close()


def compiled(llm: LLM) -> tuple[int, int]:
    runner = llm._engine._runner
    return runner.num_compiled, sum(len(step.compile_cache) for step in runner._steps.values())


def both(**more) -> tuple[LLM, LLM]:
    """N-grams on a model that repeats itself: with ``async_scheduling`` and without."""
    return tuple(llm(copying_model(), k=4, max_model_len=128, **more, **on) for on in ({}, {"async_scheduling": True}))


REPEATING = [[7, 9, 11, 13] * 5, list(range(20, 60)), [21, 22, 23] * 3, [5], [90, 91, 92, 93, 94] * 14, [8] * 9]


def test_what_requests_want_of_their_logits_and_are_told():
    settled, ahead = both()
    wishes = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logprobs": 3}
    asked = [
        greedy(30, ignore_eos=True, **wishes),
        sampled(1, 30, ignore_eos=True, prompt_logprobs=2, **wishes),
        greedy(30, ignore_eos=True, logit_bias={5: 4.0}, logprobs=0),
        sampled(2, 30, ignore_eos=True, allowed_token_ids=[5, 6, 7, 8, 9], min_tokens=5),
        sampled(3, 30, ignore_eos=True, n=2),
        greedy(30, ignore_eos=True),
    ]
    with Counted(ahead) as did, carried(ahead) as counts:
        outputs = [one.generate(REPEATING, asked, use_tqdm=False) for one in (settled, ahead)]
    assert did.accepted_tokens > 10 and sum(counts) > 20
    for one, other in zip(*outputs):
        assert one.prompt_logprobs == other.prompt_logprobs
        for a, b in zip(one.outputs, other.outputs):
            assert (a.token_ids, a.logprobs, a.cumulative_logprob) == (b.token_ids, b.logprobs, b.cumulative_logprob)


def test_answers_that_end_where_the_context_does():
    settled, ahead = both()
    prompts = [[7, 9, 11, 13] * (length // 4) for length in (96, 112, 120, 124)]
    for one in (greedy(None, ignore_eos=True), sampled(4, None, ignore_eos=True)):
        ids = ids_from(ahead, prompts, one)
        assert ids == ids_from(settled, prompts, one)
        assert [len(x) for x in ids] == [128 - len(prompt) for prompt in prompts]


def test_streams_grow_and_can_be_left():
    _, ahead = both()
    whole = ids_from(ahead, REPEATING, greedy(20, ignore_eos=True))
    seen: dict[int, list[int]] = {}
    for place, output in ahead.stream(REPEATING, greedy(20, ignore_eos=True)):
        ids = output.outputs[0].token_ids
        assert ids[: len(seen.get(place, []))] == seen.get(place, [])
        seen[place] = list(ids)
    assert [seen[i] for i in range(len(REPEATING))] == whole
    for _ in ahead.stream(REPEATING, greedy(20, ignore_eos=True)):
        break
    assert nothing_held(ahead)
    assert ids_from(ahead, REPEATING, greedy(20, ignore_eos=True)) == whole


def test_threads_take_turns():
    """On a toy model. Nobody waits until somebody else's requests are done."""
    llm = make(carries=True)
    got, order = {}, []

    def work(number: int, most: int) -> None:
        outputs = llm.generate([[number, i] for i in range(2)], greedy(most), use_tqdm=False)
        got[number] = [one.outputs[0].token_ids for one in outputs]
        order.append(number)

    threads = [threading.Thread(target=work, args=(n, most)) for n, most in enumerate((110, 20, 3, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for n, most in enumerate((110, 20, 3, 3)):
        assert got[n] == [reference([n, i], greedy(most)) for i in range(2)]
    assert llm._engine._runner.carried > 20
    idle(llm._engine)


def test_a_model_that_fails_hangs_nobody():
    llm = make(carries=True)
    llm._parts.runner.fail_at = 3
    outputs = llm.generate([[1, 2], [3, 4]], greedy(20))
    assert {one.error for one in outputs} == {"the model failed: RuntimeError: out of luck"}
    assert llm.generate([1, 2], greedy(5))[0].outputs[0].token_ids == reference([1, 2], greedy(5))
    llm.close()


NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
IN_THE_WAY = [
    ({"enforce_eager": True}, "enforce_eager"),
    ({"compilation_config": {"cudagraph_mode": "NONE"}}, "cudagraph_mode NONE"),
    ({"device": "ascend", "model_impl": "mindformers"}, "model_impl = 'mindformers'"),
    ({"speculative_config": {**NGRAM, "method": "suffix"}}, "'suffix' the host drafts"),
    (
        {"speculative_config": {**NGRAM, "method": "eagle", "model": "x", "draft_sample_method": "probabilistic"}},
        "draft_sample_method = 'probabilistic'",
    ),
    ({"additional_config": {"rejection_sampler_config": {"enable_entropy_verify": True}}}, "enable_entropy_verify"),
]


@pytest.mark.parametrize(("arguments", "words"), IN_THE_WAY)
def test_where_the_host_cannot_run_ahead(arguments, words):
    config = EngineConfig.parse(async_scheduling=True, **arguments)
    assert words in obstacle(config) and not runs_ahead(config)


def test_where_it_can():
    for arguments in ({}, {"speculative_config": NGRAM}, {"speculative_config": {**NGRAM, "method": "mtp"}}):
        assert runs_ahead(EngineConfig.parse(async_scheduling=True, **arguments))
        assert not runs_ahead(EngineConfig.parse(**arguments))
    block = {"additional_config": {"rejection_sampler_config": {"enable_block_verify": True}}}
    assert runs_ahead(EngineConfig.parse(async_scheduling=True, speculative_config=NGRAM, **block))


def test_it_says_so_and_goes_on_without(caplog):
    with caplog.at_level(logging.WARNING, "ms_spec"):
        slow = engine(target(), "suffix", None, 4, async_scheduling=True, **{**SIZES, "max_num_seqs": 1})
    (line,) = [one.getMessage() for one in caplog.records if "async_scheduling" in one.getMessage()]
    assert line.startswith("async_scheduling = true has no effect: with method 'suffix' the host drafts")
    assert ids_of(slow, asked()[:2], params()[:2]) == plain_ids(target)[:2]
    slow.close()
