"""Hidden states on disk: their values, their files, and what happens when something goes wrong."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tiny import tiny_model
from toy_runner import VOCAB, ToyRunner, finish, toy_limits
from toy_runner import idle as toy_idle
from transformers import AutoModelForCausalLM

from ms_spec import LLM, SamplingParams, hidden_states
from ms_spec.config import EngineConfig
from ms_spec.engine import Engine
from ms_spec.errors import ConfigError, EngineError, RequestError
from ms_spec.extraction import Storage
from ms_spec.hidden_states import HiddenStatesSink
from ms_spec.models.floats import held
from ms_spec.work import Result

ROOT = Path(__file__).resolve().parent.parent
LAYERS, CHUNK = 3, 8
ONE = SamplingParams(max_tokens=1, temperature=0)
PROMPTS = [list(range(5, 26)), [7, 9], [30, 4, 99, 4] * 4, [11], list(range(200, 140, -1))]
FULL_DISK = "the hidden states cannot be written: No space left on device"


def arguments(folder, ids=(1,), **changes):
    hf_config = {"eagle_aux_hidden_state_layer_ids": list(ids)}
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": hf_config},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
        "max_num_seqs": 3,
        "max_model_len": 96,
        "max_num_batched_tokens": 20,
        "long_prefill_token_threshold": CHUNK,
        **changes,
    }


def saved(path):
    """(token ids, states as float32, dtype)."""
    with safe_open(path, "pt") as file:
        states = file.get_tensor("hidden_states")
        assert set(file.keys()) == {"token_ids", "hidden_states"}
        ids = file.get_tensor("token_ids")
        assert ids.dtype == torch.int64
        return ids.tolist(), states.float().numpy(), states.dtype


def wanted(model, ids):
    """The states at all boundaries by transformers, float32 [T, layers + 1, hidden]; the last before the norm."""
    reference = AutoModelForCausalLM.from_pretrained(model).float().eval()
    last = []
    reference.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    with torch.no_grad():
        states = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.stack([*states[:-1], *last], 2)[0].numpy()


def path_of(output):
    assert output.finished and output.error is None and output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 1
    return Path(output.kv_transfer_params["hidden_states_path"])


def files(folder):
    return sorted(file.name for file in Path(folder).iterdir())


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", layers=LAYERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("states") / "made" / "here"


@pytest.fixture(scope="module")
def llm(model, folder):
    with LLM(str(model), **arguments(folder, range(LAYERS + 1))) as made:
        yield made


# Values


def test_states_are_those_of_transformers(llm, model, folder):
    """Five prompts on three places, in chunks."""
    outputs = llm.generate(PROMPTS, ONE, use_tqdm=False)
    for output, prompt in zip(outputs, PROMPTS):
        assert path_of(output) == folder / f"{output.request_id}.safetensors"
        ids, states, dtype = saved(path_of(output))
        assert ids == prompt == output.prompt_token_ids
        assert dtype == torch.float32
        np.testing.assert_allclose(states, wanted(model, prompt), rtol=2e-4, atol=2e-5)
    assert not [name for name in files(folder) if not name.endswith(".safetensors")]


def test_nothing_is_compiled_for_decoding(llm):
    assert {kind for kind, _, _ in llm._engine._runner.plan()} == {"prefill"}


def test_a_chunk_may_take_several_calls(llm, monkeypatch):
    """What the engine reads as one chunk and the runner in parts has the same bits."""
    runner, prompt = llm._engine._runner, PROMPTS[0]
    (before,) = llm.generate([prompt], ONE, use_tqdm=False)
    sizes, prefill = [], runner.prefill
    monkeypatch.setattr(runner, "prefill", lambda work, last: (sizes.append(len(work.tokens)), prefill(work, last))[1])
    monkeypatch.setattr(llm._engine.scheduler, "limits", replace(llm.limits, prefill_chunk=20))
    (after,) = llm.generate([prompt], ONE, use_tqdm=False)
    assert (sizes, runner.chunks) == ([20, 1], (CHUNK,))
    assert np.array_equal(saved(path_of(before))[1], saved(path_of(after))[1])


def test_the_model_s_dtype_and_rising_order(tmp_path, caplog):
    model = tiny_model("llama", layers=LAYERS, dtype="bfloat16")
    caplog.set_level(logging.INFO, "ms_spec")
    with LLM(str(model), **arguments(tmp_path, [LAYERS, 1, 1])) as llm:
        (output,) = llm.generate(PROMPTS[:1], ONE, use_tqdm=False)
    assert f"[{LAYERS}, 1, 1]: saved in rising order, each once: [1, {LAYERS}]" in caplog.text
    _, states, dtype = saved(path_of(output))
    assert dtype == torch.bfloat16
    np.testing.assert_allclose(states, wanted(model, PROMPTS[0])[:, [1, LAYERS]], rtol=2**-7, atol=1e-4)


def test_the_example_of_the_documentation_runs(capsys):
    model = tiny_model("qwen3", layers=36, hidden=32, intermediate=32, vocab=300)
    page = (ROOT / "docs/hidden-states.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"<!-- snippet: hidden-states -->\n```python\n(.*?)```", page, re.DOTALL)
    code = code.replace('"Qwen/Qwen3-8B"', repr(str(model)))
    exec(compile(code, "hidden-states.md", "exec"), {"__name__": "__main__"})
    shown = capsys.readouterr().out
    assert len(re.findall(r"Shape: torch.Size\(\[\d+, 3, 32\]\)", shown)) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_files_hold_every_dtype(tmp_path, dtype):
    states = np.random.default_rng(0).normal(size=(5, 2, 3)).astype(np.float32)
    sink = HiddenStatesSink(Storage(str(tmp_path), 1), dtype)
    sink.take(3, 0, states[:2])
    sink.take(3, 2, states[2:])
    sink.write(3, "name", range(5))
    (one,) = sink.written(True)
    sink.close()
    ids, found, kind = saved(one.path)
    assert (one.key, ids, str(kind)) == (3, list(range(5)), f"torch.{dtype}")
    assert np.array_equal(found, torch.tensor(states).to(kind).float().numpy())
    if dtype != "bfloat16":
        with safe_open(one.path, "np") as file:
            assert np.array_equal(file.get_tensor("hidden_states"), held(states, dtype))


# Requests


@pytest.mark.parametrize("most", [None, 2, 16])
def test_one_token_only(llm, most):
    params = SamplingParams(max_tokens=most)
    with pytest.raises(RequestError, match=f"max_tokens = {most}: must be 1 .*use max_tokens = 1"):
        llm.generate([[5, 6]], params)
    bad, good = llm.generate([[5, 6], [5, 6]], [params, ONE], use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error" and "max_tokens" in bad.error and bad.kv_transfer_params is None
    path_of(good)


def test_several_samples_have_one_file(llm, folder):
    before = files(folder)
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, n=2, seed=1), use_tqdm=False)
    assert [one.finish_reason for one in output.outputs] == ["length"] * 2
    assert len(files(folder)) == len(before) + 1
    assert saved(output.kv_transfer_params["hidden_states_path"])[1].shape == (3, LAYERS + 1, 64)


def test_a_stream_ends_with_the_file(llm):
    for _, output in llm.stream(PROMPTS[:3], ONE):
        assert output.finished == (output.kv_transfer_params is not None)
        assert output.finished == (output.outputs[0].finish_reason is not None)
        if output.finished:
            assert saved(path_of(output))[0] == output.prompt_token_ids


# What goes wrong with files


def failing_for(size, monkeypatch):
    """The disk is full for prompts of ``size`` tokens, when half a file is written."""
    write = hidden_states.write_tensors

    def fail(stream, tensors):
        if len(tensors["token_ids"][1]) == size:
            stream.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(stream, tensors)

    monkeypatch.setattr(hidden_states, "write_tensors", fail)


def test_a_full_disk_fails_one_request(llm, folder, monkeypatch):
    before = files(folder)
    failing_for(2, monkeypatch)
    outputs = llm.generate(PROMPTS[:3], ONE, use_tqdm=False)
    assert [output.error for output in outputs] == [None, FULL_DISK, None]
    assert outputs[1].outputs[0].finish_reason == "error" and outputs[1].kv_transfer_params is None
    assert len(files(folder)) == len(before) + 2
    (alone,) = llm.generate(PROMPTS[1:2], ONE, use_tqdm=False)
    assert (alone.error, alone.outputs[0].finish_reason) == (FULL_DISK, "error")
    monkeypatch.undo()
    path_of(llm.generate(PROMPTS[1:2], ONE, use_tqdm=False)[0])


def test_a_folder_that_is_gone_fails_requests(llm, folder):
    aside = folder.with_name("aside")
    folder.rename(aside)
    try:
        (output,) = llm.generate([[5]], ONE, use_tqdm=False)
        assert output.error == "the hidden states cannot be written: No such file or directory"
    finally:
        aside.rename(folder)


def test_a_stream_that_is_left_leaves_no_file(llm, folder, monkeypatch):
    before, go, write = files(folder), threading.Event(), hidden_states.write_tensors

    def slow(stream, tensors):
        go.wait(10)
        write(stream, tensors)

    monkeypatch.setattr(hidden_states, "write_tensors", slow)
    stream = llm.stream([[5, 6], [6, 7]], ONE)
    next(stream)
    assert llm._engine._saving
    threading.Timer(0.1, go.set).start()
    stream.close()
    assert go.is_set()
    assert files(folder) == before and not llm._engine.has_unfinished()
    assert llm._engine.num_free_blocks == llm.limits.num_blocks - 1


def test_a_folder_that_cannot_be_written(model, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"shared_storage_path = .*file.*: cannot be written: .*; use a folder"):
            LLM(str(model), **arguments(place))

    def refuse(path, **_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(ConfigError, match="cannot be written: Permission denied") as caught:
        LLM(str(model), **arguments(tmp_path))
    assert "\n" not in str(caught.value)
    assert files(tmp_path) == ["file"]


def test_a_killed_writer_leaves_no_file(tmp_path):
    code = f"""
