"""What the draft checkpoint decides: the method, K, and whether it fits the target."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ms_spec.config import EngineConfig
from ms_spec.errors import ConfigError
from ms_spec.extraction import LAYER_IDS
from ms_spec.limits import default_block_size, device_of
from ms_spec.models.ops.limits import MAX_WIDTH, check_ascend

if TYPE_CHECKING:
    from ms_spec.models.drafts import Draft
    from ms_spec.models.loading import Loaded

_log = logging.getLogger("ms_spec")


def choose_draft(config: EngineConfig, target: Loaded) -> tuple[EngineConfig, Draft | None]:
    """Opens the draft checkpoint, if there is one, and fills in what the configuration leaves to it.

    Raises:
        ConfigError: one line; the checkpoint is not what the configuration says, or does not fit the target.
    """
    spec = config.speculative_config
    if config.extracts:
        _check_layers(config, target.config.num_layers)
    if spec is None:
        return config, None
    from ms_spec.models.drafts import METHODS, OverrideError, detect_method, open_draft

    if spec.method is not None and spec.method not in METHODS:
        return config, None
    overrides: dict[str, Any] = (spec.draft_model_config or {}).get("hf_config", {})
    try:
        method = spec.method or detect_method(spec.model or "")
        draft = open_draft(method, spec.model, target, overrides)
    except OverrideError as error:
        raise ConfigError(f"speculative_config.draft_model_config.hf_config.{error}") from None
    except ValueError as error:
        raise ConfigError(f"speculative_config.model: {error}") from None
    tokens = spec.num_speculative_tokens or _suggested(config, draft)
    _check_tokens(draft, tokens)
    if device_of(config) == "ascend":
        _check_ascend(config, draft)
    if spec.method == method and spec.num_speculative_tokens == tokens:
        return config, draft
    filled = {**spec.model_dump(exclude_unset=True), "method": method, "num_speculative_tokens": tokens}
    given = config.model_dump(exclude_unset=True)
    try:
        return EngineConfig.parse(**{**given, "speculative_config": filled}), draft
    except ConfigError as error:
        if spec.num_speculative_tokens is not None:
            raise
        raise ConfigError(f"{error} ({tokens} is the draft checkpoint's suggestion)") from None


def _check_layers(config: EngineConfig, num_layers: int) -> None:
    """Whether the target has the states that are to be extracted."""
    assert config.speculative_config is not None
    spec, name = config.speculative_config, f"speculative_config.{LAYER_IDS}"
    ids, given = list(spec.hidden_layer_ids), (spec.draft_model_config or {})["hf_config"][LAYER_IDS.rpartition(".")[2]]
    if ids[-1] > num_layers:
        raise ConfigError(
            f"{name} contains {ids[-1]}: the model has {num_layers} layers; 0 (the embeddings) to {num_layers} are "
            f"allowed; use {num_layers}"
        )
    if ids != list(given):
        _log.info("%s = %s: saved in rising order, each once: %s", name, given, ids)


def _suggested(config: EngineConfig, draft: Draft) -> int:
    tokens = draft.suggested_tokens
    if tokens is None:
        raise ConfigError(
            f"speculative_config.num_speculative_tokens is missing; with method '{draft.method}' it must be an integer "
            ">= 1; use 4"
        )
    if device_of(config) == "ascend" and tokens >= MAX_WIDTH:
        _log.warning(
            "num_speculative_tokens = %d, not the checkpoint's %d: Ascend verifies at most %d tokens at once",
            MAX_WIDTH - 1,
            tokens,
            MAX_WIDTH,
        )
        return MAX_WIDTH - 1
    return tokens


def _check_ascend(config: EngineConfig, draft: Draft) -> None:
    """Whether Ascend's operators can run the draft's layers. Those of mtp are shaped as the target's."""
    if draft.kv_numbers == 0 or draft.method == "mtp":
        return
    shape, size = draft.shape, config.block_size or default_block_size("ascend")
    try:
        check_ascend(shape.head_dim, size, "bfloat16", 1, shape.num_heads, shape.num_kv_heads)
    except ValueError as error:
        raise ConfigError(f"speculative_config.model: {error}") from None


def _check_tokens(draft: Draft, tokens: int) -> None:
    if draft.max_tokens is not None and tokens > draft.max_tokens:
        raise ConfigError(
            f"speculative_config.num_speculative_tokens = {tokens}: the draft checkpoint drafts at most "
            f"{draft.max_tokens}; use {draft.max_tokens}"
        )
    suggested = draft.suggested_tokens
    if draft.method == "mtp" and suggested is not None and tokens > suggested:
        _log.warning(
            "num_speculative_tokens = %d: the checkpoint has %d multi-token-prediction layer%s, used again and again; "
            "drafts get worse with each, from 3 on markedly",
            tokens,
            suggested,
            "s" * (suggested > 1),
        )
    if draft.method == "dflash" and suggested is not None and tokens != suggested:
        _log.warning(
            "num_speculative_tokens = %d: the draft was trained for %d; with another block every draft is another one",
            tokens,
            suggested,
        )
