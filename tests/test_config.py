"""Model shapes from config.json, against transformers' reading of the same file; faults are named."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tiny import tiny_model
from transformers import AutoConfig

from ms_spec.models.config import ModelConfig
from ms_spec.models.loading import load

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


def config(**fields):
    merged = {**BASE, **fields}
    return ModelConfig.from_hf({k: v for k, v in merged.items() if v != "absent"})


@pytest.mark.parametrize(
    "family, options",
    [
        ("llama", {}),
        ("llama", {"bias": True, "mlp_bias": True, "tie": True, "head_dim": 32, "dtype": "bfloat16"}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "kv_heads": 4, "dtype": "float16"}),
        ("qwen2", {"tie": True, "rope_theta": 1e6}),
        ("qwen3", {"head_dim": 32, "kv_heads": 1}),
        ("qwen3", {"bias": True, "sliding_window": None}),
    ],
)
def test_equals_transformers(family, options):
    path = tiny_model(family, **options)
    theirs, ours = AutoConfig.from_pretrained(path), load(str(path)).config
    assert (ours.vocab_size, ours.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    assert (ours.intermediate_size, ours.num_layers) == (theirs.intermediate_size, theirs.num_hidden_layers)
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.rms_norm_eps, ours.rope.theta) == (theirs.rms_norm_eps, theirs.rope_theta)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.dtype == options.get("dtype", "float32")
    names = load(str(path)).checkpoint.names()
    layer = "model.layers.0."
    assert ours.qkv_bias == (layer + "self_attn.q_proj.bias" in names)
    assert ours.output_bias == (layer + "self_attn.o_proj.bias" in names)
    assert ours.mlp_bias == (layer + "mlp.up_proj.bias" in names)
    assert ours.qk_norm == (layer + "self_attn.q_norm.weight" in names)
    assert ours.eos_token_ids == (2,) and ours.bos_token_id == 1


def test_defaults():
    ours = config()
    assert (ours.num_kv_heads, ours.head_dim, ours.rms_norm_eps, ours.rope.theta) == (4, 16, 1e-6, 10000.0)
    assert not ours.tie_word_embeddings and ours.eos_token_ids == () and ours.dtype == "float32"
    assert config(architectures=["Qwen3ForCausalLM"]).head_dim == 128
    assert config(architectures=["MistralForCausalLM"], sliding_window=None).qkv_bias is False
    assert config(architectures=None, model_type="qwen2").architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize("given, ids", [(5, (5,)), ([5, 7, 5], (5, 7)), (None, ())])
def test_eos_ids(given, ids):
    assert config(eos_token_id=given).eos_token_ids == ids
    both = ModelConfig.from_hf({**BASE, "eos_token_id": 9}, {"eos_token_id": given})
    assert both.eos_token_ids == (ids or (9,))


@pytest.mark.parametrize("bad", [100, -1, [5, 100], "x", True, 1.5])
def test_eos_ids_outside_the_vocabulary(bad):
    with pytest.raises(ValueError, match=r"eos_token_id: .* is not a token id of this model; allowed: 0 to 99"):
        config(eos_token_id=bad)
    with pytest.raises(ValueError, match="eos_token_id"):
        ModelConfig.from_hf(BASE, {"eos_token_id": bad})


def test_rope_parameters_of_transformers_5():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    old = config(rope_theta=5e5, rope_scaling=scaling)
    assert config(rope_parameters={**scaling, "rope_theta": 5e5}) == old
    assert config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}) == config(rope_theta=5e5)
    assert config(dtype="bfloat16") == config(torch_dtype="torch.bfloat16")


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["architectures: GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3"]),
        ({"architectures": None, "model_type": "gpt2"}, ["model_type 'gpt2'", "supported: Llama"]),
        ({"hidden_size": "absent"}, ["hidden_size: missing", "integer >= 1"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers: 0"]),
        ({"vocab_size": "many"}, ["vocab_size: 'many'"]),
        ({"num_attention_heads": 5}, ["num_attention_heads: 5 does not divide hidden_size 64"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads: 3 does not divide num_attention_heads (4)"]),
        ({"head_dim": 15}, ["head_dim: 15 is odd"]),
        ({"hidden_act": "gelu"}, ["hidden_act: 'gelu'", "'silu'"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps: -1"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings: 'yes'", "true or false"]),
        ({"torch_dtype": "int8"}, ["dtype: 'int8'", "bfloat16"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config: 'fp8'"]),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, ["rope_scaling.rope_type: 'longrope'", "llama3"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor: missing"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, ["rope_scaling."]),
        ({"rope_scaling": "yarn"}, ["rope_scaling: 'yarn'"]),
        ({"rope_parameters": {"full_attention": {}}}, ["rope_parameters", "per layer type"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor: 0.5"]),
    ],
)
def test_faults_are_named(fields, words):
    with pytest.raises(ValueError) as error:
        config(**fields)
    text = str(error.value)
    assert "\n" not in text and all(w in text for w in words), text


def test_sliding_windows():
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}
    config(**qwen, use_sliding_window=False)
    config(**qwen, use_sliding_window=True, max_window_layers=2)
    config(**{**qwen, "sliding_window": 128}, use_sliding_window=True, max_window_layers=0)
    for windowed in (
        {**qwen, "use_sliding_window": True, "max_window_layers": 1},
        {**qwen, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 64},
    ):
        with pytest.raises(ValueError, match=r"sliding_window: 64 is below max_position_embeddings .128.*to 64"):
            config(**windowed)


def test_faults_in_files_name_the_file(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: cannot be read as JSON"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "architectures": ["X"]}))
    with pytest.raises(ValueError, match=f"{tmp_path}: architectures: X"):
        load(str(tmp_path))


def test_generation_defaults_and_eos_of_the_tokenizer():
    loaded = load(str(tiny_model("llama", eos_token_id=7)))
    assert loaded.config.eos_token_ids == (7,) and loaded.eos_token_ids == (7, 2)
    assert loaded.generation_defaults == {}


def test_validation_needs_no_mindspore():
    code = (
        "import sys; from ms_spec.models import chat_template, config, loading, sources, tokenizer, user_cache; "
        "loaded = loading.load(sys.argv[1]); loaded.tokenizer.encode('x'); loaded.checkpoint.names(); "
        "print([m for m in ('mindspore', 'transformers', 'torch', 'huggingface_hub', 'gguf') if m in sys.modules])"
    )
    path = str(tiny_model("llama"))
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
