"""The command line: what it passes on, what it prints where, and how it refuses."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM

from ms_spec import cli, job
from ms_spec.errors import EngineError

TEXT = "Hello wörld!"
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    monkeypatch.setattr(job, "make_llm", lambda arguments: FakeLLM(**arguments))
    monkeypatch.setattr(FakeLLM, "made", [])
    monkeypatch.setattr(FakeLLM, "fail", None)
    for name in ("FORCE_COLOR", "MS_SPEC_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return FakeLLM


def call(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = cli.run_app(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys: Any, *arguments: str) -> str:
    """The one line of a refusal, which leaves stdout empty and starts no engine."""
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("ms-spec: error: ") and err.count("\n") == 1
    assert not FakeLLM.made
    return err


def test_one_prompt_streams_text_only_to_stdout(llm: Any, capsys: Any) -> None:
    code, out, err = call(capsys, "generate", "--prompt", "a")
    assert (code, out) == (0, TEXT + "\n")
    assert "6 tokens, stop" in err and "2 of 4 drafts accepted, 2.00 tokens a step" in err


def test_several_prompts_come_as_blocks(llm: Any, capsys: Any) -> None:
    _, out, _ = call(capsys, "generate", "--prompt", "a", "--prompt", "bad", "--prompt", "c")
    assert out == f"--- prompt 1 of 3: 'a'\n{TEXT}\n--- prompt 3 of 3: 'c'\n{TEXT}\n"


def test_options_reach_the_engine(llm: Any, capsys: Any) -> None:
    line = "generate --model M --prompt a --prompt b --max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 3 --min-p 0.1"
    line += " --seed 11 --stop x --stop y --max-model-len 99 --max-num-seqs 3 --dtype float32"
    options = shlex.split(line)
    extra = [
        *("-sc", NGRAM),
        *("--additional-config", '{"rejection_sampler_config": {"enable_block_verify": true}}'),
        *("--compilation-config", '{"cudagraph_capture_sizes": [5, 15]}'),
    ]
    assert call(capsys, *options, *extra)[0] == 0
    (engine,) = llm.made
    assert engine.arguments == {
        "model": "M",
        "max_model_len": 99,
        "max_num_seqs": 3,
        "dtype": "float32",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
        "additional_config": {"rejection_sampler_config": {"enable_block_verify": True}},
        "compilation_config": {"cudagraph_capture_sizes": [5, 15]},
    }
    ((prompts, params),) = engine.calls
    assert prompts == ["a", "b"] and len(params) == 2
    one = params[0]
    assert (one.max_tokens, one.temperature, one.top_p, one.top_k, one.min_p) == (7, 0.5, 0.9, 3, 0.1)
    assert (one.seed, one.stop) == (11, ["x", "y"])


def test_defaults_are_greedy_and_no_wider_than_the_prompts(llm: Any, capsys: Any) -> None:
    call(capsys, "generate", "--prompt", "a")
    (engine,) = llm.made
    assert engine.arguments == {"model": "smollm2-135m", "max_num_seqs": 1}
    assert (engine.calls[0][1][0].temperature, engine.calls[0][1][0].max_tokens) == (0.0, 128)


def test_batch_limits_what_runs_together(llm: Any, capsys: Any) -> None:
    prompts = [part for name in "abcde" for part in ("--prompt", name)]
    assert call(capsys, "generate", *prompts, "--batch", "2")[0] == 0
    (engine,) = llm.made
    assert engine.arguments["max_num_seqs"] == 2
    assert [given for given, _ in engine.calls] == [["a", "b"], ["c", "d"], ["e"]]


def test_chat_applies_the_template(llm: Any, capsys: Any) -> None:
    _, out, _ = call(capsys, "generate", "--chat", "--prompt", "hi", "--json")
    (prompt,) = llm.made[0].calls[0][0]
    assert prompt == {"prompt": "user: hi?", "prompt_token_ids": [ord(letter) for letter in "user: hi?"]}
    assert json.loads(out)["prompt"] == "hi"


def test_json_is_one_object_a_request_in_order(llm: Any, capsys: Any) -> None:
    code, out, err = call(capsys, "generate", "--prompt", "a", "--prompt", "b", "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and err == "" and [record["prompt"] for record in records] == ["a", "b"]
    assert records[0] == {
        "prompt": "a",
        "text": TEXT,
        "token_ids": [0, 1, 2, 3, 4, 5],
        "finish_reason": "stop",
        "metrics": {
            "num_steps": 2,
            "num_drafts": 2,
            "num_draft_tokens": 4,
            "num_accepted_tokens": 2,
            "mean_acceptance_length": 2.0,
            "acceptance_per_position": [1, 1],
            "tokens_per_second": 8.0,
            "time_to_first_token_s": 0.25,
        },
    }


def test_show_drafts_marks_accepted_text(llm: Any, capsys: Any, monkeypatch: Any) -> None:
    _, out, err = call(capsys, "generate", "--prompt", "a", "--show-drafts")
    assert out == "He[llo][ w][ör]ld!\n" and "in brackets: drafted and accepted" in err
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, err = call(capsys, "generate", "--prompt", "a", "--show-drafts")
    assert "He\x1b[32mllo\x1b[0m\x1b[32m w\x1b[0m\x1b[32mör\x1b[0mld!" in out and "green: drafted and accepted" in err


def test_one_bad_request_fails_alone(llm: Any, capsys: Any) -> None:
    code, out, err = call(capsys, "generate", "--prompt", "a", "--prompt", "bad", "--json")
    good, bad = map(json.loads, out.splitlines())
    assert code == 2 and good["text"] == TEXT
    assert (bad["finish_reason"], bad["error"], bad["text"]) == ("error", "prompt is bad; use a good one", "")
    assert err == "ms-spec: error: prompt 2: prompt is bad; use a good one\n"
    code, out, _ = call(capsys, "generate", "--prompt", "a", "--prompt", "bad", "--json", "--batch", "1")
    assert code == 2 and [json.loads(line)["finish_reason"] for line in out.splitlines()] == ["stop", "error"]
    assert all(engine.closed for engine in llm.made)
    assert call(capsys, "generate", "--prompt", "bad") == (2, "", "ms-spec: error: prompt is bad; use a good one\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate"], ["no prompts", "--prompt TEXT"]),
        (["generate", "--prompt", ""], ["prompt is empty"]),
        (["generate", "--prompt", "a", "--max-tokns", "3"], ["--max-tokns", "--max-tokens"]),
        (["generate", "--prompt", "a", "--max-tokens", "x"], ["--max-tokens", "must be a valid integer"]),
        (["generate", "--prompt", "a", "-sc", '{"method": "ngram", "num_speculative_tokens": 1e9}'], ["use 4096"]),
        (["generate", "--prompt", "a", "--max-num-seqs", "1000000000"], ["max_num_seqs = 1000000000", "use 4096"]),
        (["generate", "--prompt", "a", "--max-tokens", "0"], ["max_tokens = 0", ">= 1"]),
        (["generate", "--prompt", "a", "--seed", "-1"], ["seed = -1", "nearest: 0"]),
        (["generate", "--prompt", "a", "--top-p", "1.5"], ["top_p = 1.5", "at most 1"]),
        (["generate", "--prompt", "a", "--temperature", "nan"], ["temperature", ">= 0"]),
        (["generate", "--prompt", "a", "--batch", "0"], ["--batch"]),
        (["generate", "--prompt", "a", "--batch", "4", "--max-num-seqs", "2"], ["batch = 4", "max_num_seqs = 2"]),
        (
            ["generate", "--prompt", "a", "-sc", "{method: ngram}"],
            ["--speculative-config", "not valid JSON", "column 2"],
        ),
        (["generate", "--prompt", "a", "-sc", "[]"], ["--speculative-config", "JSON object"]),
        (["generate", "--prompt", "a", "-sc", '{"method": "ngarm"}'], ["speculative_config.method", "ngarm", "ngram"]),
        (["generate", "--prompt", "a", "-sc", NGRAM.replace("4", "0")], ["num_speculative_tokens = 0", "from 1 to"]),
        (["generate", "--prompt", "a", "-sc", NGRAM.replace("method", "metod")], ["metod", "did you mean 'method'"]),
        (
            ["generate", "--prompt", "a", "-sc", NGRAM, "--compilation-config", '{"cudagraph_capture_sizes": [7]}'],
            ["cudagraph_capture_sizes", "7", "nearest: 5 or 10"],
        ),
        (
            [
                "generate",
                "--prompt",
                "a",
                "--additional-config",
                '{"rejection_sampler_config": {"posterior_alpha": -1}}',
            ],
            ["posterior_alpha", "-1", ">= 0"],
        ),
        (["generate", "--prompt", "a", "--json", "--show-drafts"], ["--show-drafts", "--json"]),
        (["generate", "--prompts", "/nowhere/p.txt"], ["no such file", "/nowhere/p.txt"]),
        (["frobnicate"], ["frobnicate"]),
        (["run", "/nowhere/c.yaml"], ["no such file"]),
        (["cache", "--clear", "kernel"], ["kernel", "did you mean 'kernels'"]),
    ],
)
def test_mistakes_get_one_line(llm: Any, capsys: Any, arguments: list[str], words: list[str]) -> None:
    line = refused(capsys, *arguments)
    assert all(word in line for word in words), line
    assert "or None" not in line and "Input should be" not in line


def test_prompt_files(llm: Any, capsys: Any, tmp_path: Path) -> None:
    def ask(content: bytes, name: str = "p.txt") -> tuple[list[Any], list[Any]]:
        (tmp_path / name).write_bytes(content)
        code, _, err = call(capsys, "generate", "--prompts", str(tmp_path / name), "--json")
        assert code == 0, err
        return llm.made[-1].calls[0]

    assert ask("eins\r\n\n  zwei ü\n".encode())[0] == ["eins", "  zwei ü"]
    assert ask(b"\xef\xbb\xbfone")[0] == ["one"]
    assert ask(b'{"turns": ["a", "b"], "category": "x"}\n{"text": "c"}\n')[0] == ["a", "c"]
    prompts, params = ask(
        b'"plain"\n{"prompt": "q", "sampling_params": {"max_tokens": 3}}\n{"prompt_token_ids": [4, 5]}', "p.jsonl"
    )
    assert prompts == ["plain", "q", {"prompt_token_ids": [4, 5]}]
    assert [one.max_tokens for one in params] == [128, 3, 128]
    assert ask(b"{curly but no JSON\nb\n")[0] == ["{curly but no JSON", "b"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["is empty"]),
        (b"\n \n", ["is empty"]),
        (b"GGUF\0\1", ["binary"]),
        (b"\xff\xfe\x00x", ["not UTF-8"]),
        (b'{"prompt": "a"}\n{"prompt": 3}\n', ["line 2", "text or a list of token ids"]),
        (b'{"prompt": "a"}\n{"turns": []}\n', ["line 2: turns must be a list with at least one text, got []"]),
        (b'{"prompt": "a"}\n{"promt": "b"}\n', ["line 2", "no prompt"]),
        (b'{"prompt": "a"}\n{"prompt": "a\\ud800"}\n', ["line 2", "not valid Unicode: character 1"]),
        (b'{"prompt": "a"}\n{"prompt": \n', ["line 2", "not valid JSON"]),
        (b'{"prompt": "a", "sampling_params": {"max_tokns": 3}}', ["prompt 1", "max_tokns", "max_tokens"]),
    ],
)
def test_wrong_prompt_files(llm: Any, capsys: Any, tmp_path: Path, content: bytes, words: list[str]) -> None:
    (tmp_path / "p").write_bytes(content)
    line = refused(capsys, "generate", "--prompts", str(tmp_path / "p"))
    assert all(word in line for word in words), line


def test_a_prompt_that_is_no_unicode(llm: Any, capsys: Any) -> None:
    line = refused(capsys, "generate", "--prompt", "a", "--prompt", b"a\xff".decode("utf-8", "surrogateescape"))
    assert "--prompt is not valid Unicode: character 1" in line


def test_a_prompt_from_stdin(llm: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("eine\nZeile ü\n".encode())))
    assert call(capsys, "generate", "--prompt", "-")[0] == 0
    assert llm.made[0].calls[0][0] == ["eine\nZeile ü"]


def test_interrupt_and_faults(llm: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(llm, "fail", KeyboardInterrupt())
    code, out, err = call(capsys, "generate", "--prompt", "a")
    assert (code, out) == (130, "He\n") and "interrupted" in err and "Traceback" not in err
    monkeypatch.setattr(llm, "fail", EngineError("the model failed"))
    assert call(capsys, "generate", "--prompt", "a") == (1, "He\n", "ms-spec: error: the model failed\n")
    for fault in (RuntimeError("ours"), ValueError("from below\nin two lines")):
        monkeypatch.setattr(llm, "fail", fault)
        with pytest.raises(type(fault)):
            cli.run_app(["generate", "--prompt", "a"])


def test_cache_lists_and_clears(capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("MS_SPEC_CACHE", str(tmp_path))
    for kind in ("kernels", "weights"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "x").write_bytes(b"0" * 2_000_000)
    _, out, _ = call(capsys, "cache")
    assert "kernels            2.0 MB" in out and "total              4.0 MB" in out
    assert call(capsys, "cache", "--clear", "kernels")[1].startswith("removed 2.0 MB")
    assert not (tmp_path / "kernels").exists() and (tmp_path / "weights" / "x").exists()
    assert call(capsys, "cache", "--clear")[1].startswith("removed 2.0 MB")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "y").write_bytes(b"0")
    (tmp_path / "weights").symlink_to(tmp_path / "elsewhere")  # what cannot be removed, whoever runs the tests
    code, out, err = call(capsys, "cache", "--clear")
    assert (code, out) == (1, "") and err.startswith("ms-spec: error: ") and err.count("\n") == 1, err


def test_a_cache_that_is_no_folder(capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MS_SPEC_CACHE", str(tmp_path / "file"))
    for options in ([], ["--clear"]):
        code, out, err = call(capsys, "cache", *options)
        assert (code, out) == (2, "") and "file is no folder; set MS_SPEC_CACHE to one" in err


def test_help_and_version(capsys: Any) -> None:
    assert call(capsys, "--version") == (0, "ms-spec 0.1.0\n", "")
    assert "generate" in call(capsys)[1]
    assert "--speculative-config" in call(capsys, "generate", "--help")[1]


SCRIPT = """
import os, sys
from fake_llm import FakeLLM
from ms_spec import cli, job

