"""Logits of our network against transformers': same checkpoint, same ids, float32, however the ids are fed."""

from __future__ import annotations

import functools
import json

import gguf
import numpy as np
import pytest
import torch
import transformers
from forward import Forward
from tiny import tiny_model

from ms_spec.models.sources import resolve

TOLERANCE = 2e-4
LENGTH, TRAINED = 64, 48
ROPES = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
SHAPES = {
    "plain": ("llama", {}),
    "wide heads": ("llama", {"head_dim": 32}),
    "narrow heads": ("llama", {"head_dim": 8}),
    "attention bias": ("llama", {"bias": True}),
    "mlp bias": ("llama", {"mlp_bias": True}),
    "all biases, tied": ("llama", {"bias": True, "mlp_bias": True, "tie": True}),
    "tied": ("llama", {"tie": True}),
    "one KV head": ("llama", {"heads": 8, "kv_heads": 1}),
    "no groups": ("llama", {"heads": 4, "kv_heads": 4}),
    "odd sizes": ("llama", {"hidden": 72, "heads": 3, "kv_heads": 1, "intermediate": 100, "vocab": 501}),
    "large eps": ("llama", {"rms_norm_eps": 0.1}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3, tied": ("qwen3", {"tie": True}),
    "qwen3 with bias": ("qwen3", {"bias": True}),
}
# Chunks of a prompt, then one by one, then several at a time, then one by one again.
PIECES = [16, 16, 7, *[1] * 8, 5, 2, 5, 3, 1, 1]


@functools.cache
def token_ids() -> np.ndarray:
    return np.random.default_rng(5).integers(3, 500, LENGTH)


def expected(path, ids, one_by_one=False) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        if not one_by_one:
            return model(torch.tensor(ids[None])).logits[0].numpy()
        cache, rows = transformers.DynamicCache(), []
        for token in ids:
            rows.append(model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, 0].numpy())
        return np.stack(rows)


def check(path, backend, one_by_one=False) -> np.ndarray:
    ids = token_ids()
    want = expected(path, ids, one_by_one)
    assert want.std() > 0.2, "logits too small for the tolerance to mean anything"
    got = Forward(path, backend, max_len=80).run(ids, PIECES, context=1, width=16)
    assert np.abs(got - want).max() <= TOLERANCE
    return want


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("rope", ROPES)
def test_every_family_with_every_rope_scaling(family, rope):
    # Yarn and llama3 name the length they were trained for, dynamic scaling starts behind max_position_embeddings.
    path = tiny_model(family, rope_scaling=ROPES[rope], max_position=TRAINED)
    want = check(path, "cpu", one_by_one=rope == "dynamic")
    if rope != "default":  # the scaling has to show, or nothing was tested
        config = json.loads((path / "config.json").read_text())
        assert config["rope_scaling"]["rope_type"] == rope
        unscaled = expected(tiny_model(family, max_position=TRAINED), token_ids())
        assert np.abs(want - unscaled).max() > 20 * TOLERANCE


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "plain"])
def test_every_shape(shape):
    family, options = SHAPES[shape]
    check(tiny_model(family, **options), "cpu")


@pytest.mark.parametrize("shape, rope", [("qwen2", "default"), ("qwen3", "yarn"), ("all biases, tied", "llama3")])
def test_plain_operations(shape, rope):
    family, options = SHAPES[shape]
    check(tiny_model(family, rope_scaling=ROPES[rope], **options), "reference")


def test_storage_in_sixteen_bits_equals_rounded_weights():
    """bfloat16 and float16 concern the weights only: transformers in float32 on the rounded ones gives our logits."""
    for dtype in ("bfloat16", "float16"):
        path = tiny_model("qwen3", dtype=dtype, seed=3)
        want = expected(path, token_ids())
        got = Forward(path, "cpu", dtype, max_len=80).run(token_ids(), PIECES, width=16)
        assert np.abs(got - want).max() <= TOLERANCE


def smollm2_by_transformers() -> torch.nn.Module:
    """A LlamaForCausalLM filled from the GGUF file by the gguf package: none of our readers has a part in it."""
    reader = gguf.GGUFReader(str(resolve("smollm2-135m").path))
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    ends = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {"model.norm.weight": tensors["output_norm.weight"]}
    state["model.embed_tokens.weight"] = state["lm_head.weight"] = tensors["token_embd.weight"]
    for layer in range(30):
        for theirs, ours in ends.items():
            value = tensors[f"blk.{layer}.{theirs}.weight"]
            if theirs in ("attn_q", "attn_k"):
                # The converter interleaved the two halves of each head: pair i of the file is (i, i + 32) here.
                value = value.reshape(-1, 32, 2, 576).swapaxes(1, 2).reshape(value.shape)
            state[f"model.layers.{layer}.{ours}.weight"] = value
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    state = {name: torch.from_numpy(np.array(value, np.float32)) for name, value in state.items()}
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval()


def test_smollm2():
    text = (1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 2)  # as a chat begins, then anything
    ids = np.concatenate([text, np.random.default_rng(8).integers(0, 49152, 38)])
    model = smollm2_by_transformers()
    with torch.no_grad():
        want = model(torch.tensor(ids[None])).logits[0].numpy()
    del model
    assert np.argmax(want[:10], -1).std() > 0
    assert want.std() > 1
    got = Forward("smollm2-135m", max_len=64, requests=1).run(ids, [16, 12, 1, 1, 5, 5, 1, 7], width=16)
    assert np.abs(got - want).max() <= TOLERANCE
