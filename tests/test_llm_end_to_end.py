"""One LLM from prompt to output on a compiled model with drafts: stops, limits, failures, threads, accounts."""

from __future__ import annotations

import threading

import mindspore as ms
import numpy as np
import pytest
from engines import Counted, alone, copying_model, counting_model, greedy, idle, llm, run, sampled, token_ids
from safetensors.torch import load_file, save_file
from tiny import copy_of, new_folder, tiny_model, tiny_tokenizer

from ms_spec import LLM, SamplingParams
from ms_spec.errors import EngineError

K = 5
LOOP = [7, 9, 11, 13] * 6


def plain(**arguments) -> LLM:
    return llm(copying_model(), **{"max_model_len": 128, "max_num_seqs": 1, **arguments})


def ngram(**arguments) -> LLM:
    return llm(copying_model(), k=K, **{"max_model_len": 128, "max_num_seqs": 4, **arguments})


def prompts(n: int = 4) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [LOOP, *(rng.integers(3, 160, 10 + i).tolist() for i in range(n - 1))]


# Limits and stops


@pytest.mark.parametrize("most", [1, 2, 3, K, K + 1, K + 2])
def test_max_tokens_are_exact(most):
    wanted = run(plain(), [LOOP], greedy(40))[0]
    with Counted(ngram()) as did:
        output = ngram().generate([LOOP], greedy(most), use_tqdm=False)[0]
    assert output.outputs[0].token_ids == wanted[:most]
    assert output.outputs[0].finish_reason == "length"
    assert did.decode_tokens == most - 1


def test_stop_tokens_inside_accepted_drafts():
    """The prompt counts up to 60, then begins again: everything said was drafted, in blocks of K."""
    engine, prompt = llm(counting_model(), k=K, max_model_len=128, max_num_seqs=1), [*range(10, 60), 3, 8, 9]
    full = engine.generate([prompt], greedy(20), use_tqdm=False)[0].outputs[0]
    wanted = list(range(10, 30))
    assert full.token_ids == wanted
    assert sum(full.from_draft) >= 15
    for place in range(1, 15):
        stop = [wanted[place]]
        for most, end, reason in (
            (20, place + 1, "stop"),
            (place + 1, place + 1, "stop"),  # as the last one allowed it still counts as a stop
            (place, place, "length"),  # here the limit comes first
        ):
            output = engine.generate([prompt], greedy(most, stop_token_ids=stop), use_tqdm=False)[0]
            one = output.outputs[0]
            assert (one.token_ids, one.finish_reason) == (wanted[:end], reason)
            assert one.stop_reason == (stop[0] if reason == "stop" else None)
            assert full.text.startswith(one.text)
            assert output.metrics.num_accepted_tokens == sum(one.from_draft) <= output.metrics.num_draft_tokens
            assert output.metrics.num_decode_tokens == end - 1
    assert idle(engine)


def eos_model():
    """The copying model with its favourite token as EOS, and the id and the place where that stands in its output."""
    wanted = run(plain(), [LOOP], greedy(60))[0]
    full = ngram().generate([LOOP], greedy(60), use_tqdm=False)[0].outputs[0]
    # A token that first comes, or comes again, as an accepted draft with more accepted drafts behind it.
    place = next(i for i in range(3, 58) if full.from_draft[i] and full.from_draft[i + 1] and wanted[i] != wanted[0])
    return wanted, wanted[place], wanted.index(wanted[place])


def test_eos():
    wanted, eos, place = eos_model()
    path = copy_of(copying_model())
    (path / "generation_config.json").write_text(f'{{"eos_token_id": [2, {eos}]}}')
    engine = llm(path, k=K, max_model_len=128, max_num_seqs=2)
    one = engine.generate([LOOP], greedy(60, ignore_eos=False), use_tqdm=False)[0].outputs[0]
    assert (one.token_ids, one.finish_reason, one.stop_reason) == (wanted[: place + 1], "stop", None)
    one = engine.generate([LOOP], greedy(60), use_tqdm=False)[0].outputs[0]
    assert one.token_ids == wanted and one.finish_reason == "length"
    assert wanted.count(eos) > 1

    # min_tokens holds every stop id back: the same with and without drafts, and nothing stops too early.
    plain_engine = llm(path, max_model_len=128, max_num_seqs=1)
    params = greedy(40, ignore_eos=False, min_tokens=10)
    with Counted(engine) as did:
        held = run(engine, [LOOP], params)[0]
    assert held == run(plain_engine, [LOOP], params)[0]
    assert did.draft_tokens > 0
    assert not {2, eos} & set(held[:10]) and len(held) >= 10
    assert len(held) == 40 or held[-1] in (2, eos)