import os, signal
from ms_spec import hidden_states
from ms_spec.extraction import Storage
import numpy as np
def die(stream, tensors):
    stream.write(b"half")
    stream.flush()
    os.kill(os.getpid(), signal.SIGKILL)
hidden_states.write_tensors = die
sink = hidden_states.HiddenStatesSink(Storage({str(tmp_path)!r}), "float32")
sink.take(0, 0, np.zeros((1, 1, 1), np.float32))
sink.write(0, "0", [1])
sink.written(True)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == -signal.SIGKILL
    assert [name.endswith(".part") and name.startswith(".") for name in files(tmp_path)] == [True]


def sink_of(folder, dtype="float32", threads=2):
    return HiddenStatesSink(Storage(str(folder), threads), dtype)


@pytest.mark.parametrize("links", [True, False])
def test_no_file_is_replaced_and_none_leaves_the_folder(tmp_path, monkeypatch, links):
    if not links:

        def refuse(*_):
            raise PermissionError(errno.EPERM, "no links here")

        monkeypatch.setattr(os, "link", refuse)
    sink = sink_of(tmp_path)
    names = ["7", "7", "../7", "a/b", "..", "", "x" * 300]
    for key, name in enumerate(names):
        sink.take(key, 0, np.zeros((1, 1, 1), np.float32))
        sink.write(key, name, [key])
        (one,) = sink.written(True)
        assert saved(one.path)[0] == [key]
    sink.close()
    expected = ["7", "7-2", "_._7", "a_b", "_.", "_", "x" * 100]
    assert files(tmp_path) == sorted(f"{name}.safetensors" for name in expected)


