"""Checkpoints of DFlash, block diffusion that drafts a whole block at once (z-lab/dflash).

Read are z-lab's layout, whose names are kept (``fc``, ``hidden_norm``, ``norm``, ``layers.{i}.*``), and that of
vllm-project/speculators, which may bring ``embed_tokens``, ``lm_head`` and ``d2t``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ms_spec.models.config import FieldError, LayerShape, boolean, integer
from ms_spec.models.drafts import target_fit
from ms_spec.models.drafts.decoder_layers import layer_fields, numbered
from ms_spec.models.drafts.draft import Draft
from ms_spec.models.drafts.draft_files import DraftFiles
from ms_spec.models.drafts.draft_head import read_head
from ms_spec.models.drafts.renamed import RenamedCheckpoint
from ms_spec.models.drafts.target_fit import check_width
from ms_spec.models.loading import Loaded

_ALIASES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_KINDS = ("full_attention", "sliding_attention")
_KEPT = ("fc.weight", "hidden_norm.weight", "norm.weight", "layers.")


@dataclass(frozen=True)
class DflashShape(LayerShape):
    """Every layer's keys and values of the context come of norm(fc(states)); a block's rows see one another."""

    target_hidden_size: int
    aux_layers: tuple[int, ...]
    """States of the target that ``fc`` takes, rising: k is what k layers leave, before the final norm."""
    vocab_size: int
    draft_vocab_size: int
    block_size: int
    """Rows that it was trained to fill at once: the newest token and masks."""
    mask_token_id: int
    causal: tuple[bool, ...]
    """Of each layer: whether a block's rows see only the rows before them."""
    sliding_window: int | None
    """How far back some layers see, their own position included; None: all see everything."""
    own_embeddings: bool
    own_head: bool
    """``embed_tokens.weight`` and ``lm_head.weight`` are to be loaded; otherwise the target's are used."""
    token_map: np.ndarray | None = field(compare=False, repr=False)
    """int32 [draft_vocab_size], the target's id of each draft id; None: they are the same."""


def read(files: DraftFiles, target: Loaded) -> Draft:
    """The draft. ValueError (one line) if it does not fit the target or is a variant that is not supported."""
    where = str(files.folder)
    names = {_canonical(name): name for name in files.checkpoint.names()}
    layers = numbered(names, "layers.", where)
    if not layers or not {"fc.weight", "hidden_norm.weight"} <= set(names):
        raise ValueError(
            f"{where}: has no layers.0.* with fc.weight and hidden_norm.weight; expected a DFlash checkpoint"
        )
    if (files.folder / "mask_embedding.pt").exists():
        raise ValueError(f"{where}: mask_embedding.pt: an embedding of its own for the mask token is not supported")
    tensors = RenamedCheckpoint(files.checkpoint, names)
    with files.naming():
        _refuse_variants(files.config)
        fields = layer_fields(tensors, files.config, "layers.0.", target.config, layers, windows=True)
        width = fields["hidden_size"]
        target_fit.check_vocabulary(integer(files.config, "vocab_size", target.config.vocab_size), "vocab_size", target)
        features = _features(files, tensors, layers, width, target)
        embeddings = target_fit.own_embedding(tensors, target, width)
        head = read_head(files.config, tensors, embeddings, width, target)
        block = _block(files.config, 8 if files.speculators else 16, target)
        mask = _mask(files.config, target)
        sight = _sight(files.config, layers)
    shape = DflashShape(
        **fields,
        **features,
        **sight,
        vocab_size=target.config.vocab_size,
        draft_vocab_size=head.rows,
        block_size=block,
        mask_token_id=mask,
        own_embeddings=embeddings,
        own_head=head.source is not None,
        token_map=head.token_map,
    )
    return Draft(
        method="dflash",
        shape=shape,
        checkpoint=head.checkpoint(files.checkpoint, names, _KEPT, embeddings),
        suggested_tokens=block - 1,
        max_tokens=block - 1,
        kv_numbers=shape.kv_numbers,
    )


def _canonical(name: str) -> str:
    for theirs, ours in _ALIASES.items():
        if name.startswith(theirs):
            return ours + name[len(theirs) :]
    return name


def _field(config: dict[str, Any], name: str) -> Any:
    """On top level, or in ``dflash_config`` as newer files have it."""
    value = config.get(name)
    return (config.get("dflash_config") or {}).get(name) if value is None else value


