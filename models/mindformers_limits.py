"""Which models mindformers' networks can stand in for, checked before any of them is imported. No MindSpore here."""

from __future__ import annotations

from ms_spec.models.config import ModelConfig

ARCHITECTURE = "Qwen3ForCausalLM"
METHODS = ("ngram", "suffix")
"""Ways to draft that run no network of their own in the step graph: the lengths that PagedAttention takes from the
graph's inputs would be taken by the attention of every other network there, too."""


def check_mindformers(model: ModelConfig) -> None:
    """Raises ValueError, in one line, for a model whose network is not taken from mindformers."""
    own = "; use model_impl = 'ms_spec'"
    if model.architecture != ARCHITECTURE:
        raise ValueError(
            f"model_impl = 'mindformers': architectures = {model.architecture!r}, but only {ARCHITECTURE} comes from "
            f"there{own}"
        )
    if model.rope.kind != "default":
        raise ValueError(
            f"model_impl = 'mindformers': rope_scaling of type {model.rope.kind!r} is not supported there{own}"
        )
    if model.qkv_bias or model.output_bias:
        raise ValueError(
            f"model_impl = 'mindformers': attention_bias = true: its output projection has no bias there{own}"
        )
