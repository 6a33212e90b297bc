"""``ms-spec info``: what a model is and what it would take, from its config and file headers alone."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from ms_spec.config import EngineConfig
from ms_spec.limits import CACHE_ITEM_BYTES, device_of, model_limits
from ms_spec.models.loading import load

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}


def describe(model: str) -> dict[str, Any]:
    """Facts about a model, ready for JSON. Sizes in bytes, lengths in tokens.

    Raises:
        ValueError: there is no such model, it is damaged, or its architecture is not supported.
    """
    loaded = load(model)
    source, config, checkpoint = loaded.source, loaded.config, loaded.checkpoint
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    stored: Counter[str] = Counter()
    for name, shape in shapes.items():
        stored[checkpoint.dtype(name)] += math.prod(shape)
    matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) > 1)
    parameters = sum(stored.values())
    engine = EngineConfig.parse(model)
    defaults = model_limits(engine, config)
    cache_tokens = defaults.num_blocks * defaults.block_size
    return {
        "model": source.name,
        "path": str(source.path),
        "format": {"hf": "Hugging Face folder", "gguf": "GGUF"}[source.kind],
        "architecture": config.architecture,
        "parameters": parameters,
        "stored_as": dict(stored.most_common()),
        "dtype": config.dtype,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "rope": config.rope.kind,
        "tied_embeddings": config.tie_word_embeddings,
        "weight_bytes": matrices * WIDTH[config.dtype] + (parameters - matrices) * WIDTH["float32"],
        "kv_cache_bytes_per_token": {device: config.kv_numbers * width for device, width in CACHE_ITEM_BYTES.items()},
        "defaults": {
            "max_num_seqs": defaults.max_num_seqs,
            "max_model_len": defaults.max_model_len,
            "block_size": defaults.block_size,
            "kv_cache_bytes": cache_tokens * config.kv_numbers * CACHE_ITEM_BYTES[device_of(engine)],
        },
    }


def human(number: float, unit: str = "B") -> str:
    """98362432 -> 98.4 MB."""
    for prefix in ("", "k", "M", "G"):
        if abs(number) < 1000:
            return f"{number:.4g} {prefix}{unit}".strip()
        number /= 1000
    return f"{number:.4g} T{unit}"


def show(facts: dict[str, Any]) -> None:
    """Prints what :func:`describe` found."""
    kv, defaults = facts["kv_cache_bytes_per_token"], facts["defaults"]
    total = facts["parameters"]
    stored = ", ".join(
        f"{name} {count / total:.0%}" for name, count in facts["stored_as"].items() if count * 200 > total
    )
    lines = {
        "model": f"{facts['model']} ({facts['format']})",
        "path": facts["path"],
        "architecture": facts["architecture"],
        "parameters": f"{human(total, '')} (stored as {stored})",
        "layers": f"{facts['layers']}, hidden size {facts['hidden_size']}",
        "attention": f"{facts['heads']} heads, {facts['kv_heads']} for keys and values, of {facts['head_dim']}",
        "vocabulary": f"{facts['vocabulary']} tokens" + (", tied embeddings" if facts["tied_embeddings"] else ""),
        "context": f"{facts['context_length']} tokens, rope {facts['rope']}",
        "weights": f"{human(facts['weight_bytes'])} in memory as {facts['dtype']}",
        "KV cache": f"{human(kv['cpu'])} per token on CPU, {human(kv['ascend'])} on Ascend",
        "by default": (
            f"{defaults['max_num_seqs']} requests at once of up to {defaults['max_model_len']} tokens; "
            f"KV cache {human(defaults['kv_cache_bytes'])}"
        ),
    }
    for name, value in lines.items():
        print(f"{name + ':':<14}{value}")
