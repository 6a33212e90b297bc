"""From files to generated text: every format gives the same model, and a damaged one gives one clear line."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from engines import greedy, token_ids
from safetensors.torch import load_file, save_file
from tiny import CORPUS, copy_of, tiny_model
from tiny_gguf import tiny_gguf

from ms_spec import LLM

PROMPT = np.random.default_rng(2).integers(3, 500, 20).tolist()
SMALL = {"max_model_len": 64, "max_num_seqs": 1, "generation_config": "vllm"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Packed weights of this test alone. The compiled kernels stay where they are."""
    from ms_spec.models.ops.cpu.build import library

    library()
    monkeypatch.setenv("MS_SPEC_CACHE", str(tmp_path / "cache"))


def said(model, **arguments) -> list[int]:
    with LLM(str(model), **{**SMALL, **arguments}) as llm:
        return token_ids(llm.generate([PROMPT], greedy(16), use_tqdm=False))[0]


def by_transformers(path) -> list[int]:
    """Greedy decoding in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(16):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("family, dtype", [("llama", "float32"), ("qwen2", "float16"), ("qwen3", "bfloat16")])
def test_directories(family, dtype):
    path = tiny_model(family, dtype=dtype, seed=6)
    wanted = by_transformers(path)
    assert said(path) == wanted
    assert said(path) == wanted  # now from the packed weights in the cache
    sharded = tiny_model(family, dtype=dtype, seed=6, max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert said(sharded) == wanted


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gguf(family):
    path = tiny_model(family, seed=6)
    assert said(tiny_gguf(path, family), dtype="float32") == by_transformers(path)


def test_dtype_rounds_the_weights():
    path = tiny_model("llama", seed=6)
    half = tiny_model("llama", seed=6, dtype="bfloat16")
    assert said(path, dtype="bfloat16") == by_transformers(half)


def test_sentencepiece_model():
    path = copy_of(tiny_model("llama"))
    (path / "tokenizer.json").unlink()
    (path / "corpus.txt").write_text(CORPUS)
    sentencepiece.SentencePieceTrainer.train(
        input=str(path / "corpus.txt"),
        model_prefix=str(path / "tokenizer"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        minloglevel=2,
    )
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": False}))
    theirs = transformers.AutoTokenizer.from_pretrained(str(path))
    with LLM(str(path), **SMALL) as llm:
        output = llm.generate("A tiny model reads", greedy(12), use_tqdm=False)[0]
    assert output.prompt_token_ids == theirs.encode("A tiny model reads")
    assert output.outputs[0].text == theirs.decode(
        output.prompt_token_ids + output.outputs[0].token_ids, skip_special_tokens=True
    ).removeprefix(theirs.decode(output.prompt_token_ids, skip_special_tokens=True))


def fault(model, **arguments) -> str:
    with pytest.raises(ValueError) as error:
        LLM(str(model), **{**SMALL, **arguments})
    assert "\n" not in str(error.value)
    return str(error.value)


def changed(path, change):
    """A copy of a model whose tensors ``change`` may alter in place."""
    path = copy_of(path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def every_tensor() -> list[tuple[str, str]]:
    """One layer of each kind is enough: the names differ only in the layer's number."""
    models = {"llama": {"bias": True, "mlp_bias": True}, "qwen2": {}, "qwen3": {}}
    return [
        (family, name)
        for family, options in models.items()
        for name in load_file(tiny_model(family, layers=1, **options) / "model.safetensors")
    ]


def test_each_missing_tensor_is_named():
    options = {"llama": {"bias": True, "mlp_bias": True}}
    tensors = every_tensor()
    assert len(tensors) > 40
    for family, name in tensors:
        path = tiny_model(family, layers=1, **options.get(family, {}))
        message = fault(changed(path, lambda t, name=name: t.pop(name)))
        assert name in message and "missing" in message, (family, message)


def test_a_shared_output_matrix_need_not_be_there():
    path = tiny_model("llama", tie=True)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    assert said(path) == by_transformers(path)


def test_wrong_shapes_name_both():
    def narrow(tensors):
        name = "model.layers.1.mlp.down_proj.weight"
        tensors[name] = tensors[name][:, :-1].contiguous()

    message = fault(changed(tiny_model("llama"), narrow))
    assert "model.layers.1.mlp.down_proj.weight" in message and "[64, 95]" in message and "[64, 96]" in message


@pytest.mark.parametrize("kind", ["safetensors", "sharded", "gguf"])
def test_truncated_files(kind):
    if kind == "gguf":
        path = copy_of(tiny_gguf(tiny_model("llama"), "llama").parent)
        file = next(path.glob("*.gguf"))
        model = file
    else:
        model = path = copy_of(tiny_model("llama", max_shard_size="60KB" if kind == "sharded" else "5GB"))
        file = sorted(path.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-100])
    message = fault(model)
    assert file.name in message and re.search("truncated|incomplete|damaged|ends|bytes", message)


def test_other_faults():
    path = copy_of(tiny_model("llama"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"], "model_type": "nosuch"}))
    message = fault(path)
    assert "nosuch" in message.lower() and "llama" in message.lower() and "qwen3" in message.lower()
    (path / "config.json").unlink()
    assert "config.json" in fault(path)
    assert "/no/such/place" in fault("/no/such/place")
