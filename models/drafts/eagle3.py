"""Checkpoints of EAGLE-3 (Li et al., arXiv 2503.01840).

Read are the layouts of SafeAILab/EAGLE and sgl-project/SpecForge (the first layer is ``midlayer``; these names are
kept: ``fc``, ``midlayer.*``, ``norm``, ``lm_head``, ``embed_tokens``, ``input_norm``, ``fc_norm.{i}``, further plain
layers ``layers.{i}.*`` from 1 on) and of vllm-project/speculators (the first layer is ``layers.0``, a nested config).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ms_spec.models.config import LayerShape, boolean, integer, number
from ms_spec.models.drafts import target_fit
from ms_spec.models.drafts.decoder_layers import layer_fields, numbered
from ms_spec.models.drafts.draft import Draft
from ms_spec.models.drafts.draft_files import DraftFiles
from ms_spec.models.drafts.draft_head import read_head
from ms_spec.models.drafts.renamed import RenamedCheckpoint
from ms_spec.models.drafts.target_fit import check_vocabulary, check_width
from ms_spec.models.loading import Loaded

_KEPT = ("fc.weight", "fc_norm.", "input_norm.weight", "midlayer.", "layers.", "norm.weight")
_REFUSED = {
    "mask_hidden": "parallel drafting (P-EAGLE) is not supported",
    "additional_layers.": "further layers of this kind are not supported",
}


@dataclass(frozen=True)
class Eagle3Shape(LayerShape):
    """Row t takes the embedding of token t + 1 and c_t, which ``fc`` makes of the target's states.

    The first layer sees [norm(embedding), norm(c)] (2 hidden_size wide), further ones are plain.
    """

    target_hidden_size: int
    aux_layers: tuple[int, ...]
    """States of the target that ``fc`` takes, rising: 0 is the embeddings, k what k layers leave, before the final
    norm. Empty: there is no ``fc``, and c is the output of the final norm."""
    vocab_size: int
    draft_vocab_size: int
    norm_before_fc: bool
    """``input_norm`` over all states together, before ``fc``."""
    fc_norm: bool
    """``fc_norm.{i}`` over each state, before ``fc``."""
    norm_before_residual: bool
    """The first layer's residual is norm(c) rather than c."""
    norm_output: bool
    """The next draft's c is norm(output) rather than the output."""
    own_embeddings: bool
    own_head: bool
    """``embed_tokens.weight`` and ``lm_head.weight`` are to be loaded; otherwise the target's are used."""
    logit_scale: float
    token_map: np.ndarray | None = field(compare=False, repr=False)
    """int32 [draft_vocab_size], the target's id of each draft id; None: they are the same."""


def read(files: DraftFiles, target: Loaded) -> Draft:
    """The draft. ValueError (one line) if it does not fit the target or is a variant that is not supported."""
    stored = files.checkpoint.names()
    where = str(files.folder)
    for prefix, why in _REFUSED.items():
        found = [name for name in stored if name.startswith(prefix)]
        if found:
            raise ValueError(f"{where}: {found[0]}: {why}")
    renamed = not any(name.startswith("midlayer.") for name in stored)
    names = {_canonical(name) if renamed else name: name for name in stored}
    if "midlayer.hidden_norm.weight" not in names:
        raise ValueError(f"{where}: has no midlayer.hidden_norm.weight; expected an EAGLE-3 checkpoint")
    tensors = RenamedCheckpoint(files.checkpoint, names)
    layers = numbered(names, "layers.", where, first=1)
    config = files.config
    with files.naming():
        fields = layer_fields(tensors, config, "midlayer.", target.config, layers)
        width = fields["hidden_size"]
        check_vocabulary(integer(config, "vocab_size", target.config.vocab_size), "vocab_size", target)
        features = _features(config, tensors, width, target)
        embeddings = target_fit.own_embedding(tensors, target, width)
        head = read_head(config, tensors, embeddings, width, target)
        flags: dict[str, Any] = {name: _flag(config, name) for name in ("norm_before_residual", "norm_output")}
        logit_scale = number(config, "logit_scale", 1.0)
    shape = Eagle3Shape(
        **fields,
        **features,
        vocab_size=target.config.vocab_size,
        draft_vocab_size=head.rows,
        **flags,
        own_embeddings=embeddings,
        own_head=head.source is not None,
        logit_scale=logit_scale,
        token_map=head.token_map,
    )
    return Draft(
        method="eagle3",
        shape=shape,
        checkpoint=head.checkpoint(files.checkpoint, names, _KEPT, embeddings),
        suggested_tokens=files.suggested_tokens(),
        max_tokens=None,
        kv_numbers=shape.kv_numbers,
    )


def _canonical(name: str) -> str:
    return "midlayer." + name[len("layers.0.") :] if name.startswith("layers.0.") else name


def _flag(config: dict[str, Any], name: str) -> bool:
    """On top level or in ``eagle_config``; false where neither says it."""
    return boolean(config, name, boolean(config.get("eagle_config") or {}, name, False))


def _features(config: dict[str, Any], tensors: RenamedCheckpoint, width: int, target: Loaded) -> dict[str, Any]:
    """What of the target is taken, and how it is normed."""
    there = tensors.names()
    inner = config.get("eagle_config") or {}
    target_hidden = integer(config, "target_hidden_size", width)
    check_width(target_hidden, "target_hidden_size" if config.get("target_hidden_size") else "hidden_size", target)
    before, each = "input_norm.weight" in there, "fc_norm.0.weight" in there
    found = {
        "target_hidden_size": target_hidden,
        "norm_before_fc": before or _flag(config, "norm_before_fc"),
        "fc_norm": each or _flag(config, "fc_norm"),
    }
    if found["norm_before_fc"] and found["fc_norm"]:
        raise ValueError("fc_norm: true together with norm_before_fc; at most one of them can be")
    if not boolean(inner, "use_aux_hidden_state", True):
        check_width(width, "hidden_size (eagle_config.use_aux_hidden_state is false)", target)
        return {**found, "aux_layers": (), "norm_before_fc": False, "fc_norm": False}
    layers = _aux_layers(config, inner, target)
    target_fit.check_taken(tensors.shape("fc.weight")[-1], layers, target)
    return {**found, "aux_layers": layers}


def _aux_layers(config: dict[str, Any], inner: dict[str, Any], target: Loaded) -> tuple[int, ...]:
    """vLLM and speculators name states, SpecForge (in ``eagle_config``) the layers whose output is meant, from 0."""
    layers = target.config.num_layers
    explicit = target_fit.explicit_states(config, target)
    if explicit is not None:
        return explicit
    if inner.get("layer_ids") is not None:
        return target_fit.states(inner["layer_ids"], "eagle_config.layer_ids", 0, target)
    nested = inner.get("eagle_aux_hidden_state_layer_ids")
    if nested is not None:
        # Ids up to the number of layers cannot be layers counted from 0: NVIDIA's gpt-oss heads name states here.
        shift = 0 if isinstance(nested, list) and layers in nested else 1
        return target_fit.states(nested, "eagle_config.eagle_aux_hidden_state_layer_ids", shift, target)
    return target_fit.default_states((2, layers // 2, layers - 3), "2, N // 2, N - 3", target)
