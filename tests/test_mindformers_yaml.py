"""Predict files of mindformers: how they read as run files, what they refuse, and that they run."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from engines import lent
from tiny import tiny_model

from ms_spec import LLM, SamplingParams, cli
from ms_spec.job import prepare
from ms_spec.runfile import load_run
from ms_spec.yaml_file import load_yaml

ROOT = Path(__file__).resolve().parent.parent
QWEN3 = ROOT / "configs" / "mindformers-qwen3-8b.yaml"
PREDICT = """
seed: 3
run_mode: predict
use_parallel: False
pretrained_model_dir: /data/qwen3
trainer: {type: CausalLanguageModelingTrainer}
parallel_config: {data_parallel: 1, model_parallel: 1}
model:
  model_config: {compute_dtype: bfloat16, params_dtype: bf16, rotary_dtype: float32}
context: {mode: 0, max_device_memory: 59GB, save_graphs: False}
prompts: [a]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "predict.yaml"
    path.write_text(PREDICT)
    return path


def test_a_predict_file_is_a_run_file(file: Path) -> None:
    run = load_run(file)
    assert run.job.engine == {
        "seed": 3,
        "model": "/data/qwen3",
        "dtype": "bfloat16",
        "tensor_parallel_size": 1,
    }
    assert run.job.sampling == {}
    assert run.no_effect == ["context.max_device_memory", "model.model_config.rotary_dtype", "trainer"]


def test_the_file_in_configs() -> None:
    run = load_run(QWEN3)
    assert run.job.engine == {
        "seed": 0,
        "max_num_seqs": 4,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
        "model": "Qwen/Qwen3-8B",
        "tensor_parallel_size": 1,
        "dtype": "bfloat16",
        "block_size": 128,
        "num_gpu_blocks_override": 128,
        "max_model_len": 4096,
    }
    assert run.job.sampling == {"temperature": 0.0, "max_tokens": 256} and run.job.chat
    eagle3 = load_run(QWEN3.with_name("mindformers-qwen3-8b-eagle3.yaml"))
    head = eagle3.job.engine.pop("speculative_config")
    del run.job.engine["speculative_config"]
    assert (head["method"], head["num_speculative_tokens"]) == ("eagle3", 3)
    assert eagle3.job == run.job and eagle3.no_effect == run.no_effect


MODEL_CONFIG = "model.model_config."


@pytest.mark.parametrize(
    ("changes", "engine", "sampling"),
    [
        (["context.device_target=CPU", "context.mode=1"], {"device": "cpu", "enforce_eager": True}, {}),
        (["use_parallel=true", "parallel_config.model_parallel=4"], {"tensor_parallel_size": 4}, {}),
        (["pretrained_model_dir=", "load_checkpoint=/x"], {"model": "/x"}, {}),
        (["load_checkpoint=/data/qwen3", "load_ckpt_format=safetensors"], {"model": "/data/qwen3"}, {}),
        ([MODEL_CONFIG + "do_sample=false", MODEL_CONFIG + "top_k=1"], {}, {"temperature": 0.0}),
        ([MODEL_CONFIG + "do_sample=true", MODEL_CONFIG + "top_k=5"], {}, {"temperature": 1.0, "top_k": 5}),
        (
            [MODEL_CONFIG + "do_sample=true", MODEL_CONFIG + "temperature=0.7", "sampling_params.temperature=0.2"],
            {},
            {"temperature": 0.2},
        ),
        ([MODEL_CONFIG + "max_length=99"], {"max_model_len": 99}, {"max_tokens": None}),
        ([MODEL_CONFIG + "max_length=99", MODEL_CONFIG + "seq_length=64"], {"max_model_len": 64}, {"max_tokens": None}),
        ([MODEL_CONFIG + "max_length=99", MODEL_CONFIG + "max_new_tokens=5"], {}, {"max_tokens": 5}),
        (["predict_batch_size=2", MODEL_CONFIG + "repetition_penalty=1.0"], {}, {"repetition_penalty": 1.0}),
        ([MODEL_CONFIG + "num_blocks=64"], {"num_gpu_blocks_override": 64}, {}),
        (["max_num_seqs=2", "generation_config={do_sample: true}"], {"max_num_seqs": 2}, {}),
        (["model_impl=auto", "generation_config=vllm"], {"model_impl": "auto", "generation_config": "vllm"}, {}),
    ],
)
def test_what_entries_become(file: Path, changes: list[str], engine: dict[str, Any], sampling: dict[str, Any]) -> None:
    run = load_run(file, changes)
    base = {"seed": 3, "model": "/data/qwen3", "dtype": "bfloat16", "tensor_parallel_size": 1}
    assert run.job.engine == {**base, **engine}
    assert run.job.sampling == sampling
    assert run.job.batch == (2 if "predict_batch_size=2" in changes else None)


