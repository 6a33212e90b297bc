"""Whether the host can run ahead of the steps of a configuration. Imports no MindSpore."""

from __future__ import annotations

from ms_spec.config import EngineConfig
from ms_spec.proposers.registry import METHODS


def obstacle(config: EngineConfig) -> str | None:
    """Why it cannot, in words that name the field; None: it can. ``config``: with the draft's method filled in."""
    spec = config.speculative_config
    if config.eager:
        return "without compiled graphs (enforce_eager, or cudagraph_mode NONE) the host is busy while a step runs"
    if config.model_impl == "mindformers":
        return "with model_impl = 'mindformers' the lengths of a step are inputs that the host has to know"
    if config.extracts:
        return "with method 'extract_hidden_states' requests end with their first token"
    if spec is not None and spec.method is not None and METHODS[spec.method].host:
        return f"with method '{spec.method}' the host drafts between the steps"
    if spec is not None and spec.draft_sample_method == "probabilistic":
        return "with draft_sample_method = 'probabilistic' the number of drafts shows in what is sampled"
    if config.additional_config.rejection_sampler_config.enable_entropy_verify:
        return "with enable_entropy_verify the number of drafts shows in what is sampled"
    return None


def runs_ahead(config: EngineConfig) -> bool:
    """Whether it does: it is asked for, and nothing is in the way."""
    return bool(config.async_scheduling) and obstacle(config) is None
