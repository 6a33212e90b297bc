"""Small GGUF files, written with the gguf package from what ``tiny_model`` made."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import load_file
from tiny import CHAT_TEMPLATE, new_folder

_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    fixed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in fixed:
        return f"{fixed[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}.{suffix}"


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows that llama.cpp's converter gives to q and k of Llama."""
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def tiny_gguf(model: Path, arch: str, kind: str = "F32", *, pre: str = "gpt-2", extra=None) -> Path:
    """A GGUF file of the model: ``arch`` llama, qwen2 or qwen3; matrices of type ``kind``, vectors float32.

    The tokenizer is the model's, as byte-level BPE. ``extra(writer)`` may add metadata and tensors.
    """
    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    path = new_folder() / f"{arch}-{kind}.gguf"
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if (model / "tokenizer.json").exists():
        _add_tokenizer(writer, json.loads((model / "tokenizer.json").read_text()), pre)
    if extra:
        extra(writer)
    qtype = gguf.GGMLQuantizationType[kind]
    for name, tensor in load_file(str(model / "model.safetensors")).items():
        values = tensor.float().numpy()
        if arch == "llama" and ".q_proj." in name:
            values = permuted(values, heads)
        if arch == "llama" and ".k_proj." in name:
            values = permuted(values, kv_heads)
        values = np.ascontiguousarray(values)
        if values.ndim > 1 and kind != "F32":
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, qtype), raw_dtype=qtype)
        else:
            writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict, pre: str) -> None:
    vocab = tokenizer["model"]["vocab"]
    special = {t["content"] for t in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=lambda t: vocab[t])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in special else 1 for t in tokens])
    writer.add_token_merges([" ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