def test_stop_strings():
    full = ngram().generate([LOOP], greedy(40), use_tqdm=False)[0].outputs[0]
    assert any(full.from_draft)
    for begin in range(2, len(full.text) - 6, 5):
        stop = full.text[begin : begin + 4]
        one = ngram().generate([LOOP], greedy(40, stop=["never to be seen", stop]), use_tqdm=False)[0].outputs[0]
        assert one.text == full.text[: full.text.index(stop)]
        assert (one.finish_reason, one.stop_reason) == ("stop", stop)
        assert one.token_ids == full.token_ids[: len(one.token_ids)]
        with_stop = greedy(40, stop=stop, include_stop_str_in_output=True)
        text = ngram().generate([LOOP], with_stop, use_tqdm=False)[0].outputs[0].text
        assert text == full.text[: full.text.index(stop) + len(stop)]


def test_streamed_text_is_the_whole():
    for params in (greedy(30), sampled(4, 30)):
        wanted = ngram().generate(prompts(), params, use_tqdm=False)
        seen: dict[int, list[str]] = {}
        for place, output in ngram().stream(prompts(), params):
            seen.setdefault(place, []).append(output.outputs[0].text)
        for place, texts in seen.items():
            assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:]))
            assert texts[-1] == wanted[place].outputs[0].text


@pytest.mark.parametrize("batch", [False, True])
def test_prompts_close_to_max_model_len(batch):
    engine, reference = ngram(max_model_len=64), plain(max_model_len=64)
    jobs = [(LOOP * 3)[:length] for length in range(58, 64)]
    outputs = engine.generate(jobs, greedy(None), use_tqdm=False) if batch else []
    for job in [] if batch else jobs:
        outputs += engine.generate(job, greedy(None), use_tqdm=False)
    for job, output, wanted in zip(jobs, outputs, alone(reference, jobs, greedy(None))):
        assert len(output.outputs[0].token_ids) == 64 - len(job)
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].token_ids == wanted
    for length in (64, 65, 200):
        with pytest.raises(ValueError, match=rf"{length} tokens; with max_model_len = 64") as error:
            engine.generate((LOOP * 9)[:length], greedy(None))
        assert "\n" not in str(error.value)
    assert run(engine, [LOOP], greedy(8)) == run(reference, [LOOP], greedy(8))
    assert idle(engine)


def test_a_bad_request_fails_alone():
    bad = [LOOP, [], [500], LOOP * 40, [3, "x"], prompts()[1]]
    outputs = ngram().generate(bad, greedy(10), use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", *["error"] * 4, "length"]
    assert all(output.error and "\n" not in output.error for output in outputs[1:5])
    assert token_ids([outputs[0], outputs[5]]) == alone(plain(), [LOOP, prompts()[1]], greedy(10))
    assert idle(ngram())


def test_a_tokenizer_that_is_larger_than_the_model(caplog):
    folder = new_folder()
    tiny_tokenizer(folder, 900)
    (folder / "config.json").write_text("{}")
    with LLM(str(tiny_model()), tokenizer=str(folder), max_num_seqs=1, max_model_len=32) as engine:
        assert "tokenizer: has 900 tokens, the model 512" in caplog.text
        outputs = engine.generate(["mou maa mdr mts", [1, 2, 3]], greedy(2), use_tqdm=False)
    assert "the tokenizer makes token" in outputs[0].error and "the model's own tokenizer" in outputs[0].error
    assert len(outputs[1].outputs[0].token_ids) == 2


def test_logits_that_are_not_finite_end_only_their_request():
    """One embedding is NaN: who has it in the prompt, or comes to say it, ends with an error after its good tokens."""
    clean = tiny_model("llama")
    wanted = alone(llm(clean, max_model_len=128, max_num_seqs=1), prompts(4), greedy(30))
    others = {t for i, (job, ids) in enumerate(zip(prompts(4), wanted)) for t in [*job, *(ids if i != 2 else [])]}
    poison = next(token for token in wanted[2][4:] if token not in others)
    place = wanted[2].index(poison)
    path = copy_of(clean)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][poison] = float("nan")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    engine = llm(path, k=K, max_model_len=128, max_num_seqs=4)
    for turn in range(2):  # the second time in blocks that have held NaN
        outputs = engine.generate([*prompts(4), [5, poison, 6]], greedy(30), use_tqdm=False)
        assert [out.outputs[0].finish_reason for out in outputs] == ["length", "length", "error", "length", "error"], (
            turn
        )
        assert token_ids(outputs[:2] + outputs[3:4]) == wanted[:2] + wanted[3:]
        assert outputs[2].outputs[0].token_ids == wanted[2][: place + 1]
        assert outputs[4].outputs[0].token_ids == []
        assert "not finite" in outputs[2].error and "not finite" in outputs[4].error
        with pytest.raises(EngineError, match="not finite"):
            engine.generate([5, poison, 6], greedy(30), use_tqdm=False)
        assert idle(engine)


# Seeds


