"""Run files: what they may hold, how they are changed, how they refuse, and that those in ``configs`` are sound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from engines import lent
from fake_llm import FakeLLM

from ms_spec import LLM, SamplingParams, cli, job
from ms_spec.config import EngineConfig
from ms_spec.job import prepare
from ms_spec.runfile import load_run

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
RUN = """
model: M
speculative_config: {method: ngram, num_speculative_tokens: 4}
sampling_params: {max_tokens: 5}
prompts: [a, {prompt: b, sampling_params: {max_tokens: 6}}, [4, 5]]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def test_a_run_file_is_a_job(file: Path) -> None:
    run = load_run(file)
    assert run.job.engine == {"model": "M", "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    assert [prompt.content for prompt in run.job.prompts] == ["a", "b", [4, 5]]
    assert [one.max_tokens for one in prepare(run.job)] == [5, 6, 5]
    assert run.job.engine["max_num_seqs"] == 3
    assert not (run.json or run.show_drafts or run.job.chat or run.output)


def test_changes(file: Path) -> None:
    changes = [
        "model=N",
        "sampling_params.temperature=1e-1",
        "sampling_params.stop=[x, 'y=z']",
        "speculative_config.num_speculative_tokens=2",
        "additional_config.rejection_sampler_config.enable_block_verify=true",
        "chat=true",
        "batch=2",
        "max_model_len=null",
    ]
    run = load_run(file, changes)
    assert run.job.engine == {
        "model": "N",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
        "additional_config": {"rejection_sampler_config": {"enable_block_verify": True}},
        "max_model_len": None,
    }
    assert run.job.sampling == {"max_tokens": 5, "temperature": 0.1, "stop": ["x", "y=z"]}
    assert run.job.chat and run.job.batch == 2
    assert "speculative_config" in load_run(file, ["speculative_config=null"]).job.engine


def test_prompt_files_lie_beside_the_run_file(file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "q.txt").write_text("three\n")
    file.write_text("prompts: p.txt")
    monkeypatch.chdir(elsewhere)
    assert [prompt.content for prompt in load_run(file).job.prompts] == ["one", "two"]
    assert [prompt.content for prompt in load_run(file, ["prompts=q.txt"]).job.prompts] == ["three"]


@pytest.mark.parametrize(
    ("content", "changes", "words"),
    [
        ("modle: x", [], ["option 'modle'", "did you mean 'model'"]),
        ("", [], ["expected a mapping"]),
        ("- a", [], ["expected a mapping"]),
        ("prompts: [a]\nswap_space: 7", [], ["swap_space = 7", "allowed: 4"]),
        ("a: [", [], ["run.yaml", "line", "not valid YAML"]),
        ("model: x", [], ["no prompts"]),
        ("prompts: []", [], ["prompts", "list of prompts"]),
        ("prompts: [3]", [], ["prompts[0]", "token ids"]),
        ("prompts: nowhere.txt", [], ["no such file"]),
        ("prompts: [a]\nsampling_params: {max_tokns: 3}", [], ["max_tokns", "did you mean 'max_tokens'"]),
        ("prompts: [a]\nsampling_params: 3", [], ["sampling_params", "mapping"]),
        ("prompts: [a]\nchat: 3", [], ["chat", "true or false"]),
        ("prompts: [a]\nbatch: two", [], ["batch = 'two'", ">= 1"]),
        ("prompts: [a]\nmax_model_len: '9'", [], ["max_model_len", ">= 2"]),
        ("prompts: [a]\nspeculative_config: {method: ngram, num_speculative_token: 3}", [], ["num_speculative_tokens"]),
        ("prompts: [a]\noutput: /nowhere/x.jsonl", [], ["output", "no such folder"]),
        ("prompts: [a]", ["json"], ["key=value"]),
        ("prompts: [a]\nbase_confg: x", [], ["base_confg", "did you mean 'base_config'"]),
        ("prompts: [a]", ["base_config=x"], ["base_config", "name it in the file"]),
        ("prompts: [a]", ["model.name=3", "model=x", "model.name=3"], ["model.name", "has no fields"]),
        ("prompts: [a]", ["sampling_parms.seed=3"], ["sampling_parms", "did you mean 'sampling_params'"]),
    ],
)
def test_mistakes_get_one_line(file: Path, capsys: Any, content: str, changes: list[str], words: list[str]) -> None:
    file.write_text(content)
    assert cli.run_app(["run", str(file), *changes]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ms-spec: error: ") and err.count("\n") == 1
    assert all(word in err for word in words), err


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_the_run_files_of_the_repository_are_sound(config: Path) -> None:
    prepare(load_run(config).job)
    text = config.read_text()
    for line in text.splitlines():  # the commands in its comments, too
        if line.startswith("#   ms-spec run ") and not line.endswith("\\"):
            _, _, _, path, *changes = line.split()
            prepare(load_run(ROOT / path, [change for change in changes if not change.startswith("--")]).job)


SMOLLM2 = [  # on one device
    config
    for config in CONFIGS
    if config.name.startswith("smollm2") and yaml.safe_load(config.read_text()).get("tensor_parallel_size", 1) == 1
]
PROMPTS = ["What is the capital of France?", "Say it again: one two three, one two three, one"]


@pytest.mark.parametrize("config", SMOLLM2, ids=lambda path: path.name)
def test_files_for_smollm2_run_as_the_same_call_through_python(
    config: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """With other prompts, fewer tokens and a smaller engine without graphs, which both use."""
    monkeypatch.chdir(tmp_path)
    written = yaml.safe_load(config.read_text())
    small = {"max_num_seqs": 2, "max_model_len": 96, "enforce_eager": True, "prompts": PROMPTS}
    tokens = min(8, written["sampling_params"]["max_tokens"])
    said = {**written, **small}
    sampling = {**job.DEFAULT_SAMPLING, **written["sampling_params"], "max_tokens": tokens}
    llm = LLM(**{name: value for name, value in said.items() if name in EngineConfig.model_fields})
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    params = SamplingParams(**sampling)
    call = llm.chat(messages, params, False) if written.get("chat") else llm.generate(PROMPTS, params, False)
    with lent(llm, monkeypatch):
        changes = [f"{name}={json.dumps(value)}" for name, value in small.items()]
        assert cli.run_app(["run", str(config), *changes, f"sampling_params.max_tokens={tokens}", "json=true"]) == 0
    out = Path(written["output"]).read_text() if "output" in written else capsys.readouterr().out
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["token_ids"] for line in lines] == [output.outputs[0].token_ids for output in call]
    assert [line["text"] for line in lines] == [output.outputs[0].text for output in call]
    for line, output in zip(lines, call):
        if output.kv_transfer_params is not None:
            files = [Path(one["hidden_states_path"]) for one in (output.kv_transfer_params, line["kv_transfer_params"])]
            assert files[0] != files[1] and files[0].read_bytes() == files[1].read_bytes()
    llm.close()


def test_results_go_to_a_file(file: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(job, "make_llm", lambda arguments: FakeLLM(**arguments))
    monkeypatch.setattr(FakeLLM, "fail", None)
    output = tmp_path / "out.jsonl"
    assert cli.run_app(["run", str(file), f"output={output}"]) == 0
    assert [json.loads(line)["prompt"] for line in output.read_text().splitlines()] == ["a", "b", [4, 5]]
    assert capsys.readouterr().out == ""
    output.unlink()
    monkeypatch.setattr(FakeLLM, "fail", RuntimeError("broke"))
    with pytest.raises(RuntimeError):
        cli.run_app(["run", str(file), f"output={output}"])
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_a_run_that_breaks_off_keeps_what_had_come(file: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    class Breaks(FakeLLM):
        def stream(self, prompts: Any, params: Any) -> Any:
            yield from super().stream(prompts[1:], params[1:])
            raise KeyboardInterrupt

    monkeypatch.setattr(job, "make_llm", lambda arguments: Breaks(**arguments))
    monkeypatch.setattr(FakeLLM, "fail", None)
    assert cli.run_app(["run", str(file), f"output={tmp_path / 'out'}"]) == 130
    assert len((tmp_path / "out.part").read_text().splitlines()) == 2 and not (tmp_path / "out").exists()
    assert f"[2 of 3 results are in {tmp_path / 'out.part'}; --resume goes on from there]" in capsys.readouterr().err


def test_a_run_does_not_write_over_what_it_reads(file: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("one\n")
    monkeypatch.chdir(tmp_path)
    for output in ("./p.txt", str(file)):
        assert cli.run_app(["run", str(file), "prompts=p.txt", f"output={output}"]) == 2
        assert "is read by this run" in capsys.readouterr().err
    assert (prompts.read_text(), file.read_text()) == ("one\n", RUN)


def test_an_output_that_cannot_be_written_is_refused_at_once(
    file: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    def stop(arguments: Any) -> Any:
        raise AssertionError("an engine was made")

    monkeypatch.setattr(job, "make_llm", stop)
    for output in (tmp_path, "/proc/x.jsonl"):
        assert cli.run_app(["run", str(file), f"output={output}"]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"ms-spec: error: output: {output}") and err.count("\n") == 1
    monkeypatch.setattr(job, "make_llm", lambda arguments: FakeLLM(**arguments))
    assert cli.run_app(["run", str(file), "output=/dev/full"]) == 1
    err = capsys.readouterr().err
    assert err == "ms-spec: error: /dev/full cannot be written: No space left on device\n"
    assert Path("/dev/full").is_char_device()
