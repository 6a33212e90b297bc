"""Results in a file: what survives an interruption, and what a resumed run keeps and refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM
from tiny import tiny_model

from ms_spec import cli, job
from ms_spec.job import prepare
from ms_spec.results_file import result_keys, results_file
from ms_spec.runfile import load_run

RUN = """
model: M
seed: 5
speculative_config: {method: ngram, num_speculative_tokens: 4}
sampling_params: {max_tokens: 5, temperature: 0.8}
prompts: [a, {prompt: b, sampling_params: {max_tokens: 6}}, [4, 5]]
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setattr(job, "make_llm", lambda arguments: FakeLLM(**arguments))
    monkeypatch.setattr(FakeLLM, "made", [])
    monkeypatch.setattr(FakeLLM, "fail", None)
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def call(file: Path, *changes: str) -> int:
    return cli.run_app(["run", str(file), f"output={file.parent / 'out'}", *changes])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_hold_nothing_of_the_moment(file: Path) -> None:
    assert call(file) == 0
    found = lines(file.parent / "out")
    assert [line["index"] for line in found] == [0, 1, 2]
    assert [set(line) for line in found] == [{"index", "key", "prompt", "text", "token_ids", "finish_reason"}] * 3
    assert len({line["key"] for line in found}) == 3
    assert sorted(path.name for path in file.parent.iterdir()) == ["out", "run.yaml"]


def test_a_run_goes_on_where_it_was_cut_off(file: Path, capsys: Any) -> None:
    assert call(file) == 0
    out, part = file.parent / "out", file.parent / "out.part"
    whole = out.read_bytes()
    first, second, third = whole.splitlines(keepends=True)
    for content in (b"", second, third + first, third + first[:20], whole + b'{"ind'):
        out.unlink()
        part.write_bytes(content)
        FakeLLM.made.clear()
        assert call(file, "--resume") == 0
        assert out.read_bytes() == whole and not part.exists()
        asked = sum(len(prompts) for engine in FakeLLM.made for prompts, _ in engine.calls)
        assert asked == 3 - content.count(b"\n")
    FakeLLM.made.clear()
    assert call(file, "--resume") == 0 and not FakeLLM.made
    assert "all 3 results are in" in capsys.readouterr().err
    out.write_bytes(first + third)  # a file that somebody shortened
    assert call(file, "--resume") == 0 and out.read_bytes() == whole
    assert call(file) == 0 and out.read_bytes() == whole  # without it everything is done again


def test_seeds_do_not_depend_on_what_is_done(file: Path) -> None:
    assert call(file) == 0
    ((_, all_params),) = FakeLLM.made[-1].calls
    content = (file.parent / "out").read_bytes().splitlines(keepends=True)
    (file.parent / "out").unlink()
    (file.parent / "out.part").write_bytes(content[0])
    assert call(file, "--resume") == 0
    ((_, params),) = FakeLLM.made[-1].calls
    assert [one.seed for one in params] == [one.seed for one in all_params[1:]]
    assert len({one.seed for one in all_params}) == 3


def test_prompts_that_failed_are_asked_again(file: Path, capsys: Any) -> None:
    assert call(file, "prompts=[a, bad, c]") == 2
    whole = (file.parent / "out").read_bytes()
    FakeLLM.made.clear()
    assert call(file, "--resume", "prompts=[a, bad, c]") == 2
    (engine,) = FakeLLM.made
    assert engine.calls[0][0] == ["bad"] and (file.parent / "out").read_bytes() == whole
    assert "prompt 2: prompt is bad" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        ["prompts=[a]"],
        ["prompts=[a, c, [4, 5]]"],
        ["sampling_params.temperature=0.7"],
        ["seed=6"],
        ["model=N"],
        ["chat=true"],
        ["speculative_config=null"],
    ],
)
def test_results_of_another_run_are_refused(file: Path, capsys: Any, changes: list[str]) -> None:
    assert call(file) == 0
    before = (file.parent / "out").read_bytes()
    capsys.readouterr()
    assert call(file, "--resume", *changes) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "the result of another run" in err and "line " in err
    assert (file.parent / "out").read_bytes() == before and not (file.parent / "out.part").exists()