def test_seeds():
    engine = ngram()
    first = run(engine, [LOOP], sampled(42, 32))
    assert [run(engine, [LOOP], sampled(42, 32)) for _ in range(4)] == [first] * 4
    assert run(engine, [LOOP], sampled(43, 32)) != first
    crowd = [sampled(42, 32), *(sampled(i, 20 + i) for i in range(7))]
    assert run(engine, [LOOP, *prompts(4), *prompts(3)], crowd)[0] == first[0]
    zero = run(engine, [LOOP], sampled(0, 32))
    assert run(engine, [LOOP], sampled(0, 32)) == zero != first
    unseeded = SamplingParams(temperature=1.0, max_tokens=32, ignore_eos=True)
    assert run(engine, [LOOP], unseeded) != run(engine, [LOOP], unseeded)
    many = run(engine, [LOOP], sampled(1, 20, n=20))  # more than there are slots
    assert run(engine, [LOOP], sampled(1, 20, n=20)) == many == run(plain(), [LOOP], sampled(1, 20, n=20))
    assert len({tuple(ids) for ids in many}) > 15


def test_global_generators_are_left_alone():
    np.random.seed(5)
    ms.set_seed(5)
    numpy_before, mindspore_before = np.random.get_state(), ms.get_rng_state().asnumpy()
    run(ngram(), prompts(), sampled(1))
    run(ngram(), prompts(), SamplingParams(temperature=1.0, ignore_eos=True))
    after = np.random.get_state()
    assert after[2:] == numpy_before[2:]
    np.testing.assert_array_equal(after[1], numpy_before[1])
    np.testing.assert_array_equal(ms.get_rng_state().asnumpy(), mindspore_before)


# Accounts


def test_metrics_add_up():
    before = ngram().metrics()
    outputs = ngram().generate(prompts(), greedy(41), use_tqdm=False)
    for output in outputs:
        m, sample = output.metrics, output.outputs[0]
        assert 0 <= m.num_accepted_tokens <= m.num_draft_tokens
        assert sum(m.acceptance_per_position) == m.num_accepted_tokens == sum(sample.from_draft)
        assert m.acceptance_per_position == sorted(m.acceptance_per_position, reverse=True)
        assert len(sample.token_ids) == 1 + m.num_decode_tokens == 41
        # Each step adds one token of the model's own, except a last one that was cut after an accepted draft.
        assert m.num_decode_tokens - m.num_accepted_tokens in (m.num_steps, m.num_steps - 1)
        assert m.mean_acceptance_length == m.num_decode_tokens / m.num_steps
        assert m.acceptance_rate == m.num_accepted_tokens / m.num_draft_tokens
        assert m.time_to_first_token_s > 0 and m.decode_seconds > 0
    after = ngram().metrics()
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 20
    for name in ("num_steps", "num_draft_tokens", "num_accepted_tokens", "num_decode_tokens"):
        assert getattr(after, name) - getattr(before, name) == sum(getattr(o.metrics, name) for o in outputs)
    assert after.num_finished - before.num_finished == 4


def test_nothing_is_compiled_after_warm_up():
    engine = ngram()
    runner = engine._parts.runner
    cells = [step for step in vars(runner).values() if isinstance(step, (ms.nn.Cell, dict))]
    steps = [c for cell in cells for c in (cell.values() if isinstance(cell, dict) else [cell])]
    steps = [step for step in steps if isinstance(step, ms.nn.Cell)]

    def compiled() -> tuple[int, int]:
        return runner.num_compiled, sum(len(step.compile_cache) for step in steps)

    before = compiled()
    assert before[0] == len(runner.plan())
    for n in range(1, 9):
        run(engine, (prompts() * 2)[:n], sampled(n, 12))
    for length in (1, 2, K, K + 1, 63, 64, 65, 100):
        run(engine, [(LOOP * 5)[:length]], greedy(12))
    assert compiled() == before


@pytest.mark.parametrize("size", [32, 128])
def test_block_sizes(size):
    engine = ngram(block_size=size)
    assert run(engine, prompts(), greedy(60)) == alone(plain(), prompts(), greedy(60))


def test_one_request_at_a_time():
    engine = ngram(max_num_seqs=1, max_num_batched_tokens=8)  # a budget that hardly holds the drafts
    assert run(engine, prompts(), greedy(30)) == alone(plain(), prompts(), greedy(30))


# Threads


def test_two_models_in_two_threads():
    engines = [ngram(), llm(tiny_model("llama"), k=K, max_model_len=128, max_num_seqs=2)]
    wanted = [run(engine, prompts(), greedy(30)) for engine in engines]
    got: dict[tuple[int, int], list] = {}

    def work(which: int, turn: int) -> None:
        got[which, turn] = token_ids(engines[which].generate(prompts(), greedy(30), use_tqdm=False))

    threads = [threading.Thread(target=work, args=(which, turn)) for turn in range(3) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert got == {(which, turn): wanted[which] for which in range(2) for turn in range(3)}
    assert all(idle(engine) for engine in engines)


def test_leaving_a_stream_gives_all_blocks_back():
    for turns in (0, 1, 3):
        stream = ngram().stream(prompts(), greedy(60))
        for _ in range(turns):
            next(stream)
        stream.close()
        assert idle(ngram())
    assert run(ngram(), [LOOP], greedy(20)) == run(plain(), [LOOP], greedy(20))
