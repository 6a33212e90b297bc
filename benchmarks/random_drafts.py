"""Random draft checkpoints of a target's own widths, in public layouts. What they draft is noise; its cost is real.

Weights are bfloat16. Layers have the target's shape: the same width, heads and feed-forward network.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EAGLE3_VOCAB = 8192
"""Rows of EAGLE-3's own output matrix, where the target has as many."""
DFLASH_LAYERS = 5
"""As in the public checkpoints."""


class Tensors:
    """Random tensors under their names, for a target of shape ``config`` (a ``ModelConfig``)."""

    def __init__(self, config: Any) -> None:
        import torch

        self.config = config
        self.made: dict[str, Any] = {}
        self._generator = torch.Generator().manual_seed(0)

    def linear(self, name: str, out: int, inner: int, bias: bool = False) -> None:
        self._add(f"{name}.weight", (out, inner), 1 / math.sqrt(inner))
        if bias:
            self._add(f"{name}.bias", (out,), 0.1)

    def norms(self, size: int, *names: str) -> None:
        for name in names:
            self._add(f"{name}.weight", (size,), 0.1, 1.0)

    def layer(self, at: str, inner: int | None = None, bias: bool = False, qk_norm: bool = False) -> None:
        """A decoder layer with its two norms. ``inner``: what its attention is fed, if not the residual stream."""
        c = self.config
        for name, heads in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads)):
            self.linear(f"{at}self_attn.{name}_proj", heads * c.head_dim, inner or c.hidden_size, bias)
        if qk_norm:
            self.norms(c.head_dim, f"{at}self_attn.q_norm", f"{at}self_attn.k_norm")
        self.linear(f"{at}self_attn.o_proj", c.hidden_size, c.num_heads * c.head_dim)
        for name in ("gate", "up"):
            self.linear(f"{at}mlp.{name}_proj", c.intermediate_size, c.hidden_size)
        self.linear(f"{at}mlp.down_proj", c.hidden_size, c.intermediate_size)
        self.norms(c.hidden_size, f"{at}input_layernorm", f"{at}post_attention_layernorm")

    def _add(self, name: str, shape: tuple[int, ...], scale: float, middle: float = 0.0) -> None:
        import torch

        noise = torch.empty(shape, dtype=torch.bfloat16)
        self.made[name] = noise.normal_(middle, scale, generator=self._generator)

    def write(self, folder: Path, file: str, **fields: Any) -> None:
        """The checkpoint's files."""
        from safetensors.torch import save_file

        c = self.config
        shape = {
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "vocab_size": c.vocab_size,
            "rms_norm_eps": c.rms_norm_eps,
            "rope_theta": c.rope.theta,
            "max_position_embeddings": c.max_position_embeddings,
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**shape, **fields}))
        save_file(self.made, folder / file, metadata={"format": "pt"})


def eagle3(folder: Path, config: Any, drafts: int) -> None:
    """One layer on three of the target's states, with a vocabulary of its own."""
    import torch

    made, hidden, layers = Tensors(config), config.hidden_size, config.num_layers
    states = eagle3_states(config)
    rows = min(EAGLE3_VOCAB, config.vocab_size)
    made.linear("fc", hidden, len(states) * hidden)
    made.layer("midlayer.", inner=2 * hidden)
    made.norms(hidden, "midlayer.hidden_norm", "norm")
    made.linear("lm_head", rows, hidden)
    ids = torch.arange(rows) * config.vocab_size // rows
    made.made["d2t"] = ids - torch.arange(rows)
    there = torch.zeros(config.vocab_size, dtype=torch.bool)
    there[ids] = True
    made.made["t2d"] = there
    made.write(
        folder,
        "model.safetensors",
        architectures=["LlamaForCausalLMEagle3"],
        model_type="llama",
        num_hidden_layers=1,
        draft_vocab_size=rows,
        eagle_aux_hidden_state_layer_ids=list(states),
        num_target_layers=layers,
    )


def eagle3_states(config: Any) -> tuple[int, ...]:
    """Low, middle and high; fewer where the target has not as many layers."""
    layers = config.num_layers
    return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)}))


def medusa(folder: Path, config: Any, drafts: int) -> None:
    """``drafts`` heads of one layer, each with an output matrix of its own."""
    made, hidden = Tensors(config), config.hidden_size
    for head in range(drafts):
        made.linear(f"{head}.0.linear", hidden, hidden, bias=True)
        made.linear(f"{head}.1", config.vocab_size, hidden)
    made.write(folder, "medusa_lm_head.safetensors", medusa_num_heads=drafts, medusa_num_layers=1)


def mtp(folder: Path, config: Any, drafts: int) -> None:
    """A whole MiMo, a target of the same shape with its layer of multi-token prediction."""
    made, hidden = Tensors(config), config.hidden_size
    made.linear("model.embed_tokens", config.vocab_size, hidden)
    for i in range(config.num_layers):
        made.layer(f"model.layers.{i}.", bias=True)
    at = "model.mtp_layers.0."
    made.layer(at, bias=True)
    made.linear(f"{at}input_proj", hidden, 2 * hidden)
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    made.norms(hidden, "model.norm", *(at + name for name in norms))
    made.write(
        folder,
        "model.safetensors",
        architectures=["MiMoForCausalLM"],
        model_type="mimo",
        num_hidden_layers=config.num_layers,
        num_nextn_predict_layers=1,
        attention_bias=True,
        tie_word_embeddings=True,
    )


def dflash(folder: Path, config: Any, drafts: int) -> None:
    """A block of the newest token and ``drafts`` masks; embeddings and output matrix are the target's."""
    made, hidden, states = Tensors(config), config.hidden_size, dflash_layers(config)
    made.linear("fc", hidden, len(states) * hidden)
    made.norms(hidden, "hidden_norm", "norm")
    for i in range(DFLASH_LAYERS):
        made.layer(f"layers.{i}.", qk_norm=True)
    made.write(
        folder,
        "model.safetensors",
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        num_hidden_layers=DFLASH_LAYERS,
        num_target_layers=config.num_layers,
        block_size=drafts + 1,
        dflash_config={"mask_token_id": config.vocab_size - 1, "target_layer_ids": list(states)},
    )


def dflash_layers(config: Any) -> tuple[int, ...]:
    """Layers of the target whose output it takes, from 0: as many as it has itself, where the target has as many."""
    last, count = config.num_layers - 1, DFLASH_LAYERS
    return tuple(sorted({round(i * last / (count - 1)) for i in range(count)}))


WRITERS = {"eagle3": eagle3, "medusa": medusa, "mtp": mtp, "dflash": dflash}
"""Method -> (folder, shape of the target, K): writes its checkpoint."""


@contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    """A cache folder in which all that is cached already is found, and what is added goes away with it."""
    from ms_spec.models.user_cache import KINDS, cache_root

    for kind in KINDS:
        (folder / kind).mkdir(parents=True)
        for entry in (cache_root() / kind).glob("[!.]*"):
            (folder / kind / entry.name).symlink_to(entry.resolve())
    before = os.environ.get("MS_SPEC_CACHE")
    os.environ["MS_SPEC_CACHE"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["MS_SPEC_CACHE"]
        else:
            os.environ["MS_SPEC_CACHE"] = before
