"""The same model in transformers on torch, with the very weights that our engine holds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.figures import num_cores


def torch_model(loaded: Any, dtype: str) -> Any:
    """LlamaForCausalLM in ``dtype`` ("bfloat16", "float32"), its weights rounded through the dtype that ours have.

    loaded: see ``ms_spec.models.loading.load``.
    Raises ValueError for another architecture, or for scaled rotary embeddings.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    c, checkpoint = loaded.config, loaded.checkpoint
    if c.rope.kind != "default" or c.qk_norm or c.qkv_bias:
        raise ValueError(f"model: the comparison with transformers knows plain Llama only, not {c.architecture}")
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps,
        rope_theta=c.rope.theta,
        tie_word_embeddings=c.tie_word_embeddings,
        attention_bias=c.output_bias,
        mlp_bias=c.mlp_bias,
    )
    torch.set_num_threads(num_cores())
    model = LlamaForCausalLM(config).eval()
    held = getattr(torch, c.dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = torch.from_numpy(checkpoint.read(name))
            # Norms are vectors, which we keep in float32.
            parameter.copy_(tensor if tensor.ndim == 1 else tensor.to(held).to(torch.float32))
    return model.to(getattr(torch, dtype))


class Generate:
    """Greedy ``generate`` with the KV cache, always the full number of tokens."""

    def __init__(self, loaded: Any, dtype: str) -> None:
        self.model = torch_model(loaded, dtype)
        # Neither stops: our side ignores the end of the text too.
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        self.ids: list[int] = []

    def seconds(self, ids: Sequence[int], tokens: int) -> float:
        """Wall time of one call. What it said is in ``ids`` then."""
        import torch

        prompt = torch.tensor([list(ids)])
        start = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=tokens,
                do_sample=False,
                use_cache=True,
            )
        seconds = time.perf_counter() - start
        self.ids = out[0, len(ids) :].tolist()
        return seconds
