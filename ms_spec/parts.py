"""What an engine is put together from, and the checkpoint's own sampling defaults."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ms_spec.hidden_states import HiddenStatesSink
from ms_spec.limits import Limits
from ms_spec.proposers.base import HostProposer
from ms_spec.sampling_params import NEUTRAL, SamplingParams
from ms_spec.work import Runner

_log = logging.getLogger("ms_spec")
_FROM_CHECKPOINT = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def _nothing() -> None:
    pass


@dataclass
class Parts:
    """A loaded model, ready to run.

    tokenizer: has encode(text, add_special_tokens), decode(ids) and render_chat(messages, ...) -> text.
    make_decoder: a new incremental decoder, by skip_special_tokens.
    generation_config: the checkpoint's generation_config.json, {} without one.
    drafter: drafts between steps; None where the step graphs draft, or nothing does.
    sink: takes the hidden states that the runner returns; None where it returns none.
    carries: the runner takes steps before the results of those before them are there.
    """

    runner: Runner
    limits: Limits
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Any
    make_decoder: Callable[[bool], Any]
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    drafter: HostProposer | None = None
    sink: HiddenStatesSink | None = None
    carries: bool = False
    close: Callable[[], None] = _nothing


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """SamplingParams fields that the checkpoint sets. Logs every one that is taken, or that cannot be honoured."""
    taken: dict[str, Any] = {}
    for theirs, ours in _FROM_CHECKPOINT.items():
        value = generation_config.get(theirs)
        if value is None:
            continue
        try:
            SamplingParams(**{ours: value})
        except ValueError as error:
            _log.warning("generation_config.json is ignored where it is wrong: %s", error)
            continue
        taken[ours] = value
    for name, neutral in NEUTRAL.items():
        if name in generation_config and generation_config[name] not in neutral:
            _log.warning("generation_config.json: %s = %s is not supported yet", name, generation_config[name])
    if taken:
        _log.info(
            "sampling defaults from the checkpoint: %s (generation_config='vllm' turns them off)",
            ", ".join(f"{name} = {value}" for name, value in taken.items()),
        )
    return taken