def test_how_it_is_run_may_change(file: Path) -> None:
    assert call(file) == 0
    FakeLLM.made.clear()
    changes = ["max_num_seqs=1", "batch=1", "enforce_eager=true", "num_gpu_blocks_override=64"]
    assert call(file, "--resume", *changes) == 0 and not FakeLLM.made
    assert call(file, "--resume", "prompts=[a, {prompt: b, sampling_params: {max_tokens: 6}}, [4, 5], more]") == 0
    assert [line["prompt"] for line in lines(file.parent / "out")] == ["a", "b", [4, 5], "more"]
    assert FakeLLM.made[0].calls[0][0] == ["more"]


def test_keys_do_not_depend_on_defaults_being_written(file: Path) -> None:
    def keys(*changes: str) -> list[str]:
        run = load_run(file, list(changes))
        return result_keys(run.job, prepare(run.job))

    assert keys() == keys("dtype=auto", "sampling_params.top_p=1.0", "additional_config.rejection_sampler_config={}")
    assert keys() != keys("dtype=float32")


@pytest.mark.parametrize("content", ["[1]\n", "x\n", '{"index": 0}\n', '{"index": "0", "key": ""}\n', "\n"])
def test_what_is_no_result_is_refused(file: Path, capsys: Any, content: str) -> None:
    (file.parent / "out.part").write_text(content)
    assert call(file, "--resume") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "out.part, line 1" in err and "without --resume the run begins anew" in err
    assert (file.parent / "out.part").read_text() == content


def test_resume_needs_a_file(file: Path, capsys: Any) -> None:
    assert cli.run_app(["run", str(file), "--resume"]) == 2
    assert "output: FILE" in capsys.readouterr().err
    assert cli.run_app(["run", str(file), "--resume", "output=/dev/null"]) == 2
    assert "is a device" in capsys.readouterr().err


def test_two_runs_do_not_write_one_file(file: Path, capsys: Any) -> None:
    keys = ["k"] * 3
    with pytest.raises(KeyboardInterrupt), results_file(file.parent / "out", keys):
        for extra in ([], ["--resume"]):
            assert call(file, *extra) == 2
            assert "is being written by another run" in capsys.readouterr().err
        assert (file.parent / "out.part").exists()
        raise KeyboardInterrupt
    assert not (file.parent / "out.part").exists()


def test_kill_9_and_resume(tmp_path: Path) -> None:
    """200 prompts, sampled, with drafts: the file of a run that was killed and resumed has the bytes of another's."""
    config = tmp_path / "run.yaml"
    config.write_text(f"""
model: {tiny_model("qwen3")}
max_model_len: 64
max_num_seqs: 2
max_num_batched_tokens: 16
compilation_config: {{cudagraph_capture_sizes: [6]}}
seed: 11
speculative_config: {{method: ngram, num_speculative_tokens: 2, prompt_lookup_min: 1, prompt_lookup_max: 2}}
sampling_params: {{temperature: 0.8, max_tokens: 12}}
prompts: prompts.txt
""")
    (tmp_path / "prompts.txt").write_text("".join(f"Numbers such as {number} again\n" for number in range(200)))
    command = [sys.executable, "-m", "ms_spec", "run", str(config)]
    killed, whole = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    process = subprocess.Popen([*command, f"output={killed}"], stderr=subprocess.DEVNULL)
    part = tmp_path / "killed.jsonl.part"
    deadline = time.monotonic() + 300
    while not part.exists() or part.read_bytes().count(b"\n") < 50:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    there = part.read_bytes().count(b"\n")
    assert 50 <= there < 200 and not killed.exists()
    other = ["max_num_seqs=1", "compilation_config.cudagraph_capture_sizes=[3]"]  # one request after the other
    command += [f"output={killed}", "--resume", *other]
    resumed = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True)
    assert f"[{there} of 200 results are there]" in resumed.stderr
    assert cli.run_app(["run", str(config), f"output={whole}"]) == 0
    assert killed.read_bytes() == whole.read_bytes() and not part.exists()
    assert [line["index"] for line in lines(whole)] == list(range(200))
    assert len({tuple(line["token_ids"]) for line in lines(whole)}) > 100
