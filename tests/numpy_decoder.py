"""A small transformer: its config, a random checkpoint, and NumPy code that runs it without any cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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


class Shape(NamedTuple):
    """What the arithmetic of a block needs to know beside its weights."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float


class Decoded(NamedTuple):
    """One pass over a sequence of T tokens, all float64."""

    logits: np.ndarray  # [T, V]
    states: np.ndarray  # [N + 1, T, H]: residual stream; 0 is the embedding, k what comes out of the first k blocks
    normed: np.ndarray  # [T, H]: what the output matrix sees
    keys: list[np.ndarray]  # of each layer [T, KV * D]
    values: list[np.ndarray]


def oracle(family: str, w: dict[str, np.ndarray], tokens: list[int]) -> tuple[np.ndarray, list, list]:
    """Logits [T, V] of a whole sequence, and each layer's keys and values [T, KV * D]. float64, one pass, no cache."""
    c = config(family)
    shape = Shape(c.num_heads, c.num_kv_heads, c.head_dim, c.rms_norm_eps, THETA)
    done = decode(shape, w, tokens, c.num_layers)
    return done.logits, done.keys, done.values


def decode(shape: Shape, w: dict[str, np.ndarray], tokens: Sequence[int], layers: int) -> Decoded:
    """Runs a Llama, Qwen2 or Qwen3 with Hugging Face's tensor names; without lm_head.weight the embedding is used."""
    x = w["model.embed_tokens.weight"][list(tokens)].astype(np.float64)
    positions, seen = np.arange(len(x)), causal(len(x))
    states, all_keys, all_values = [x], [], []
    for i in range(layers):
        x, k, v = block(shape, w, f"model.layers.{i}.", x, positions, seen)
        states.append(x)
        all_keys.append(k.reshape(len(k), -1))
        all_values.append(v.reshape(len(v), -1))
    normed = norm(x, w["model.norm.weight"], shape.eps)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return Decoded(normed @ head.T, np.stack(states), normed, all_keys, all_values)


def block(shape: Shape, w: dict[str, np.ndarray], at: str, x: np.ndarray, positions: np.ndarray, seen: np.ndarray):
    """One pre-norm block on x [T, H]. Returns the new residual stream, the keys and the values [T, KV, D]."""
    y = norm(x, w[f"{at}input_layernorm.weight"], shape.eps)
    q, k, v = project(shape, w, f"{at}self_attn.", y, positions)
    x = x + linear(w, f"{at}self_attn.o_proj", attend(q, k, v, seen))
    return x + mlp(w, f"{at}mlp.", norm(x, w[f"{at}post_attention_layernorm.weight"], shape.eps)), k, v


def project(shape: Shape, w: dict[str, np.ndarray], at: str, y: np.ndarray, positions: np.ndarray):
    """Queries [T, heads, D], keys and values [T, kv_heads, D]; with per-head norms if the checkpoint has them."""
    q, k, v = (linear(w, f"{at}{c}_proj", y).reshape(len(y), -1, shape.head_dim) for c in "qkv")
    if f"{at}q_norm.weight" in w:
        q, k = norm(q, w[f"{at}q_norm.weight"], shape.eps), norm(k, w[f"{at}k_norm.weight"], shape.eps)
    assert q.shape[1] == shape.heads and k.shape == v.shape and k.shape[1] == shape.kv_heads
    return rotate(q, positions, shape.theta), rotate(k, positions, shape.theta), v


def rotate(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Rotary positions of x [T, heads, D]: elements i and i + D/2 turn by position / theta^(2i/D)."""
    half = x.shape[-1] // 2
    angle = positions[:, None] / theta ** (np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def causal(length: int) -> np.ndarray:
    """bool [T, T]: row t sees columns 0 .. t."""
    return np.tri(length, dtype=bool)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Softmax attention of q [T, heads, D] over k, v [S, kv_heads, D] where seen [T, S]; returns [T, heads * D]."""
    (length, heads, dim), groups = q.shape, k.shape[1]
    out = np.zeros((length, heads, dim))
    for h in range(heads):
        g = h * groups // heads
        scores = np.where(seen, q[:, h] @ k[:, g].T / np.sqrt(dim), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, h] = weights / weights.sum(-1, keepdims=True) @ v[:, g]
    return out.reshape(length, -1)


def mlp(w: dict[str, np.ndarray], at: str, y: np.ndarray) -> np.ndarray:
    return linear(w, f"{at}down_proj", silu(linear(w, f"{at}gate_proj", y)) * linear(w, f"{at}up_proj", y))


def linear(w: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def norm(x: np.ndarray, gamma: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gamma


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))
