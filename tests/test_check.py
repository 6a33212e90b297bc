"""``ms-spec run --check``: what it finds without loading weights, what it says, and what it leaves alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import tiny_drafts
from tiny import copy_of, tiny_model, tiny_tokenizer

from ms_spec import cli, job
from ms_spec.models.loading import load
from ms_spec.models.sources import resolve

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.fixture(scope="module", autouse=True)
def default_model() -> None:
    """It is on this machine."""
    resolve("smollm2-135m")


@pytest.fixture(autouse=True)
def offline(monkeypatch: Any) -> None:
    """Nothing is fetched and no engine is made."""

    def fetch(name: str, local_files_only: bool = False, **options: Any) -> str:
        assert local_files_only, "something was to be fetched"
        raise FileNotFoundError(name)

    def make(arguments: Any) -> Any:
        raise AssertionError("an engine was made")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(job, "make_llm", make)


def check(capsys: Any, config: Path, *changes: str) -> str:
    code = cli.run_app(["run", "--check", str(config), *changes])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_the_files_of_the_repository(config: Path, capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    out = check(capsys, config)
    assert out.startswith(f"{config} is sound\n") and "\nprompts   " in out
    assert ("not on this machine" in out) == ("smollm2" not in config.name)
    assert list(tmp_path.iterdir()) == []


def run_file(folder: Path, **options: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(json.dumps({"prompts": ["The quick brown fox", [5, 6]], **options}))
    return path


def test_the_summary(tmp_path: Path, capsys: Any) -> None:
    head = {"method": "eagle3", "model": str(tiny_drafts.eagle3()), "num_speculative_tokens": 3}
    target = str(tiny_drafts.target())
    layers, names = load(target).config.num_layers, load(target).checkpoint.names()
    config = run_file(tmp_path, model=target, speculative_config=head, output=str(tmp_path / "out.jsonl"))
    assert check(capsys, config, "max_num_seqs=2", "max_model_len=64", "sampling_params.top_k=3").splitlines() == [
        f"{config} is sound",
        f"model     {target}: LlamaForCausalLM, {layers} layers, {len(names)} tensors",
        "engine    cpu, 2 at once, up to 64 tokens each, KV cache of 8 blocks of 16 tokens",
        f"drafts    eagle3 of {head['model']}, 3 a step",
        "prompts   2; temperature 0.0, max_tokens 128, top_k 3",
        f"results   JSON lines in {tmp_path / 'out.jsonl'}",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_what_is_not_here_is_unchecked(tmp_path: Path, capsys: Any) -> None:
    eagle = {"method": "eagle", "model": "owner/head", "num_speculative_tokens": 3}
    config = run_file(tmp_path, model="owner/large", speculative_config=eagle)
    last = check(capsys, config).splitlines()[-1]
    assert last == "unchecked owner/large, owner/head: not on this machine; a run fetches what is missing"
    out = check(capsys, config, f"model={tiny_drafts.target()}")
    assert "LlamaForCausalLM" in out and "unchecked owner/head: " in out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["modle=x"], ["option 'modle'", "did you mean 'model'"]),
        (["model=/nowhere/x"], ["model: '/nowhere/x' is no directory"]),
        (["tokenizer={larger}"], ["prompt 1: the prompt: the tokenizer makes token", "0 to 511", "model's own"]),
        (["tokenizer=/nowhere/x"], ["tokenizer: '/nowhere/x' is no directory"]),
        (["speculative_config={method: draft_model, model: /no/x, num_speculative_tokens: 2}"], ["model: '/no/x'"]),
        (["speculative_config.num_speculative_token=3"], ["did you mean 'num_speculative_tokens'"]),
        (["speculative_config={method: mtp}"], ["speculative_config.model", "multi-token prediction"]),
        (["sampling_params.temperature=-1"], ["temperature = -1", ">= 0"]),
        (["sampling_params.max_tokns=1"], ["did you mean 'max_tokens'"]),
        (["max_model_len=4096"], ["max_model_len = 4096", "at most 512"]),
        (["num_gpu_blocks_override=1"], ["num_gpu_blocks_override = 1", "use num_gpu_blocks_override >= "]),
        (["prompts=[a, [9999]]"], ["prompt 2: prompt_token_ids[0] = 9999", "0 to 511"]),
        (["max_model_len=4", "speculative_config=null"], ["prompt 1: the prompt has", "max_model_len = 4"]),
        (["sampling_params.stop_token_ids=[9999]"], ["stop_token_ids[0] = 9999"]),
        (["prompts=nowhere.txt"], ["no such file: nowhere.txt"]),
        (["output=/nowhere/out"], ["output: no such folder: /nowhere"]),
        (["json=true", "show_drafts=true"], ["show_drafts"]),
        (["sampling_params.temperature"], ["key=value"]),
    ],
)
def test_mistakes_get_one_line(tmp_path: Path, capsys: Any, changes: list[str], words: list[str]) -> None:
    config = run_file(tmp_path, model=str(tiny_model()), speculative_config={"method": "suffix"})
    if "{larger}" in changes[0]:
        tiny_tokenizer(tmp_path, 900)
        (tmp_path / "config.json").write_text("{}")
        changes = [f"tokenizer={tmp_path}", "prompts=[mou maa mdr mts]"]
    assert cli.run_app(["run", "--check", str(config), *changes]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ms-spec: error: ") and err.count("\n") == 1, err
    assert all(word in err for word in words), err


def test_damaged_files_are_found(tmp_path: Path, capsys: Any) -> None:
    model = copy_of(tiny_model())
    config = run_file(tmp_path, model=str(model), chat=True)
    assert "through the chat template" in check(capsys, config)

    def refused(*words: str) -> None:
        assert cli.run_app(["run", "--check", str(config)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and all(word in err for word in words), err

    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    refused("template")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    refused("model.safetensors")
    (model / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    refused("GPT2LMHeadModel", "not supported")


def test_places_that_cannot_be_written(tmp_path: Path, capsys: Any) -> None:
    storage = "kv_transfer_config.kv_connector_extra_config.shared_storage_path"
    config = ROOT / "configs" / "smollm2-extract-hidden-states.yaml"
    check(capsys, config, f"{storage}={tmp_path / 'a' / 'b'}")
    assert list(tmp_path.iterdir()) == []
    assert cli.run_app(["run", "--check", str(config), f"{storage}={config}"]) == 2
    assert "shared_storage_path" in capsys.readouterr().err
    assert cli.run_app(["run", "--check", str(config), f"{storage}={tmp_path}", "sampling_params.max_tokens=2"]) == 2
    assert "max_tokens = 2: must be 1" in capsys.readouterr().err


def test_results_that_are_there(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.jsonl"
    config = run_file(tmp_path, model=str(tiny_model()), output=str(out))
    assert "resume    0 results are there" in check(capsys, config, "--resume")
    (tmp_path / "out.jsonl.part").write_text('{"index": 0, "key": "0000000000000000"}\n')
    assert cli.run_app(["run", "--check", "--resume", str(config)]) == 2
    assert "another run" in capsys.readouterr().err


def test_mindspore_is_not_imported(tmp_path: Path) -> None:
    config = run_file(tmp_path, model=str(tiny_model()), speculative_config={"method": "suffix"}, chat=True)
    command = [sys.executable, "-X", "importtime", "-m", "ms_spec", "run", "--check", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "LlamaForCausalLM" in done.stdout, done.stderr
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert not imported & {"mindspore", "mindformers", "transformers", "torch"}