def test_what_is_beyond_float16_is_no_file(tmp_path):
    sink = sink_of(tmp_path, "float16")
    sink.take(0, 0, np.full((1, 1, 2), 1e5, np.float32))
    sink.write(0, "0", [1])
    (one,) = sink.written(True)
    assert one.path is None and one.error.endswith("beyond float16; use dtype bfloat16 or float32")
    assert files(tmp_path) == []


# The engine, on a runner without a model


class StatefulRunner(ToyRunner):
    """Its states are the position and the token."""

    def prefill(self, work, last):
        result = super().prefill(work, last) or Result([], [])
        result.states = np.array([[[work.start + i, token]] for i, token in enumerate(work.tokens)], np.float32)
        return result


def engine_of(folder, threads=2, **changes):
    limits = toy_limits(**{"num_speculative_tokens": 1, "prefill_chunk": 4, "max_num_batched_tokens": 8, **changes})
    runner = StatefulRunner(limits, "none")
    return Engine(runner, limits, VOCAB, sink=sink_of(folder, threads=threads)), runner


def right(output):
    ids, states, _ = saved(path_of(output))
    expected = [[[position, token]] for position, token in enumerate(output.prompt_token_ids)]
    return ids == output.prompt_token_ids and states.tolist() == expected


def test_a_preempted_prompt_is_saved_once(tmp_path):
    engine, _ = engine_of(tmp_path)
    requests = [engine.add_request(range(start, start + 15), ONE) for start in (1, 20)]
    engine.step()
    engine.step()
    for seq in list(engine.scheduler.running)[::-1]:
        assert 0 < seq.computed < 15
        engine.scheduler._preempt(seq)
    finish(engine)
    assert [request.output.outputs[0].token_ids != [] for request in requests] == [True, True]
    assert all(right(request.output) for request in requests)
    assert sum(request.sequences[0].metrics.num_preemptions for request in requests) == 2


