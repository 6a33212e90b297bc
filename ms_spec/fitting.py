"""What a configuration and the model that it names come to: no gaps, a draft that fits, sizes. No MindSpore."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ms_spec.async_scheduling import obstacle
from ms_spec.config import EngineConfig
from ms_spec.draft_choice import choose_draft
from ms_spec.errors import ConfigError
from ms_spec.limits import Limits, model_limits
from ms_spec.models.parallel import Shard, sizes_near, unshared
from ms_spec.world import launch_command

if TYPE_CHECKING:
    from ms_spec.models.config import LayerShape
    from ms_spec.models.drafts import Draft
    from ms_spec.models.loading import Loaded

_log = logging.getLogger("ms_spec")


def fit(config: EngineConfig, loaded: Loaded) -> tuple[EngineConfig, Draft | None, Limits]:
    """The configuration without gaps, the draft, the sizes. Raises ConfigError (one line) where something cannot be."""
    _check_parts(loaded.config, config.tensor_parallel_size, "tensor_parallel_size")
    config, draft = choose_draft(config, loaded)
    reason = obstacle(config) if config.async_scheduling else None
    if reason is not None:
        _log.warning("async_scheduling = true has no effect: %s; the output is the same", reason)
    numbers = 0
    if draft is not None:
        ranks = config.draft_ranks
        if ranks > 1:
            _check_parts(draft.shape, ranks, "speculative_config.draft_tensor_parallel_size")
        numbers = draft.part(Shard(0, ranks)).kv_numbers
    return config, draft, model_limits(config, loaded.config, numbers)


def _check_parts(shape: LayerShape, size: int, field: str) -> None:
    """Raises ConfigError, with what works, where ``size`` workers cannot share the layers."""
    sizes = sizes_near(shape, size)
    if size not in sizes:
        works = ", ".join(map(str, sizes))
        fix = f"nearest sizes that work: {works}; set one, and start it with: {launch_command(sizes[-1])}"
        if field != "tensor_parallel_size":
            fix = "use 1: every worker then has the whole draft"
        raise ConfigError(f"{field} = {size}: {unshared(shape, size)} cannot be shared out to {size} workers; {fix}")