class Noisy(FakeLLM):
    def stream(self, *arguments):
        print("a library prints")
        os.write(1, b"native code prints\\n")
        return super().stream(*arguments)

job.make_llm = lambda arguments: Noisy(**arguments)
cli.main()
"""
TESTS = Path(__file__).resolve().parent


def test_json_has_stdout_for_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "generate", "--prompt", "a", "--json"],
        capture_output=True,
        cwd=TESTS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"] == TEXT
    assert b"a library prints" in done.stderr and b"native code prints" in done.stderr


def test_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "generate", "--prompt", "a"], stdout=writer, stderr=-1, cwd=TESTS, check=False
    )
    os.close(writer)
    assert done.returncode == 141 and b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr


def test_the_module_runs_and_refuses_fast() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "ms_spec", "generate", "--prompt", "a", "--top-p", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("ms-spec: error: top_p = 2.0")
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert not imported & {"mindspore", "mindformers", "transformers", "torch", "numpy"}


@pytest.mark.parametrize("arguments", ["generate --prompt a", "generate --prompt a --prompt b --json", "cache"])
def test_a_full_disk_is_one_line(arguments: str) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", SCRIPT, *arguments.split()]
        done = subprocess.run(command, stdout=full, stderr=-1, cwd=TESTS, check=False)
    lines = [line for line in done.stderr.decode().splitlines() if " prints" not in line]
    assert done.returncode == 1 and len(lines) == 1, lines
    assert lines[0].startswith("ms-spec: error: ") and lines[0].endswith("No space left on device")


@pytest.mark.parametrize(
    ("closed", "code", "words"),
    [
        (">&-", 1, "ms-spec: error: stdout is closed"),
        ("2>&-", 0, ""),
        ("<&- --prompt -", 2, "prompts: standard input is closed"),
    ],
)
def test_closed_streams(closed: str, code: int, words: str) -> None:
    command = shlex.join([sys.executable, "-c", SCRIPT, "generate", "--prompt", "a", "--json"])
    done = subprocess.run(f"{command} {closed}", shell=True, capture_output=True, text=True, cwd=TESTS, check=False)
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr, done.stderr
    if code == 0:
        assert json.loads(done.stdout)["text"] == TEXT and done.stdout.count("\n") == 1


EARLY = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "ms_spec.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from ms_spec.__main__ import main
main()
"""


def test_ctrl_c_while_modules_are_imported() -> None:
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")
