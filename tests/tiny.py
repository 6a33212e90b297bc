"""Tiny random models on disk, made by transformers: the stand-ins for real checkpoints in all tests.

``tiny_model(family="qwen3", tie=True)`` returns a directory that holds what ``save_pretrained`` writes and a small
tokenizer. The same arguments give the same directory for the life of the process; it is deleted at its end. Weights,
biases and norms are all random (none at its initial 0 or 1), large enough that greedy output is not one token for ever.
"""

from __future__ import annotations

import atexit
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

_ROOT: Path | None = None
_MADE: dict[str, Path] = {}
CORPUS = (
    "The quick brown fox jumps over the lazy dog. A tiny model reads a tiny text, and it reads the text again. "
    "Numbers such as 12, 345 and 6789; code such as for i in range(10): print(i). Und auch deutsche Wörter. 你好世界"
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_model(
    family: str = "llama",
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 96,
    vocab: int = 512,
    max_position: int = 512,
    rope_scaling: dict[str, Any] | None = None,
    rope_theta: float = 10000.0,
    bias: bool = False,
    mlp_bias: bool = False,
    tie: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    scale: float = 0.1,
    max_shard_size: str = "5GB",
    **config: Any,
) -> Path:
    """A directory with a random model of ``family`` "llama", "qwen2" or "qwen3". ``bias``: of attention."""
    key = json.dumps(dict(locals()), sort_keys=True, default=str)
    if key in _MADE:
        return _MADE[key]
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    configs = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    models = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}
    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": max_position,
        "rope_theta": rope_theta,
        "rope_scaling": dict(rope_scaling) if rope_scaling else None,
        "tie_word_embeddings": tie,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if head_dim or family == "qwen3":
        fields["head_dim"] = head_dim or hidden // heads
    if family != "qwen2":
        fields["attention_bias"] = bias
    if family == "llama":
        fields["mlp_bias"] = mlp_bias
    fields.update(config)
    generator = torch.Generator().manual_seed(seed)
    model = models[family](configs[family](**fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(noise + 1 if "norm" in name else noise)
    model.generation_config.eos_token_id = fields["eos_token_id"]
    path = new_folder()
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    tiny_tokenizer(path, vocab)
    _MADE[key] = path
    return path


def tiny_tokenizer(path: Path, vocab: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json: byte-level BPE; a few letters only if vocab is below 300.

    Ids 0, 1, 2 are <pad>, <bos>, <eos>, then <|user|> and <|assistant|>.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet() if vocab >= 300 else list("abcdefghijklmnopqrstuvwxyzĠ")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=special,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
        min_frequency=1,
    )
    text = CORPUS if vocab >= 300 else "".join(c for c in CORPUS.lower() if c in "abcdefghijklmnopqrstuvwxyz ")
    chance = random.Random(0)  # made-up words, so that there is enough to merge for any small vocabulary
    words = ["".join(chance.choice("aeioubdglmnprst") for _ in range(6)) for _ in range(vocab)]
    tokenizer.train_from_iterator([text * 3, " ".join(words)], trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def copy_of(path: Path) -> Path:
    """A copy that a test may break."""
    target = new_folder() / "model"
    shutil.copytree(path, target)
    return target


def new_folder() -> Path:
    """An empty folder that lives as long as the process."""
    global _ROOT
    if _ROOT is None:
        _ROOT = Path(tempfile.mkdtemp(prefix="ms-spec-tiny-"))
        atexit.register(shutil.rmtree, _ROOT, ignore_errors=True)
    return Path(tempfile.mkdtemp(dir=_ROOT))
