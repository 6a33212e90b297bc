"""Shape of a drafter's decoder layers, from its config and its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ms_spec.models.config import ModelConfig, check_activation, integer, number, rope_from_hf
from ms_spec.models.drafts.renamed import RenamedCheckpoint


def layer_fields(
    tensors: RenamedCheckpoint,
    config: Mapping[str, Any],
    first: str,
    target: ModelConfig,
    num_layers: int,
    windows: bool = False,
) -> dict[str, Any]:
    """The arguments of a ``LayerShape``. ValueError names the field.

    ``first``: prefix of the first layer's tensors, which say what configs get wrong (biases, norms of heads). Positions
    go as far as the target's, whatever max_position_embeddings the draft was saved with, and no field of the target's
    rotary embedding is inherited: without rope_theta the base is 10000. ``windows``: the caller knows what to make of
    sliding windows.
    """
    there = set(tensors.names())
    attention, mlp = f"{first}self_attn.", f"{first}mlp."
    check_activation(config)
    if not windows and "sliding_attention" in (config.get("layer_types") or ()):
        raise ValueError("layer_types: 'sliding_attention' is not supported in drafts; supported: 'full_attention'")
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    kv_heads = integer(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads: {kv_heads} does not divide num_attention_heads ({heads})")
    query = f"{attention}q_proj.weight"
    rows = tensors.shape(query)[0] if query in there else hidden
    if config.get("head_dim") is None and rows % heads:
        raise ValueError(f"num_attention_heads: {heads} does not divide the {rows} rows of {query}; set head_dim")
    head_dim = integer(config, "head_dim", max(rows // heads, 1))
    if head_dim % 2:
        raise ValueError(f"head_dim: {head_dim} is odd; rotary embeddings need an even one")
    return {
        "hidden_size": hidden,
        "intermediate_size": integer(config, "intermediate_size"),
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": number(config, "rms_norm_eps", 1e-6),
        "rope": rope_from_hf(config, target.max_position_embeddings),
        "qkv_bias": any(f"{attention}{name}_proj.bias" in there for name in "qkv"),
        "output_bias": f"{attention}o_proj.bias" in there,
        "mlp_bias": any(f"{mlp}{name}_proj.bias" in there for name in ("gate", "up", "down")),
        "qk_norm": any(f"{attention}{name}_norm.weight" in there for name in "qk"),
    }


def numbered(names: Iterable[str], prefix: str, where: str, first: int = 0) -> int:
    """How many ``prefix{i}.`` there are, counted from ``first``; ValueError if one is left out."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
    found = sorted({int(match[1]) for match in map(pattern.match, names) if match} | set(range(first)))
    if found != list(range(len(found))):
        gap = min(set(range(len(found))) - set(found))
        raise ValueError(f"{where}: has {prefix}{found[-1]}. but no {prefix}{gap}.; fetch the whole checkpoint")
    return len(found)
