"""Any small language model of the target's vocabulary, under Hugging Face's names."""

from __future__ import annotations

from ms_spec.models.drafts.draft import Draft
from ms_spec.models.drafts.target_fit import is_padded
from ms_spec.models.loading import Loaded
from ms_spec.models.sources import Source


def read(source: Source, target: Loaded) -> Draft:
    """The model; its shape is a ``ModelConfig``. ValueError (one line) if it is none, or of another vocabulary.

    Vocabularies that are padded to different sizes are the same if their tokenizers have the same number of tokens;
    ``shape.vocab_size`` is then not the target's.
    """
    loaded = Loaded(source)
    _check_vocabulary(loaded, target)
    return Draft(
        method="draft_model",
        shape=loaded.config,
        checkpoint=loaded.checkpoint,
        suggested_tokens=None,
        max_tokens=None,
        kv_numbers=loaded.config.kv_numbers,
    )


def _check_vocabulary(draft: Loaded, target: Loaded) -> None:
    ours, theirs = draft.config.vocab_size, target.config.vocab_size
    if ours == theirs:
        return
    tokens, target_tokens = len(draft.tokenizer), len(target.tokenizer)
    if tokens != target_tokens or not (is_padded(ours, tokens) and is_padded(theirs, tokens)):
        raise ValueError(
            f"{draft.source.path}: vocab_size: {ours} ({tokens} tokens), but the target's is {theirs} ({target_tokens} "
            "tokens); use a draft model with the target's tokenizer"
        )
