"""Checkpoints of EAGLE (Li et al., arXiv 2401.15077) and EAGLE-2, which differs in the search alone.

Read are the layout of SafeAILab/EAGLE, whose names are kept (``embed_tokens.weight``, ``fc.{weight,bias}``,
``layers.{i}.*``; no norm before the first attention, none behind the last layer), and that of vllm-project/speculators
(``fusion_fc``, ``transformer``, a nested config). The output matrix is always the target's.
"""

from __future__ import annotations

from dataclasses import dataclass

from ms_spec.models.config import LayerShape, integer
from ms_spec.models.drafts.decoder_layers import layer_fields, numbered
from ms_spec.models.drafts.draft import Draft
from ms_spec.models.drafts.draft_files import DraftFiles
from ms_spec.models.drafts.renamed import RenamedCheckpoint
from ms_spec.models.drafts.target_fit import check_vocabulary, check_width, own_embedding
from ms_spec.models.loading import Loaded

_SPECULATORS = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
_LAYERNORMS = ("embedding_layernorm.weight", "pre_lm_head_layernorm.weight", "embed_layernorm.weight")


@dataclass(frozen=True)
class EagleShape(LayerShape):
    """Layer 0 has no ``input_layernorm``, the others have one."""

    vocab_size: int
    fc_bias: bool
    own_embeddings: bool
    """``embed_tokens.weight`` is to be loaded; otherwise the target's embeddings are used."""


def read(files: DraftFiles, target: Loaded) -> Draft:
    """The draft. ValueError (one line) if it does not fit the target or is a variant that is not supported."""
    stored = files.checkpoint.names()
    where = str(files.folder)
    norms = [name for name in stored if name.startswith(_LAYERNORMS)]
    if norms:
        raise ValueError(f"{where}: {norms[0]}: EAGLE with additional norms (layernorms: true) is not supported")
    names = {_canonical(name): name for name in stored}
    layers = numbered(names, "layers.", where)
    if not layers or "fc.weight" not in names:
        raise ValueError(f"{where}: has no layers.0.* with fc.weight; expected an EAGLE checkpoint")
    tensors = RenamedCheckpoint(files.checkpoint, names)
    with files.naming():
        fields = layer_fields(tensors, files.config, "layers.0.", target.config, layers)
        check_width(fields["hidden_size"], "hidden_size", target)
        check_vocabulary(integer(files.config, "vocab_size", target.config.vocab_size), "vocab_size", target)
        own = own_embedding(tensors, target, fields["hidden_size"])
    shape = EagleShape(**fields, vocab_size=target.config.vocab_size, fc_bias="fc.bias" in names, own_embeddings=own)
    kept = {n: s for n, s in names.items() if n.startswith(("fc.", "layers.")) or (own and n == "embed_tokens.weight")}
    return Draft(
        method="eagle",
        shape=shape,
        checkpoint=RenamedCheckpoint(files.checkpoint, kept),
        suggested_tokens=files.suggested_tokens(),
        max_tokens=None,
        kv_numbers=shape.kv_numbers,
    )


def _canonical(name: str) -> str:
    for theirs, ours in _SPECULATORS.items():
        if name.startswith(theirs):
            return ours + name[len(theirs) :]
    return name
