"""The Python API around a toy model."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading

import numpy as np
import pytest
from toy_runner import VOCAB, ToyDecoder, ToyRunner, greedy, idle, reference, sampled, toy_limits

import ms_spec
from ms_spec.config import EngineConfig
from ms_spec.errors import EngineError
from ms_spec.llm import LLM
from ms_spec.parts import Parts
from ms_spec.sampling_params import SamplingParams


class Letters:
    """A character is a token."""

    def encode(self, text, add_special_tokens=True):
        return [ord(one) % VOCAB for one in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(map(ToyDecoder.text, ids))

    def render_chat(self, messages, add_generation_prompt=True):
        return "".join(m["role"][0] + m["content"] for m in messages) + ("a" if add_generation_prompt else "")


def make(drafter="oracle", generation_config=None, eos=(), carries=False, **arguments):
    limits, more = toy_limits(), {"generation_config": generation_config or {}, "carries": carries}
    parts = Parts(ToyRunner(limits, drafter), limits, VOCAB, eos, Letters(), ToyDecoder, **more)
    return LLM.of_parts(EngineConfig.parse(**arguments), parts)


def ids_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_kinds_of_prompts():
    llm = make()
    wanted = reference([1, 2, 3], greedy(8))
    for prompt in ([1, 2, 3], [[1, 2, 3]], {"prompt_token_ids": [1, 2, 3]}, np.array([1, 2, 3]), [np.array([1, 2, 3])]):
        assert ids_of(llm.generate(prompt, greedy(8), use_tqdm=False)) == [wanted]
    (output,) = llm.generate("hello", greedy(8))
    assert output.prompt == "hello"
    assert output.prompt_token_ids == Letters().encode("hello")
    assert output.outputs[0].text == Letters().decode(output.outputs[0].token_ids)
    assert output.finished
    assert output.kv_transfer_params is None
    mixed = llm.generate(["hello", [1, 2, 3], {"prompt": "hello"}], greedy(8))
    assert ids_of(mixed) == [output.outputs[0].token_ids, wanted, output.outputs[0].token_ids]
    assert llm.generate([]) == []
    idle(llm._engine)


def test_results_in_order_with_parameters_of_their_own():
    llm = make()
    prompts = [[i, i + 1] for i in range(10)]
    params = [greedy(20 - i) if i % 2 else sampled(i, 5 + i) for i in range(10)]
    wanted = [reference(prompt, one, seed=one.seed or 0) for prompt, one in zip(prompts, params)]
    assert ids_of(llm.generate(prompts, params)) == wanted
    for wrong in (params[:3], [*params, greedy()]):
        with pytest.raises(ValueError, match=f"sampling_params has {len(wrong)} entries for 10 prompts"):
            llm.generate(prompts, wrong)
    with pytest.raises(ValueError, match="must be SamplingParams"):
        llm.generate(prompts, {"temperature": 0})


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([[]], "empty"),
        ([[1, 99]], "99.*size 64"),
        ([[1] * 300], "300.*128"),
        ([{"x": 1}], "prompt dict"),
        (5, "int"),
    ],
)
def test_a_lone_bad_request_raises(prompt, words):
    llm = make()
    with pytest.raises(ValueError, match=words):
        llm.generate(prompt, greedy())
    with pytest.raises(ValueError, match=words):
        list(llm.stream(prompt, greedy()))
    assert len(llm.generate("fine", greedy(4))) == 1
    idle(llm._engine)


def test_a_bad_request_in_a_list_fails_alone():
    llm = make()
    outputs = llm.generate(["hello", "", [1, 99], [1] * 300, 7, [1, 2, 3]], greedy(8))
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", *["error"] * 4, "length"]
    assert ids_of(outputs)[5] == reference([1, 2, 3], greedy(8))
    assert "99" in outputs[2].error
    assert outputs[2].prompt_token_ids == [1, 99]
    assert outputs[0].error is None


def test_stream():
    llm = make()
    wanted = ids_of(llm.generate([[1, 2], [3, 4]], greedy(30)))
    last, sizes = {}, {0: [], 1: []}
    for position, output in llm.stream([[1, 2], [3, 4]], greedy(30)):
        sizes[position].append(len(output.outputs[0].token_ids))
        last[position] = output
    assert [last[i].outputs[0].token_ids for i in (0, 1)] == wanted
    assert all(output.finished for output in last.values())
    assert all(size == sorted(set(size)) and len(size) > 4 for size in sizes.values())


def test_leaving_a_stream_aborts():
    llm = make()
    for steps in (0, 1, 3):
        results = llm.stream([[1, 2], [3, 4]], greedy(100))
        for _ in range(steps):
            _, output = next(results)
        results.close()
        idle(llm._engine)
        if steps:
            assert output.outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("carries", [False, True])
def test_a_stream_that_is_collected_in_the_middle_of_a_step(carries):
    """On the thread that the step runs on, while the caller, who has the engine, waits for it."""
    llm = make(carries=carries)
    runner, frame = llm._parts.runner, {}
    frame["frame"], frame["stream"] = frame, llm.stream([[1, 2], [3, 4]], greedy(100))
    _, left = next(frame["stream"])
    del frame
    decode = runner.decode
    runner.decode = lambda works: (gc.collect(), decode(works))[1]
    assert ids_of(llm.generate([5, 6], greedy(30))) == [reference([5, 6], greedy(30))]
    assert [one.finish_reason for one in left.outputs] == ["abort"]
    idle(llm._engine)


def test_generate_inside_a_stream():
    llm = make()
    last = None
    for _, output in llm.stream([1, 2], greedy(30)):
        assert ids_of(llm.generate([3, 4], greedy(9))) == [reference([3, 4], greedy(9))]
        last = output
    assert last.outputs[0].token_ids == reference([1, 2], greedy(30))


def test_threads_share_an_llm():
    llm = make()
    got = {}

    def work(number):
        got[number] = ids_of(llm.generate([[number, i] for i in range(3)], greedy(20)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == {n: [reference([n, i], greedy(20)) for i in range(3)] for n in range(5)}
    idle(llm._engine)


def test_interrupt(monkeypatch):
    llm = make()
    real, calls = llm._engine.step, []

    def step():
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real()

    monkeypatch.setattr(llm._engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3, 4]], greedy(100))
    idle(llm._engine)
    assert ids_of(llm.generate([1, 2], greedy(5))) == [reference([1, 2], greedy(5))]


def test_model_failure():
    llm = make()
    llm._parts.runner.fail_at = 2
    with pytest.raises(EngineError, match="the model failed: RuntimeError: out of luck"):
        llm.generate([1, 2], greedy(30))
    llm._parts.runner.fail_at = llm._parts.runner.calls + 2
    outputs = llm.generate([[1, 2], [3, 4]], greedy(30))
    assert all(output.error and output.outputs[0].finish_reason == "error" for output in outputs)
    assert ids_of(llm.generate([1, 2], greedy(5))) == [reference([1, 2], greedy(5))]


def test_global_generators_are_left_alone():
    llm = make()
    before = random.getstate(), np.random.get_state()[1].tolist()
    one, two = (ids_of(llm.generate([1, 2], SamplingParams(max_tokens=30))) for _ in range(2))
    assert one != two
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    seeded = [ids_of(make(seed=3).generate([[1, 2]] * 2, SamplingParams(max_tokens=30))) for _ in range(2)]
    assert seeded[0] == seeded[1]


def test_defaults_come_from_the_checkpoint():
    file = {"temperature": 0.5, "top_k": 9}
    params = make(generation_config=file).get_default_sampling_params()
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 9, 16)
    llm = make(generation_config=file)
    params = LLM.of_parts(EngineConfig.parse(generation_config="vllm"), llm._parts).get_default_sampling_params()
    assert params == SamplingParams()


def test_chat():
    llm = make()
    talk = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(talk, greedy(6))
    assert one.prompt == "uhia"
    assert one.prompt_token_ids == Letters().encode("uhia")
    assert ids_of(llm.chat([talk, talk], greedy(6))) == [one.outputs[0].token_ids] * 2
    with pytest.raises(ValueError, match="messages must be a list"):
        llm.chat("hi", greedy(6))


def test_metrics_and_close():
    with make() as llm:
        llm.generate([[1, 2], [3, 4]], greedy(11))
        total = llm.metrics()
        assert (total.num_requests, total.num_finished, total.num_decode_tokens) == (2, 2, 20)
        assert total.num_accepted_tokens == sum(total.acceptance_per_position) > 0
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([1, 2])


def test_an_llm_cannot_be_pickled():
    for use in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="an LLM cannot be pickled or copied"):
            use(make())


def test_wrong_arguments_come_before_the_model():
    with pytest.raises(ValueError, match="did you mean 'max_num_seqs'"):
        ms_spec.LLM("nowhere", max_num_seq=3)
    with pytest.raises(ValueError, match="num_speculative_tokens = 0"):
        ms_spec.generate("x", "nowhere", speculative_config={"method": "ngram", "num_speculative_tokens": 0})
