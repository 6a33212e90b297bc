"""Medusa heads (Cai et al., arXiv 2401.10774), beside the target or in its own checkpoint.

Read are FasterDecoding/Medusa's files (``{head}.{layer}.linear.*``, in medusa_lm_head.pt or .safetensors, or with the
prefix ``medusa_head.`` in a whole model) and vLLM's (``blocks``, ``lm_heads``, ``token_map``), whose names are kept:
``blocks.{head}.layers.{layer}.{weight,bias}`` and ``lm_heads.{head}.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ms_spec.models.checkpoint import Checkpoint, open_checkpoint
from ms_spec.models.drafts.decoder_layers import numbered
from ms_spec.models.drafts.draft import Draft
from ms_spec.models.drafts.renamed import RenamedCheckpoint
from ms_spec.models.drafts.target_fit import absolute_ids, check_width, head_ids
from ms_spec.models.loading import Loaded
from ms_spec.models.tokenizer import read_json

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_LAYER = re.compile(
    r"(?:(?:medusa_heads?\.)?blocks\.(\d+)\.layers|(?:medusa_heads?\.)?(\d+))\.(\d+)(\.linear)?\.(weight|bias)"
)
_OUTPUT = re.compile(r"(?:medusa_heads?\.)?lm_heads\.(\d+)\.weight")


@dataclass(frozen=True)
class MedusaShape:
    """Head h drafts the token h + 2 places behind the state that it sees, the output of the target's final norm.

    A head: ``num_layers`` times x + silu(W x + b), then an output matrix of its own.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int
    num_layers: int
    bias: bool
    shared_output: bool
    """All heads have the output matrix of the first."""
    token_map: np.ndarray | None = field(compare=False, repr=False)
    """int32 [draft_vocab_size], the target's id of each draft id; None: they are the same."""


def read(folder: Path | None, target: Loaded) -> Draft:
    """The heads in ``folder``; None: those beside or in the target. ValueError (one line) if they do not fit.

    How many there are, and whether with biases, is read off the tensors: public configs say it wrong.
    """
    checkpoint, where = _opened(folder, target)
    names = canonical(checkpoint.names())
    config = read_json((folder or target.source.path) / "config.json") if (folder or target.source.kind == "hf") else {}
    one_for_all = config.get("original_lm_head") is True
    if one_for_all:
        shared = names.get("lm_heads.0.weight", "lm_head.weight")
        names.update({f"lm_heads.{h}.weight": shared for h in range(numbered(names, "blocks.", where))})
    heads = numbered(names, "lm_heads.", where)
    if not heads:
        raise ValueError(f"{where}: has no Medusa heads (no medusa_lm_head.pt, no tensors 0.0.linear or blocks.0)")
    layers = numbered(names, "blocks.0.layers.", where)
    tensors = RenamedCheckpoint(checkpoint, names)
    rows, width = tensors.shape("lm_heads.0.weight")
    try:
        check_width(width, "lm_heads.0.weight columns", target)
        ids = None
        if "token_map" in checkpoint.names() and checkpoint.shape("token_map") == (rows,):
            ids = absolute_ids(checkpoint.read_int("token_map"), "token_map", target)
        else:  # a map that is shorter than the output matrices would only leave tokens out
            ids = head_ids(rows, "lm_heads.0.weight rows", target)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    shape = MedusaShape(
        hidden_size=width,
        vocab_size=target.config.vocab_size,
        draft_vocab_size=min(rows, target.config.vocab_size),
        num_heads=heads,
        num_layers=layers,
        bias=any(name.startswith("blocks.") and name.endswith(".bias") for name in names),
        shared_output=one_for_all,
        token_map=ids,
    )
    cut = {name: shape.draft_vocab_size for name in names if name.startswith("lm_heads.")}
    return Draft(
        method="medusa",
        shape=shape,
        checkpoint=RenamedCheckpoint(checkpoint, names, cut),
        suggested_tokens=heads,
        max_tokens=heads,
        kv_numbers=0,
    )


def canonical(stored: Iterable[str]) -> dict[str, str]:
    """Canonical name -> name in the file, of the tensors that belong to Medusa heads."""
    names: dict[str, str] = {}
    for name in stored:
        output, layer = _OUTPUT.fullmatch(name), _LAYER.fullmatch(name)
        if output:
            names[f"lm_heads.{output[1]}.weight"] = name
        elif layer:
            head, plain = layer[1] or layer[2], layer[2] is not None and not layer[4]
            names[f"lm_heads.{head}.{layer[5]}" if plain else f"blocks.{head}.layers.{layer[3]}.{layer[5]}"] = name
    return names


def heads_file(folder: Path) -> Path | None:
    """The file with nothing but heads, if the folder has one."""
    return next((folder / name for name in FILES if (folder / name).is_file()), None)


def _opened(folder: Path | None, target: Loaded) -> tuple[Checkpoint, str]:
    own = target.source.path if target.source.kind == "hf" else None
    file = heads_file(folder or own) if (folder or own) else None  # type: ignore[arg-type]
    if file is not None:
        return open_checkpoint(file), str(file)
    if folder is None or (own is not None and folder.resolve() == own.resolve()):
        return target.checkpoint, str(target.source.path)
    return open_checkpoint(folder), str(folder)
