"""Everything about a model that is on disk, opened when it is needed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ms_spec.models.checkpoint import Checkpoint, open_checkpoint
from ms_spec.models.config import ModelConfig
from ms_spec.models.sources import DEFAULT_MODEL, Source, is_own_copy, resolve
from ms_spec.models.tokenizer import Tokenizer, open_tokenizer, read_json

_GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "do_sample", "max_new_tokens", "repetition_penalty")


class Loaded:
    """A model found on disk. ``config`` is read at once; checkpoint and tokenizer when first asked for."""

    def __init__(self, source: Source, tokenizer: str | None = None) -> None:
        self.source = source
        self._tokenizer_name = tokenizer
        if source.kind == "gguf":
            self._generation: dict[str, Any] = {}
            self.config = self._gguf_config()
        else:
            self._generation = read_json(source.path / "generation_config.json")
            try:
                self.config = ModelConfig.from_hf(read_json(source.path / "config.json"), self._generation)
            except ValueError as error:
                raise ValueError(f"{source.path}: {error}") from None

    def _gguf_config(self) -> ModelConfig:
        checkpoint: Any = self.checkpoint
        shapes = {n: checkpoint.shape(n) for n in checkpoint.names()}
        factors = checkpoint.read("rope_freqs.weight") if "rope_freqs.weight" in shapes else ()
        try:
            return ModelConfig.from_gguf(
                checkpoint.metadata, shapes, dtype=checkpoint.weights_dtype, rope_factors=factors
            )
        except ValueError as error:
            raise ValueError(f"{self.source.path}: {error}") from None

    @functools.cached_property
    def checkpoint(self) -> Checkpoint:
        try:
            return open_checkpoint(self.source.path)
        except ValueError as error:
            if not is_own_copy(self.source.path):
                raise
            raise ValueError(
                f"{str(error).removesuffix('; fetch it again')}; `ms-spec cache --clear models` removes this copy, and "
                "the next start fetches it again"
            ) from None

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return open_tokenizer(
            resolve(self._tokenizer_name, "tokenizer").path if self._tokenizer_name else self.source.path
        )

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """Sampling fields of generation_config.json, under its names. Nobody applies them unasked."""
        return {k: self._generation[k] for k in _GENERATION_FIELDS if self._generation.get(k) is not None}

    @functools.cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text: the model's own (generation_config.json before config.json) and the tokenizer's."""
        ids = self.config.eos_token_ids
        own = self.tokenizer.eos_token_id
        return ids if own is None or own in ids or own >= self.config.vocab_size else (*ids, own)


def load(model: str | Path = DEFAULT_MODEL, tokenizer: str | None = None) -> Loaded:
    """Resolves and opens a model. ``tokenizer``: another place to take the tokenizer from. ValueError in one line."""
    return Loaded(resolve(str(model)), tokenizer)
