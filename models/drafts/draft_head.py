"""A drafter's output matrix: its own or the target's, of all tokens or of some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ms_spec.models.checkpoint import Checkpoint
from ms_spec.models.config import boolean, integer
from ms_spec.models.drafts import target_fit
from ms_spec.models.drafts.errors import of_tensors
from ms_spec.models.drafts.renamed import RenamedCheckpoint
from ms_spec.models.loading import Loaded

_HEAD, _EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"


@dataclass(frozen=True)
class DraftHead:
    """``source``: canonical name of the tensor, None for the target's. ``token_map``: int32 [rows], see the shapes."""

    source: str | None
    rows: int
    token_map: np.ndarray | None

    def checkpoint(
        self, stored: Checkpoint, names: Mapping[str, str], kept: tuple[str, ...], embeddings: bool
    ) -> RenamedCheckpoint:
        """What is to be loaded: the tensors that start with one of ``kept``, this matrix, and own embeddings."""
        shown = {canonical: name for canonical, name in names.items() if canonical.startswith(kept)}
        if embeddings:
            shown[_EMBEDDINGS] = names[_EMBEDDINGS]
        if self.source is not None:
            shown[_HEAD] = names[self.source]
        return RenamedCheckpoint(stored, shown, {_HEAD: self.rows})


def read_head(
    config: Mapping[str, Any], tensors: RenamedCheckpoint, embeddings: bool, width: int, target: Loaded
) -> DraftHead:
    """The output matrix of a drafter ``width`` wide. ``embeddings``: it has embeddings of its own.

    ValueError if the file has none and the target's does not fit either.
    """
    there, vocab = tensors.names(), target.config.vocab_size
    if _HEAD in there:
        rows = tensors.shape(_HEAD)[0]
        with of_tensors(tensors.location):
            if "d2t" in there:
                ids = target_fit.target_ids(tensors.read_int("d2t"), rows, "d2t", target)
            else:
                ids = target_fit.head_ids(rows, f"{_HEAD} rows (there is no d2t)", target)
        own = ids is not None or rows != vocab or target_fit.differs(tensors, _HEAD, target, _HEAD)
        return DraftHead(_HEAD if own else None, min(rows, vocab), ids)
    said = integer(config, "draft_vocab_size", vocab)
    target_fit.check_vocabulary(said, f"draft_vocab_size (there is no {_HEAD})", target)
    if embeddings and boolean(config, "tie_word_embeddings", False):
        return DraftHead(_EMBEDDINGS, vocab, None)
    target_fit.check_width(width, f"hidden_size (there is no {_HEAD})", target)
    return DraftHead(None, vocab, None)