def test_aborted_prompts_leave_nothing(tmp_path):
    engine, _ = engine_of(tmp_path)
    requests = [engine.add_request(range(1, 16), ONE) for _ in range(6)]
    engine.step()
    for request in (requests[0], requests[5]):  # one in the middle of its prompt, one that waits
        engine.abort(request.output.request_id)
    finish(engine)
    assert [request.output.outputs[0].finish_reason for request in requests] == ["abort", *["length"] * 4, "abort"]
    assert len(files(tmp_path)) == 4 and not engine._sink._chunks


def test_a_model_that_fails_spares_what_is_only_being_written(tmp_path, monkeypatch):
    engine, runner = engine_of(tmp_path)
    go, write = threading.Event(), hidden_states.write_tensors
    monkeypatch.setattr(hidden_states, "write_tensors", lambda *tensors: (go.wait(10), write(*tensors)))
    short, long = engine.add_request([1, 2], ONE), engine.add_request(range(1, 16), ONE)
    engine.step()
    assert engine._saving and not short.output.finished

    def fail(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(runner, "prefill", fail)
    engine.step()
    assert long.output.finished and "out of luck" in long.output.error
    assert short.output.error is None and not short.output.finished and engine.has_unfinished()
    go.set()
    finish(engine)
    assert right(short.output) and engine.metrics().num_finished == 2


def test_the_model_waits_for_a_slow_disk(tmp_path, monkeypatch):
    engine, _ = engine_of(tmp_path, threads=1)
    write, most = hidden_states.write_tensors, []
    go = threading.Event()
    monkeypatch.setattr(hidden_states, "write_tensors", lambda *tensors: (go.wait(0.02), write(*tensors)))
    requests = [engine.add_request([n, n], ONE) for n in range(1, 13)]
    while engine.has_unfinished():
        engine.step()
        most.append(len(engine._saving))
    assert 0 < max(most) <= 2
    assert all(right(request.output) for request in requests)
    toy_idle(engine)


def test_an_engine_that_fails_alone_raises(llm, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(llm._engine._runner, "prefill", fail)
    with pytest.raises(EngineError, match="the model failed: RuntimeError: out of luck"):
        llm.generate([[5, 6]], ONE)


# Configuration


def spec(**changes):
    given = arguments("states")
    return {**given, "speculative_config": {**given["speculative_config"], **changes}}


def ids(value):
    return spec(draft_model_config={"hf_config": {"eagle_aux_hidden_state_layer_ids": value}})


def transfer(**changes):
    given = arguments("states")
    return {**given, "kv_transfer_config": {**given["kv_transfer_config"], **changes}}


def extra(**fields):
    return transfer(kv_connector_extra_config=fields)


NAME = "speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (spec(num_speculative_tokens=2), "speculative_config.num_speculative_tokens = 2: must be 1 .*; use 1"),
        (spec(num_speculative_tokens=None), "num_speculative_tokens is missing; it must be 1 .*; use 1"),
        (spec(draft_model_config=None), f"{NAME} is missing; .* must be a list such as"),
        (spec(draft_model_config={"hf_config": {}}), f"{NAME} is missing"),
        (spec(draft_model_config={"hf_config": 3}), "draft_model_config.hf_config = 3: must be a dict of fields"),
        (ids([]), r"layer_ids = \[\]: must be a list of integers >= 0, at least one"),
        (ids([1, "2"]), 'layer_ids = .1, "2".: must be a list of integers'),
        (ids([True]), "must be a list of integers"),
        (ids([-1, 2]), "layer_ids = .-1, 2.: must be a list of integers >= 0"),
        (ids(3), "layer_ids = 3: must be a list"),
        (spec(model="x"), "model = 'x': only for method .*not for 'extract_hidden_states'; remove it"),
        ({**arguments("x"), "kv_transfer_config": None}, "kv_transfer_config is missing; .*'kv_producer'"),
        (transfer(kv_connector="NixlConnector"), 'kv_connector = "NixlConnector": must be "ExampleHidden.*Connector"'),
        (transfer(kv_role="kv_both"), 'kv_role = "kv_both": must be "kv_producer"'),
        (transfer(kv_role=None), 'kv_role = null: must be "kv_producer"'),
        (transfer(kv_rank=0), "kv_transfer_config field 'kv_rank' is unknown"),
        (transfer(kv_connector_extra_config=None), "shared_storage_path is missing"),
        (transfer(kv_connector_extra_config=3), "kv_connector_extra_config = 3: must be a dict"),
        (extra(), "shared_storage_path is missing; it must be the folder"),
        (extra(shared_storage_path=""), 'shared_storage_path = "": must be a folder'),
        (extra(shared_storage_path="/tmp/\ud800"), r"shared_storage_path = \S+: must be a folder"),
        (extra(shared_storage_path=3), "shared_storage_path = 3: must be a folder"),
        (extra(shared_storag_path="x"), "'shared_storag_path' is unknown; did you mean 'shared_storage_path'"),
        (extra(shared_storage_path="x", num_writer_threads=0), "num_writer_threads = 0: must be an integer from 1 to"),
        (
            {**arguments("x"), "speculative_config": {"method": "ngram", "num_speculative_tokens": 1}},
            "kv_transfer_config.kv_role = .kv_producer.: not available in this version; allowed: no kv_transfer_config",
        ),
    ],
)
def test_wrong_arguments(given, words):
    with pytest.raises(ConfigError, match=words) as caught:
        EngineConfig.parse(**given)
    assert "\n" not in str(caught.value)


def test_layers_that_the_model_has_not(model, tmp_path):
    with pytest.raises(ConfigError, match=f"{NAME} contains 9: the model has {LAYERS} layers.*use {LAYERS}"):
        LLM(str(model), **arguments(tmp_path / "none", [0, 9]))
    assert not (tmp_path / "none").exists()


def test_paths_and_numpy_numbers(tmp_path):
    given = extra(shared_storage_path=tmp_path, num_writer_threads=np.int64(2))
    given["speculative_config"] = ids(np.array([3, 1]))["speculative_config"]
    config = EngineConfig.parse(**given)
    assert config.extracts and config.speculative_config.hidden_layer_ids == (1, 3)