def _block(config: dict[str, Any], default: int, target: Loaded) -> int:
    block, most = (
        integer({"block_size": _field(config, "block_size")}, "block_size", default),
        target.config.max_position_embeddings,
    )
    if not 2 <= block <= most:
        raise FieldError(
            "block_size", f"{block}; expected 2 (which drafts one token) to {most}, the target's positions"
        )
    return block


def _mask(config: dict[str, Any], target: Loaded) -> int:
    mask, vocab = _field(config, "mask_token_id"), target.config.vocab_size
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < vocab:
        raise FieldError(
            "mask_token_id", f"{mask!r:.60} is no row of the target's embeddings; allowed: 0 to {vocab - 1}"
        )
    return mask


def _sight(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """As vLLM reads it: layers with a sliding window are causal unless ``is_causal`` or ``causal`` says no."""
    kinds = config.get("layer_types") or ["full_attention"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _KINDS for kind in kinds):
        raise ValueError(f"layer_types: {kinds!r:.150}; expected {' or '.join(_KINDS)} for each of {layers} layers")
    sliding = [kind == "sliding_attention" for kind in kinds]
    never = any(_field(config, name) is False for name in ("is_causal", "causal"))
    return {
        "causal": tuple(windowed and not never for windowed in sliding),
        "sliding_window": integer(config, "sliding_window") if any(sliding) else None,
    }


def _refuse_variants(config: dict[str, Any]) -> None:
    """What would be computed in another way than a plain DFlash block."""
    inner = config.get("dflash_config") or {}
    for name in ("is_causal", "causal", "sample_from_anchor", "use_swa", "attention_sink_bias", "shift_label"):
        if boolean(inner, name, boolean(config, name, False)):
            raise ValueError(f"{name}: true is not supported; supported: false")
    for name in ("selector_rank", "conv_kernel_size", "projector_type", "markov_rank", "final_logit_softcapping"):
        if _field(config, name):
            raise ValueError(f"{name}: {_field(config, name)!r} is not supported; use a checkpoint of the first DFlash")
    for name in ("input_embedding_scale", "attention_value_scale", "output_multiplier"):
        if _field(config, name) not in (None, 1, 1.0):
            raise ValueError(f"{name}: {_field(config, name)!r} is not supported; supported: 1")
    if _field(config, "is_neox_style") is False:
        raise ValueError("is_neox_style: false is not supported; supported: true")


def _features(files: DraftFiles, tensors: RenamedCheckpoint, layers: int, width: int, target: Loaded) -> dict[str, Any]:
    config, total = files.config, target.config.num_layers
    said = config.get("num_target_layers")
    if said not in (None, total):
        raise ValueError(f"num_target_layers: {said!r}, but the target has {total} layers; use a draft made for it")
    hidden = integer(config, "target_hidden_size", width)
    check_width(hidden, "target_hidden_size" if config.get("target_hidden_size") else "hidden_size", target)
    taps = _aux_layers(config, layers, target)
    target_fit.check_taken(tensors.shape("fc.weight")[-1], taps, target)
    return {"target_hidden_size": hidden, "aux_layers": taps}


def _aux_layers(config: dict[str, Any], layers: int, target: Loaded) -> tuple[int, ...]:
    """z-lab names the layers whose output is meant, from 0; vLLM's and speculators' own fields name states."""
    explicit = target_fit.explicit_states(config, target)
    if explicit is not None:
        return explicit
    inner, total = config.get("dflash_config") or {}, target.config.num_layers
    if config.get("aux_hidden_state_layer_ids") is not None:
        return target_fit.states(config["aux_hidden_state_layer_ids"], "aux_hidden_state_layer_ids", 0, target)
    named = inner.get("target_layer_ids", config.get("target_layer_ids"))
    if named is not None:
        return target_fit.states(named, "target_layer_ids", 1, target)
    if inner.get("layer_ids") is not None:
        return target_fit.states(inner["layer_ids"], "dflash_config.layer_ids", 0, target)
    if layers == 1:
        return target_fit.default_states((total // 2 + 1,), "N // 2 + 1", target)
    spread = tuple(round(1 + i * (total - 4) / (layers - 1)) + 1 for i in range(layers))
    return target_fit.default_states(spread, f"spread over 2 to N - 2 by {layers} draft layers", target)
