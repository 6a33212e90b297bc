"""``ms-spec run --check``: whatever can be found wrong with a run before weights are loaded, and a summary of it.

MindSpore is not imported. A model or a draft that would have to be fetched first is said to be unchecked.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ms_spec.config import EngineConfig
from ms_spec.engine import Engine
from ms_spec.errors import ConfigError
from ms_spec.extraction import FOLDER, storage
from ms_spec.fitting import fit
from ms_spec.inputs import encode_text, read_prompt
from ms_spec.job import DEFAULT_SAMPLING, Job, encode_prompt
from ms_spec.limits import Limits, device_of, model_limits
from ms_spec.models.loading import Loaded
from ms_spec.models.sources import resolve_here
from ms_spec.runfile import Run
from ms_spec.sampling_params import SamplingParams

DRAFT = "speculative_config.model"


def check(run: Run, params: list[SamplingParams]) -> list[str]:
    """Checks a run that has been prepared. Returns the lines of a summary.

    Raises:
        ValueError: one line; something in it cannot work.
    """
    config = EngineConfig.parse(**run.job.engine)
    _check_places(run, config)
    outlook = preview(config)
    config, absent = outlook.config, outlook.absent
    lines = [f"model     {config.model}"]
    if outlook.target is not None and outlook.limits is not None:
        shape, tensors = outlook.target.config, outlook.target.checkpoint.names()
        lines[0] += f": {shape.architecture}, {shape.num_layers} layers, {len(tensors)} tensors"
        if "tokenizer" not in absent:
            _check_prompts(run.job, params, config, outlook.limits, outlook.target)
        lines.append(_engine(config, outlook.limits))
    lines += [_drafts(config), _asked(run.job), _results(run)]
    if run.no_effect:
        lines.append(f"no effect {', '.join(run.no_effect)}")
    if absent:
        names = ", ".join(dict.fromkeys(absent.values()))
        lines.append(f"unchecked {names}: not on this machine; a run fetches what is missing")
    return lines


@dataclass(frozen=True)
class Preview:
    """What is known of an engine before its weights are loaded."""

    config: EngineConfig
    """Filled in from the draft checkpoint, where that could be opened."""
    absent: dict[str, str]
    """Field -> name of what is not on this machine."""
    target: Loaded | None
    limits: Limits | None
    """None, like ``target``, where the model is not on this machine."""


def preview(config: EngineConfig) -> Preview:
    """Checks the model, the draft and whether they fit each other. Raises ValueError (one line)."""
    spec = config.speculative_config
    wanted = {"model": config.model, "tokenizer": config.tokenizer, DRAFT: spec.model if spec is not None else None}
    here = {field: resolve_here(name, field) for field, name in wanted.items() if name is not None}
    absent = {field: str(wanted[field]) for field, source in here.items() if source is None}
    source = here["model"]
    if source is None:
        return Preview(config, absent, None, None)
    target = Loaded(source, config.tokenizer)
    target.checkpoint.names()  # the files are there, and whole
    if absent:  # whether a draft fits may be a question of the tokenizer
        return Preview(config, absent, target, model_limits(config, target.config))
    config, _, limits = fit(config, target)
    return Preview(config, absent, target, limits)


def _check_places(run: Run, config: EngineConfig) -> None:
    """Whether what is to be written can be."""
    if run.output is not None and not run.output.exists() and not os.access(run.output.parent, os.W_OK):
        raise ConfigError(f"output: {run.output.parent} is write-protected")
    if config.extracts and config.kv_transfer_config is not None:
        folder = storage(config.kv_transfer_config.model_dump(exclude_unset=True)).folder
        place = Path(folder).absolute()
        while not place.exists():
            place = place.parent
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise ConfigError(f"{FOLDER} = {json.dumps(folder)}: cannot be written; use a folder that can")


def _check_prompts(
    job: Job, params: list[SamplingParams], config: EngineConfig, limits: Limits, loaded: Loaded
) -> None:
    """Whether the engine would take every prompt. It is asked itself; without a model it takes no step."""
    tokenizer: Any = loaded.tokenizer
    nothing: Any = None
    parts = (limits, loaded.config.vocab_size, loaded.eos_token_ids, tokenizer.stream_decoder)
    engine = Engine(nothing, *parts, tokenizer=tokenizer)
    for number, (prompt, one) in enumerate(zip(job.prompts, params), 1):
        try:
            if config.extracts and one.max_tokens != 1:
                raise ConfigError(f"max_tokens = {one.max_tokens}: must be 1 with method 'extract_hidden_states'")
            text, ids = read_prompt(encode_prompt(prompt, tokenizer, job.chat))
            if ids is None:
                ids = encode_text(tokenizer, text or "", loaded.config.vocab_size)
            request = engine.add_request(ids, one)
        except ValueError as error:
            raise ConfigError(f"prompt {number}: {error}") from None
        engine.abort(request.output.request_id)


def _engine(config: EngineConfig, limits: Limits) -> str:
    blocks = f"{limits.num_blocks - 1} blocks of {limits.block_size} tokens"
    longest = f"up to {limits.max_model_len} tokens each"
    return f"engine    {device_of(config)}, {limits.max_num_seqs} at once, {longest}, KV cache of {blocks}"


def _drafts(config: EngineConfig) -> str:
    spec = config.speculative_config
    if spec is None:
        return "drafts    none"
    tokens = f", {spec.num_speculative_tokens} a step" if spec.num_speculative_tokens is not None else ""
    of = f" of {spec.model}" if spec.model is not None else ""
    return f"drafts    {spec.method or 'as the checkpoint says'}{of}{tokens}"


def _asked(job: Job) -> str:
    sampling = ", ".join(f"{name} {value}" for name, value in {**DEFAULT_SAMPLING, **job.sampling}.items())
    return f"prompts   {len(job.prompts)}{' through the chat template' if job.chat else ''}; {sampling}"


def _results(run: Run) -> str:
    if run.output is not None:
        return f"results   JSON lines in {run.output}"
    return "results   JSON lines on stdout" if run.json else "results   text on stdout"
