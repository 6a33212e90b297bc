"""The folder of a draft checkpoint: its config.json and its tensors, of whichever library."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ms_spec.models.checkpoint import Checkpoint, open_checkpoint
from ms_spec.models.config import FieldError
from ms_spec.models.drafts.errors import OverrideError, TensorError
from ms_spec.models.tokenizer import read_json

OVERRIDES = (
    "block_size",
    "eagle_aux_hidden_state_layer_ids",
    "mask_token_id",
    "norm_before_residual",
    "norm_output",
    "rope_scaling",
    "rope_theta",
)
"""Fields of config.json that a caller may say better: public configs do not always hold what was trained."""


class DraftFiles:
    """``config`` is config.json with the nesting of speculators' undone (``transformer_layer_config`` on top level).

    Raises:
        OverrideError: an override that is none of OVERRIDES.
        ValueError: no config.json, or quantised weights.
    """

    def __init__(self, folder: Path, overrides: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.file = folder / "config.json"
        found = read_json(self.file)
        if not found:
            raise ValueError(f"{self.file}: missing or empty; a draft checkpoint comes with its config.json")
        self.speculators: str | None = found.get("speculators_model_type")
        self._overrides = overrides or {}
        with self.naming():
            self.config = _with(_flat(found), self._overrides)
            for name in ("eagle_config", "dflash_config", "speculators_config"):
                if not isinstance(self.config.get(name, {}), (Mapping, type(None))):
                    raise ValueError(f"{name}: {self.config[name]!r:.60}; expected an object")
            if self.config.get("quantization_config"):
                raise ValueError("quantization_config: quantised drafts are not supported; use an unquantised one")

    @functools.cached_property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.folder)

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Puts the config's path before what goes wrong inside, unless the fault is another's."""
        try:
            yield
        except (OverrideError, TensorError):
            raise
        except ValueError as error:
            if isinstance(error, FieldError) and error.field.partition(".")[0] in self._overrides:
                raise OverrideError(str(error)) from None
            raise ValueError(f"{self.file}: {error}") from None

    def suggested_tokens(self) -> int | None:
        """``speculative_tokens`` of speculators' first proposal method."""
        proposals = (self.config.get("speculators_config") or {}).get("proposal_methods")
        first = proposals[0] if isinstance(proposals, list) and proposals else None
        tokens = first.get("speculative_tokens") if isinstance(first, Mapping) else None
        return tokens if isinstance(tokens, int) and tokens >= 1 else None


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    layer = config.get("transformer_layer_config", {})
    if not isinstance(layer, Mapping):
        raise ValueError(f"transformer_layer_config: {layer!r:.60}; expected an object")
    return {**layer, **{k: v for k, v in config.items() if k != "transformer_layer_config"}}


def _with(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    for name in overrides:
        if name not in OVERRIDES:
            raise OverrideError(f"{name}: cannot be overridden; allowed: {', '.join(OVERRIDES)}")
    inner = config.get("rope_parameters")
    if isinstance(inner, Mapping) and {"rope_theta", "rope_scaling"} & set(overrides):
        # transformers 5 keeps base and scaling together; taken apart, one can be replaced without the other
        config = {**config, "rope_parameters": None, "rope_scaling": dict(inner)}
        config["rope_theta"] = config["rope_scaling"].pop("rope_theta", config.get("rope_theta"))
    return {**config, **overrides}
