"""The block of multi-token prediction in the target's own checkpoint.

So far that of XiaomiMiMo/MiMo (arXiv 2505.07608), whose names are kept: ``model.mtp_layers.0.*``, a Qwen2 block with
``token_layernorm``, ``hidden_layernorm``, ``input_proj`` (the state first, then the embedding) and ``final_layernorm``.
Embeddings and output matrix are the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ms_spec.models.config import LayerShape, integer
from ms_spec.models.drafts.decoder_layers import numbered
from ms_spec.models.drafts.draft import Draft
from ms_spec.models.drafts.renamed import RenamedCheckpoint
from ms_spec.models.loading import Loaded
from ms_spec.models.tokenizer import read_json

ARCHITECTURES = ("MiMoForCausalLM",)
PREFIX = "model.mtp_layers."


@dataclass(frozen=True)
class MtpShape(LayerShape):
    """One block, ``num_layers`` 1; all but the biases is the target's."""

    vocab_size: int


def read(folder: Path | None, target: Loaded) -> Draft:
    """The block. ``folder``, if given, has to be the target's. ValueError (one line) without exactly one block."""
    here, config = target.source.path, target.config
    if folder is not None and folder.resolve() != here.resolve():
        raise ValueError(f"{str(folder)!r}: method 'mtp' drafts with the target; leave it out")
    if target.source.kind != "hf" or config.architecture not in ARCHITECTURES:
        kind = "GGUF file" if target.source.kind == "gguf" else config.architecture
        raise ValueError(
            f"{here}: a {kind} has no layers of multi-token prediction that are supported; method 'mtp' needs a target "
            f"of {', '.join(ARCHITECTURES)}"
        )
    file = here / "config.json"
    found = read_json(file)
    if found.get("num_nextn_predict_layers") == 0:
        raise ValueError(f"{file}: num_nextn_predict_layers: 0; method 'mtp' needs a target with such a layer")
    try:
        said = integer(found, "num_nextn_predict_layers", 1)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    stored = [name for name in target.checkpoint.names() if name.startswith(PREFIX)]
    there = numbered(stored, PREFIX, str(here))
    if not there:
        raise ValueError(f"{here}: has no tensors {PREFIX}*; this copy was saved without them, fetch the original one")
    if max(said, there) > 1:
        raise ValueError(
            f"{file}: num_nextn_predict_layers: {max(said, there)} layers of multi-token prediction are not supported; "
            "supported: 1"
        )
    attention = f"{PREFIX}0.self_attn."
    shape = MtpShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=1,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope=config.rope,
        qkv_bias=any(f"{attention}{name}_proj.bias" in stored for name in "qkv"),
        output_bias=f"{attention}o_proj.bias" in stored,
        mlp_bias=f"{PREFIX}0.mlp.down_proj.bias" in stored,
        qk_norm=f"{attention}q_norm.weight" in stored,
        vocab_size=config.vocab_size,
    )
    return Draft(
        method="mtp",
        shape=shape,
        checkpoint=RenamedCheckpoint(target.checkpoint, {name: name for name in stored}),
        suggested_tokens=said,
        max_tokens=None,
        kv_numbers=shape.kv_numbers,
    )