def test_prompts_of_mindformers(file: Path) -> None:
    file.write_text(PREDICT.replace("prompts", "input_data"))
    assert [prompt.content for prompt in load_run(file).job.prompts] == ["a"]
    assert [prompt.content for prompt in load_run(file, ["input_data=b"]).job.prompts] == ["b"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["run_mode=finetune"], ["run_mode = 'finetune'", "predict"]),
        (["model=/x"], ["model = '/x'", "pretrained_model_dir=/x"]),
        (["pretrained_model_dir=null"], ["pretrained_model_dir is missing"]),
        (["load_checkpoint=/other"], ["load_checkpoint = '/other'", "pretrained_model_dir = '/data/qwen3'"]),
        (["load_checkpoint=/data/qwen3", "load_ckpt_format=ckpt"], ["load_ckpt_format = 'ckpt'", "safetensors"]),
        (["adapter_id=x"], ["adapter_id = 'x'", "leave it out"]),
        (["parallel_config.data_parallel=2"], ["parallel_config.data_parallel = 2", "must be 1"]),
        (["parallel_config.pipeline_stage=2"], ["parallel_config.pipeline_stage = 2", "must be 1"]),
        (["parallel_config.expert_parallel=2"], ["parallel_config.expert_parallel = 2", "must be 1"]),
        (["parallel_config.model_paralel=2"], ["model_paralel", "did you mean 'model_parallel'"]),
        (["parallel_config.model_parallel=2"], ["model_parallel = 2 contradicts use_parallel = false"]),
        (["parallel_config.model_parallel=x"], ["model_parallel = 'x'", "an integer"]),
        ([MODEL_CONFIG + "params_dtype=float32"], ["params_dtype = 'float32' contradicts", "compute_dtype"]),
        ([MODEL_CONFIG + "compute_dtype=int8"], ["compute_dtype = 'int8'", "bfloat16"]),
        (["dtype=float32"], ["compute_dtype = 'bfloat16' contradicts dtype = 'float32'"]),
        (["max_model_len=64", MODEL_CONFIG + "seq_length=32"], ["seq_length = 32 contradicts max_model_len = 64"]),
        ([MODEL_CONFIG + "do_sample=3"], ["do_sample = 3", "true or false"]),
        ([MODEL_CONFIG + "max_length=x"], ["max_length = 'x'", "an integer"]),
        (["context.device_target=GPU"], ["context.device_target = 'GPU'", "Ascend or CPU"]),
        (["context.device_id=3"], ["context.device_id = 3", "ASCEND_RT_VISIBLE_DEVICES=3"]),
        (["context.mode=2"], ["context.mode = 2"]),
        (["context=3"], ["context = 3", "mapping"]),
        (["speculative_confg.method=ngram"], ["speculative_confg", "did you mean 'speculative_config'"]),
        (["paralel_config.data_parallel=1"], ["paralel_config", "did you mean 'parallel_config'"]),
        (["input_data=b"], ["input_data = ['b'] contradicts prompts"]),
        ([MODEL_CONFIG + "quantization=a8w8"], ["quantization", "a8w8"]),
        ([MODEL_CONFIG + "block_size=7"], ["block_size = 7", "nearest: 16"]),
    ],
)
def test_mistakes_get_one_line(file: Path, capsys: Any, changes: list[str], words: list[str]) -> None:
    assert cli.run_app(["run", str(file), "--check", *changes]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("ms-spec: error: ")
    assert all(word in err for word in words), err


def test_a_file_runs_with_our_network(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """The file in configs, pointed at a tiny checkpoint: the ids of the same call through Python."""
    output, model = tmp_path / "out.jsonl", str(tiny_model("qwen3"))
    changes = [f"pretrained_model_dir={model}", f"output={output}", "prompts=[The quick brown fox, Numbers such as 12]"]
    changes += ["model.model_config.seq_length=128", "model.model_config.max_new_tokens=12", "max_num_seqs=2"]
    changes += ["model.model_config.num_blocks=4", "context.mode=1"]
    assert cli.run_app(["run", str(QWEN3), "--check", *changes]) == 0
    out = capsys.readouterr().out
    assert "Qwen3ForCausalLM, 2 layers" in out and "\nno effect context.max_device_memory, " in out
    assert not output.exists()
    ngram = {"method": "ngram", "num_speculative_tokens": 4}
    sizes = {"block_size": 128, "num_gpu_blocks_override": 4, "max_model_len": 128, "max_num_seqs": 2}
    same = LLM(model, dtype="bfloat16", seed=0, enforce_eager=True, speculative_config=ngram, **sizes)
    with lent(same, monkeypatch):
        assert cli.run_app(["run", str(QWEN3), *changes]) == 0
    err = capsys.readouterr().err
    assert err.count("no effect here") == 1 and "context.max_device_memory" in err
    found = [json.loads(line)["token_ids"] for line in output.read_text().splitlines()]
    messages = [[{"role": "user", "content": text}] for text in ("The quick brown fox", "Numbers such as 12")]
    outputs = same.chat(messages, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    assert found == [output.outputs[0].token_ids for output in outputs] and len(found[0]) > 1


def test_the_files_that_mindformers_brings() -> None:
    """Every predict file of the package, as it is but for the prompts."""
    found = [file for file in importlib.metadata.files("mindformers") or () if file.match("predict_*.yaml")]
    assert len(found) > 5
    for file in found:
        written = yaml.safe_load(file.read_text(encoding="utf-8"))
        model = written.get("pretrained_model_dir") or written.get("load_checkpoint")
        changes = ["prompts=[a]", "use_parallel=true"] + ([] if model else ["pretrained_model_dir=/x"])
        run = load_run(str(file.locate()), changes)
        engine = run.job.engine
        assert engine["model"] == (model or "/x")
        assert engine["tensor_parallel_size"] == written["parallel_config"]["model_parallel"]
        assert engine["dtype"] == written["model"]["model_config"]["compute_dtype"]
        assert engine.get("num_gpu_blocks_override") == written["model"]["model_config"].get("num_blocks")
        assert "context.max_device_memory" in run.no_effect and "trainer" in run.no_effect


BASES = {
    "child.yaml": {"base_config": ["one.yaml", "below/two.yaml"], "a": {"x": 1, "y": {"p": 1}}, "d": [1]},
    "one.yaml": {"a": {"x": 9, "w": 9}, "b": {"k": 1}, "c": 1, "d": [9, 9]},
    "below/two.yaml": {"base_config": "three.yaml", "a": {"z": 2}, "b": {"l": 2}},
    "below/three.yaml": {"a": {"y": {"q": 3, "p": 3}}, "e": 5},
}


MINDFORMERS = """
import importlib.util, json, pathlib, sys, types
root = pathlib.Path(importlib.util.find_spec("mindformers").origin).parent
for name in ("mindformers", "mindformers.tools", "mindformers.tools.register", "mindformers.tools.check_rules"):
    module = sys.modules[name] = types.ModuleType(name)  # what they import takes ten seconds and is not asked
    module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
sys.modules["mindformers.tools"].logger = None
sys.modules["mindformers.tools.check_rules"].check_yaml_depth_before_loading = lambda file: None
from mindformers.tools.register.config import MindFormerConfig
print(json.dumps(MindFormerConfig._file2dict(sys.argv[1])))
"""


def _write(folder: Path, files: dict[str, Any]) -> None:
    (folder / "below").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(yaml.safe_dump(content))


def test_what_a_file_inherits(tmp_path: Path) -> None:
    """As mindformers' own class reads it."""
    _write(tmp_path, BASES)
    expected = {
        "a": {"x": 1, "y": {"p": 1, "q": 3}, "z": 2},
        "b": {"l": 2},
        "c": 1,
        "d": [1],
        "e": 5,
    }
    assert load_yaml(tmp_path / "child.yaml") == expected
    command = [sys.executable, "-c", MINDFORMERS, str(tmp_path / "child.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_inheritance_goes_wrong_in_one_line(tmp_path: Path, capsys: Any) -> None:
    def refused(files: dict[str, Any]) -> str:
        _write(tmp_path, files)
        assert cli.run_app(["run", str(tmp_path / "a.yaml"), "--check"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("ms-spec: error: ") and err.count("\n") == 1
        return err

    circle = refused({"a.yaml": {"base_config": "below/b.yaml"}, "below/b.yaml": {"base_config": "../a.yaml"}})
    assert "circle: a.yaml -> b.yaml -> a.yaml" in circle
    assert "circle: a.yaml -> a.yaml" in refused({"a.yaml": {"base_config": "a.yaml"}})
    assert "no such file" in refused({"a.yaml": {"base_config": "nowhere.yaml"}})
    assert "base_config: must be the name of a file" in refused({"a.yaml": {"base_config": 3}})


def test_files_that_inherit_are_run_files(tmp_path: Path) -> None:
    """Prompts lie beside the file that names them; numbers are read the same at every level."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "p.txt").write_text("one\ntwo\n")
    (tmp_path / "below" / "base.yaml").write_text("prompts: p.txt\nmodel: M\nsampling_params: {temperature: 1e-1}\n")
    (tmp_path / "a.yaml").write_text("base_config: below/base.yaml\nsampling_params: {max_tokens: 3}\n")
    run = load_run(tmp_path / "a.yaml")
    assert [prompt.content for prompt in run.job.prompts] == ["one", "two"]
    assert run.job.sampling == {"temperature": 0.1, "max_tokens": 3}
    assert [one.temperature for one in prepare(run.job)] == [0.1, 0.1]
