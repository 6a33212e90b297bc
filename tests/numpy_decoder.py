"""A small transformer: its config, a random checkpoint, and NumPy code that runs it without any cache."""

from __future__ import annotations

import numpy as np

from ms_spec.models.config import ModelConfig, RopeConfig

THETA = 100.0


def config(family: str) -> ModelConfig:
    return ModelConfig(
        architecture=family,
        vocab_size=97,
        hidden_size=64,
        intermediate_size=80,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=THETA),
        qkv_bias=family != "qwen3",
        output_bias=family == "llama",
        mlp_bias=family == "llama",
        qk_norm=family == "qwen3",
        tie_word_embeddings=family != "llama",
        max_position_embeddings=96,
        dtype="float16",
    )


class RandomCheckpoint:
    """A checkpoint of random float16 tensors, for whatever the specs ask for."""

    def __init__(self, family: str, specs: list):
        rng, c = np.random.default_rng(7), config(family)
        self.tensors = {}
        heights = {"q_proj": c.num_heads * c.head_dim, "k_proj": c.num_kv_heads * c.head_dim}
        heights["v_proj"] = heights["k_proj"]
        biased = {"q_proj": c.qkv_bias, "k_proj": c.qkv_bias, "v_proj": c.qkv_bias, "o_proj": c.output_bias}
        biased.update(gate_proj=c.mlp_bias, up_proj=c.mlp_bias, down_proj=c.mlp_bias)
        for spec in specs:
            for name in spec.sources:
                part, bias = name.split(".")[-2], name.endswith(".bias")
                if bias and not biased.get(part):
                    continue
                rows = heights.get(part, c.intermediate_size) if len(spec.sources) > 1 else spec.shape[0]
                value = rng.normal(size=(rows, *spec.shape[1:])) * (0.15 if len(spec.shape) == 2 else 0.3)
                if len(spec.shape) == 1 and not bias:
                    value += 1
                self.tensors[name] = value.astype(np.float16).astype(np.float32)

    def names(self):
        return list(self.tensors)

    def shape(self, name):
        return self.tensors[name].shape

    def dtype(self, name):
        return "float16"

    def read(self, name, start=0, stop=None):
        return self.tensors[name][start:stop]

    def identity(self):
        return "random"


def norm(x, gamma, eps=1e-5):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gamma


def oracle(family: str, w: dict[str, np.ndarray], tokens: list[int]) -> tuple[np.ndarray, list, list]:
    """Logits [T, V] of a whole sequence, and each layer's keys and values [T, KV * D]. float64, one pass, no cache."""
    c = config(family)
    heads, kv_heads, dim, length = c.num_heads, c.num_kv_heads, c.head_dim, len(tokens)
    angle = np.arange(length)[:, None] / THETA ** (np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def turn(x):
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    x = w["model.embed_tokens.weight"][tokens]
    all_keys, all_values = [], []
    for i in range(c.num_layers):
        at = f"model.layers.{i}."
        y = norm(x, w[at + "input_layernorm.weight"])
        y = np.concatenate([linear(y, f"{at}self_attn.{n}_proj") for n in "qkv"], 1)
        y = y.reshape(length, heads + 2 * kv_heads, dim)
        q, k, v = y[:, :heads], y[:, heads : heads + kv_heads], y[:, heads + kv_heads :]
        if c.qk_norm:
            q, k = norm(q, w[at + "self_attn.q_norm.weight"]), norm(k, w[at + "self_attn.k_norm.weight"])
        q, k = turn(q), turn(k)
        all_keys.append(k.reshape(length, -1))
        all_values.append(v.reshape(length, -1))
        out = np.zeros((length, heads, dim))
        for t in range(length):
            for h in range(heads):
                g = h * kv_heads // heads
                s = np.exp(k[: t + 1, g] @ q[t, h] / np.sqrt(dim))
                out[t, h] = s / s.sum() @ v[: t + 1, g]
        x = x + linear(out.reshape(length, -1), f"{at}self_attn.o_proj")
        y = norm(x, w[at + "post_attention_layernorm.weight"])
        gate, up = linear(y, f"{at}mlp.gate_proj"), linear(y, f"{at}mlp.up_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{at}mlp.down_proj")
    head = w["model.embed_tokens.weight"] if c.tie_word_embeddings else w["lm_head.weight"]
    return norm(x, w["model.norm.weight"]) @ head.T, all_keys, all_values
