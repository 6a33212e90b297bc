"""Rotary tables against transformers'."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ms_spec.models.config import ModelConfig, RopeConfig
from ms_spec.models.rope import rope_tables

SCALINGS = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn without an original length": {"rope_type": "yarn", "factor": 4.0},
    "yarn, all options": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
        "truncate": False,
    },
    "yarn, given attention": {"type": "yarn", "factor": 2.5, "attention_factor": 0.8},
}


def configs(scaling, head_dim=64, theta=10000.0, max_position=256):
    fields = {
        "hidden_size": 4 * head_dim,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 8,
        "head_dim": head_dim,
        "rope_theta": theta,
        "max_position_embeddings": max_position,
        "rope_scaling": scaling,
        "architectures": ["LlamaForCausalLM"],
    }
    ours = ModelConfig.from_hf({**fields, "bos_token_id": None, "eos_token_id": None})
    return LlamaConfig(**{**fields, "rope_scaling": dict(scaling) if scaling else None}), ours


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("head_dim, theta", [(64, 10000.0), (16, 500000.0), (96, 1234.5)])
def test_tables_equal_transformers(name, head_dim, theta):
    theirs, ours = configs(SCALINGS[name], head_dim, theta)
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), torch.arange(256)[None])
    our_cos, our_sin = rope_tables(ours.rope, ours.head_dim, 256)
    assert our_cos.dtype == np.float32 and our_cos.shape == (256, head_dim // 2)
    np.testing.assert_allclose(our_cos, cos[0, :, : head_dim // 2].numpy(), rtol=0, atol=3e-5)
    np.testing.assert_allclose(our_sin, sin[0, :, : head_dim // 2].numpy(), rtol=0, atol=3e-5)
    assert np.mean(our_cos == cos[0, :, : head_dim // 2].numpy()) > 0.7


def test_dynamic_scaling_beyond_the_trained_length_equals_token_by_token_decoding():
    theirs, ours = configs(SCALINGS["dynamic"], 32, 10000.0, max_position=48)
    module = LlamaRotaryEmbedding(theirs)
    our_cos, our_sin = rope_tables(ours.rope, 32, 160)
    for position in range(160):
        cos, sin = module(torch.zeros(1), torch.tensor([[position]]))
        np.testing.assert_allclose(our_cos[position], cos[0, 0, :16].numpy(), atol=3e-5)
        np.testing.assert_allclose(our_sin[position], sin[0, 0, :16].numpy(), atol=3e-5)


def test_a_longer_table_starts_like_a_shorter_one():
    for name in SCALINGS:
        _, ours = configs(SCALINGS[name], 32, max_position=48)
        for long, short in zip(rope_tables(ours.rope, 32, 100), rope_tables(ours.rope, 32, 40)):
            np.testing.assert_array_equal(long[:40], short)


def test_frequency_factors_divide():
    factors = tuple(float(i + 1) for i in range(8))
    cos, _ = rope_tables(RopeConfig(kind="factors", frequency_factors=factors), 16, 10)
    plain = 10000.0 ** -(np.arange(8) / 8.0)
    np.testing.assert_allclose(cos[7], np.cos(7 * plain / np.array(factors)), atol=1e-6)
