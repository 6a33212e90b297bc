"""The engine against a toy model: whatever happens around a request, its tokens are those of plain decoding."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_runner import (
    VOCAB,
    ToyDecoder,
    ToyRunner,
    checked_step,
    digest,
    finish,
    greedy,
    idle,
    reference,
    run,
    sampled,
    toy_engine,
    toy_limits,
)

from ms_spec.errors import RequestError
from ms_spec.sampling_params import SamplingParams

DRAFTERS = ["none", "ngram", "oracle", "oracle2", "junk", "alternate"]


def prompt_of(length: int, salt: int = 0) -> list[int]:
    if salt % 3 == 0:
        return [(7, 9, 11, 13)[i % 4] for i in range(length)]
    return [digest("prompt", salt, i) % VOCAB for i in range(length)]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("tokens", [1, 2, 4, 15])
def test_equal_to_plain_decoding(drafter, tokens):
    engine, _ = toy_engine(drafter, num_speculative_tokens=tokens, adaptive=False)
    jobs = [(prompt_of(n, n), greedy(30) if n % 2 else sampled(n, 30)) for n in (1, 3, 7, 16, 33, 64, 65, 90)]
    for (prompt, params), output in zip(jobs, run(engine, jobs)):
        assert output.outputs[0].token_ids == reference(prompt, params, seed=params.seed or 0)


def test_order_of_the_batch_does_not_matter():
    jobs = [(prompt_of(n, n), greedy(25)) for n in (1, 3, 7, 16, 33, 64, 65, 90)]
    wanted = [reference(*job) for job in jobs]
    for turn in range(5):
        order = random.Random(turn).sample(range(len(jobs)), len(jobs))
        engine, _ = toy_engine()
        got = run(engine, [jobs[i] for i in order])
        assert [output.outputs[0].token_ids for output in got] == [wanted[i] for i in order]


@pytest.mark.parametrize("tokens", range(1, 7))
def test_prompt_as_long_as_a_verify_step(tokens):
    for length in range(1, tokens + 4):
        engine, _ = toy_engine("oracle2", num_speculative_tokens=tokens)
        jobs = [(prompt_of(length, salt), greedy(12)) for salt in range(3)]
        for job, output in zip(jobs, run(engine, jobs)):
            assert output.outputs[0].token_ids == reference(*job)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 6, 7])
def test_never_more_than_max_tokens(max_tokens):
    for drafter in DRAFTERS:
        engine, _ = toy_engine(drafter, num_speculative_tokens=5)
        (output,) = run(engine, [(prompt_of(12), greedy(max_tokens, ignore_eos=True))])
        assert output.outputs[0].token_ids == reference(prompt_of(12), greedy(max_tokens))
        assert len(output.outputs[0].token_ids) == max_tokens
        assert output.outputs[0].finish_reason == "length"


def test_up_to_max_model_len():
    engine, _ = toy_engine("oracle", max_model_len=64, num_speculative_tokens=5)
    for length in range(40, 64):
        (output,) = run(engine, [(prompt_of(length, length), greedy(None, ignore_eos=True))])
        wanted = reference(prompt_of(length, length), greedy(None), max_model_len=64)
        assert output.outputs[0].token_ids == wanted
        assert len(wanted) == 64 - length
        assert output.outputs[0].finish_reason == "length"
    for length in (64, 65):
        with pytest.raises(RequestError, match=rf"{length} tokens.*max_model_len = 64"):
            engine.add_request(prompt_of(length), greedy())
    idle(engine)
    assert run(engine, [(prompt_of(5), greedy())])[0].outputs[0].token_ids == reference(prompt_of(5), greedy())


def test_tiny_chunks():
    for length in range(1, 14):
        engine, _ = toy_engine(prefill_chunk=4)
        jobs = [(prompt_of(length, length), greedy(9))] * 3
        for output in run(engine, jobs):
            assert output.outputs[0].token_ids == reference(*jobs[0])


@pytest.mark.parametrize("seqs", [1, 2, 4])
@pytest.mark.parametrize("budget", [5, 8, 16])
def test_budget_counts_drafts(seqs, budget):
    engine, _ = toy_engine("oracle", max_num_seqs=seqs, max_num_batched_tokens=budget)
    jobs = [(prompt_of(1 + 5 * i, i), greedy(3 + 2 * i)) for i in range(12)]
    requests = [engine.add_request(*job) for job in jobs]
    steps = 0
    while engine.has_unfinished():
        before = sum(len(seq.tokens) + seq.computed for r in requests for seq in r.sequences)
        checked_step(engine)
        after = sum(len(seq.tokens) + seq.computed for r in requests for seq in r.sequences)
        steps += 1
        assert after > before, "a step without progress"
    for job, request in zip(jobs, requests):
        assert request.output.outputs[0].token_ids == reference(*job)
    idle(engine)


def test_budget_as_small_as_the_batch():
    engine, _ = toy_engine("oracle", max_num_seqs=4, max_num_batched_tokens=4)
    jobs = [(prompt_of(9, i), greedy(15)) for i in range(6)]
    for job, output in zip(jobs, run(engine, jobs)):
        assert output.outputs[0].token_ids == reference(*job)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_preemption(drafter):
    # Room for about three of six requests.
    engine, runner = toy_engine(drafter, max_num_seqs=6, num_blocks=3 * 13 + 1, adaptive=False)
    jobs = [(prompt_of(10 + i, i), greedy(40) if i % 2 else sampled(i, 40)) for i in range(6)]
    outputs = run(engine, jobs)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for (prompt, params), output in zip(jobs, outputs):
        assert output.outputs[0].token_ids == reference(prompt, params, seed=params.seed or 0)
    if drafter == "oracle":
        assert all(drafted == accepted for _, drafted, accepted in runner.rounds)


@pytest.mark.parametrize("drafter", ["ngram", "oracle"])
def test_preempted_at_every_step(drafter):
    job = (prompt_of(9, 1), greedy(24))
    for step in range(14):
        engine, _ = toy_engine(drafter, prefill_chunk=4)
        request = engine.add_request(*job)
        engine.add_request(prompt_of(5, 3), greedy(10))
        got: list[int] = []
        for now in range(100):
            if now == step and request.sequences[0] in engine.scheduler.running:
                engine.scheduler._preempt(request.sequences[0])
            for delta in engine.step():
                if delta.request is request.output:
                    got += delta.token_ids
            if not engine.has_unfinished():
                break
        assert got == request.output.outputs[0].token_ids == reference(*job)
        idle(engine)


def test_resume_with_a_verify_step_left_to_recompute():
    for tokens in range(1, 7):
        engine, _ = toy_engine("oracle", num_speculative_tokens=tokens, adaptive=False)
        job = (prompt_of(1, 1), greedy(20))
        request = engine.add_request(*job)
        seq = request.sequences[0]
        while len(seq.tokens) < tokens + 2:
            engine.step()
        engine.scheduler._preempt(seq)
        finish(engine)
        assert request.output.outputs[0].token_ids == reference(*job)


def test_all_rejected_then_all_accepted():
    engine, runner = toy_engine("alternate", adaptive=False)
    run(engine, [(prompt_of(10, 1), greedy(60))])
    full = [accepted for _, drafted, accepted in runner.rounds if accepted]
    assert {0, 4} <= {accepted for _, _, accepted in runner.rounds}
    assert all(accepted == 4 for accepted in full[:-1])


def test_mixed_batch_with_arrivals_in_flight():
    kinds = [greedy(30), sampled(1, 30), greedy(25), sampled(2, 20), greedy(30), sampled(3, 25)]
    jobs = [(prompt_of(4 + 3 * i, i), params) for i, params in enumerate(kinds)]
    engine, _ = toy_engine(max_num_seqs=6)
    requests = []
    for prompt, params in jobs:
        requests.append(engine.add_request(prompt, params))
        checked_step(engine)
        checked_step(engine)
    finish(engine)
    for (prompt, params), request in zip(jobs, requests):
        assert request.output.outputs[0].token_ids == reference(prompt, params, seed=params.seed or 0)


def test_seeds():
    job = (prompt_of(6, 2), sampled(42, 32))
    wanted = reference(*job, seed=42)
    for others in (0, 1, 7):
        engine, _ = toy_engine(max_num_seqs=8)
        extra = [(prompt_of(5 + i, i), sampled(i, 20)) for i in range(others)]
        assert run(engine, [*extra, job])[-1].outputs[0].token_ids == wanted
        assert run(engine, [job])[0].outputs[0].token_ids == wanted
    other = run(toy_engine()[0], [(job[0], sampled(43, 32))])
    assert other[0].outputs[0].token_ids != wanted


def test_no_seed():
    plain = SamplingParams(temperature=1.0, max_tokens=32)
    engine, _ = toy_engine()
    first, second = run(engine, [(prompt_of(6, 2), plain)] * 2)
    assert first.outputs[0].token_ids != second.outputs[0].token_ids
    seeded = []
    for _ in range(2):
        engine, _ = toy_engine()
        engine._seed = 5
        seeded.append([o.outputs[0].token_ids for o in run(engine, [(prompt_of(6, 2), plain)] * 2)])
    assert seeded[0] == seeded[1]
    assert seeded[0][0] != seeded[0][1]


def test_several_samples():
    params = sampled(9, 24, n=3)
    for blocks in (129, 21):
        engine, _ = toy_engine(num_blocks=blocks)
        (output,) = run(engine, [(prompt_of(6, 2), params)])
        wanted = [reference(prompt_of(6, 2), params, seed=9, sample=i) for i in range(3)]
        assert [one.token_ids for one in output.outputs] == wanted
        assert [one.index for one in output.outputs] == [0, 1, 2]
        assert len({tuple(one.token_ids) for one in output.outputs}) == 3
        assert output.metrics.num_decode_tokens == 3 * 23


def test_not_finite_logits_end_one_request():
    engine, runner = toy_engine("oracle", eos=(3,))
    runner.poison, runner.poison_at = 77, 6
    jobs = [(prompt_of(5, i), sampled(77 if i == 1 else i, 20)) for i in range(3)]
    outputs = run(engine, jobs)
    assert [output.outputs[0].finish_reason for output in outputs][1] == "error"
    assert outputs[1].outputs[0].token_ids == reference(*jobs[1], seed=77)[:6]
    assert "not finite" in outputs[1].error
    for i in (0, 2):
        assert outputs[i].outputs[0].token_ids == reference(*jobs[i], eos=(3,), seed=i)
        assert outputs[i].error is None
    assert run(engine, [(prompt_of(5), greedy())])[0].outputs[0].token_ids == reference(prompt_of(5), greedy(), (3,))


def test_model_failure_ends_all_and_leaves_a_usable_engine():
    engine, runner = toy_engine(max_num_seqs=2)
    runner.fail_at = 3
    outputs = run(engine, [(prompt_of(5 + i, i), greedy()) for i in range(4)])
    assert all(output.outputs[0].finish_reason == "error" for output in outputs)
    assert outputs[0].error == "the model failed: RuntimeError: out of luck"
    assert run(engine, [(prompt_of(5), greedy())])[0].outputs[0].token_ids == reference(prompt_of(5), greedy())


def test_abort():
    engine, _ = toy_engine(max_num_seqs=2)
    for steps in (0, 1, 2, 5):
        requests = [engine.add_request(prompt_of(20, i), greedy(50)) for i in range(4)]
        for _ in range(steps):
            checked_step(engine)
        for request in requests[::2]:
            engine.abort(request.output.request_id)
            engine.abort(request.output.request_id)
            assert request.output.outputs[0].finish_reason == "abort"
        finish(engine)
        for i in (1, 3):
            assert requests[i].output.outputs[0].token_ids == reference(prompt_of(20, i), greedy(50))
    engine.abort("nobody")
    engine.add_request(prompt_of(20), greedy(50))
    engine.abort_all()
    idle(engine)


def test_refused_requests_leave_no_trace():
    engine, _ = toy_engine(num_blocks=11)
    for prompt, params, words in [
        ([], greedy(), "prompt is empty"),
        ([1, VOCAB], greedy(), r"prompt_token_ids\[1\] = 64.*size 64"),
        ([1, -1], greedy(), r"prompt_token_ids\[1\] = -1"),
        ([1, "a"], greedy(), r"prompt_token_ids\[1\] = .a.: must be a token id"),
        ([1] * 200, greedy(), "200 tokens.*max_model_len = 128"),
        ([1], greedy(stop_token_ids=[99]), r"stop_token_ids\[0\] = 99"),
        ([1], greedy(stop="x"), "no tokenizer"),
        ([1] * 20, greedy(90), "needs 28 KV blocks.*there are 10"),
        ([1], {"temperature": 0}, "must be SamplingParams, not dict"),
    ]:
        with pytest.raises(RequestError, match=words):
            engine.add_request(prompt, params)
    idle(engine)
    assert not engine.has_unfinished()
    assert engine.metrics().num_requests == 0


def test_fewer_drafts_with_more_requests():
    table = ((1, 2, 4), (3, 3, 1), (4, 99, 0))
    engine, runner = toy_engine("oracle", tokens_by_batch=table, adaptive=False)
    jobs = [(prompt_of(5, i), greedy(30)) for i in range(4)]
    outputs = run(engine, jobs)
    for job, output in zip(jobs, outputs):
        assert output.outputs[0].token_ids == reference(*job)
    assert sum(drafted for _, drafted, _ in runner.rounds[:40]) == 0


def test_deltas_make_the_whole():
    engine, _ = toy_engine("oracle", text=True)
    requests = [engine.add_request(prompt_of(7, i), greedy(30, stop=["zz"])) for i in range(3)]
    text, ids = {}, {}
    while engine.has_unfinished():
        for delta in checked_step(engine):
            key = id(delta.request)
            text[key] = text.get(key, "") + delta.text
            ids[key] = ids.get(key, []) + delta.token_ids
    for request in requests:
        out = request.output.outputs[0]
        assert text[id(request.output)] == out.text == "".join(map(ToyDecoder.text, out.token_ids))
        assert ids[id(request.output)] == out.token_ids
        assert len(out.from_draft) == len(out.token_ids)
        assert sum(out.from_draft) == request.output.metrics.num_accepted_tokens


JOBS = st.lists(
    st.tuples(
        st.integers(1, 40),  # prompt length
        st.integers(0, 8),  # salt
        st.integers(1, 40),  # max_tokens
        st.one_of(st.none(), st.integers(0, 3)),  # seed; None: greedy
        st.integers(0, 12),  # step of arrival
        st.one_of(st.none(), st.integers(0, 20)),  # step of abort
        st.integers(0, 6),  # min_tokens
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    jobs=JOBS,
    drafter=st.sampled_from(DRAFTERS),
    tokens=st.integers(0, 6),
    seqs=st.integers(1, 5),
    extra_budget=st.integers(0, 20),
    blocks=st.integers(20, 60),
    chunk=st.integers(1, 16),
    adaptive=st.booleans(),
    overlapped=st.booleans(),
    ahead=st.booleans(),
)
def test_anything_goes(jobs, drafter, tokens, seqs, extra_budget, blocks, chunk, adaptive, overlapped, ahead):
    limits = toy_limits(
        max_model_len=80,
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + extra_budget,
        num_blocks=blocks + 1,
        prefill_chunk=chunk,
        num_speculative_tokens=tokens,
        lookahead=tuple(range(tokens + 1)) if ahead else (),
    )
    runner = ToyRunner(limits, drafter)
    engine, _ = toy_engine(runner=runner, eos=(3, 5), adaptive=adaptive, overlapped=overlapped, **vars(limits))
    requests = {}
    for now in range(10_000):
        for number, (length, salt, most, seed, arrival, _, least) in enumerate(jobs):
            if arrival == now:
                fields = {"max_tokens": most, "min_tokens": min(least, most)}
                params = greedy(**fields) if seed is None else sampled(seed, **fields)
                requests[number] = (
                    prompt_of(length, salt),
                    params,
                    engine.add_request(prompt_of(length, salt), params),
                )
        for number, job in enumerate(jobs):
            if job[5] == now and number in requests:
                engine.abort(requests[number][2].output.request_id)
        if engine.has_unfinished():
            checked_step(engine)
        elif len(requests) == len(jobs):
            break
    idle(engine)
    for prompt, params, request in requests.values():
        wanted = reference(prompt, params, eos=(3, 5), seed=params.seed or 0, max_model_len=80)
        out = request.output.outputs[0]
        if out.finish_reason == "abort":
            assert out.token_ids == wanted[: len(out.token_ids)]
        else:
            assert out.token_ids == wanted
            assert out.finish_reason == (
                "stop" if wanted[-1] in (3, 5) and len(wanted) > params.min_tokens else "length"
            )
