"""Run files: a job written down as YAML, and ``key=value`` changes to it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ms_spec.errors import ConfigError, unknown_name
from ms_spec.job import Job, engine_names
from ms_spec.mindformers_yaml import as_run_file, is_mindformers
from ms_spec.prompts import Prompt, from_record, read_prompts
from ms_spec.vllm_arguments import NEUTRAL
from ms_spec.yaml_file import BASE, load_yaml, override

OWN_KEYS = ("prompts", "sampling_params", "chat", "batch", "output", "json", "show_drafts")


@dataclass
class Run:
    """A job and where its results go."""

    job: Job
    output: Path | None = None
    """JSON lines go to this file; None: the terminal."""
    json: bool = False
    show_drafts: bool = False
    no_effect: list[str] = field(default_factory=list)
    """Keys of a mindformers file that mean nothing here."""


def _flag(config: dict[str, Any], name: str) -> bool:
    value = config.pop(name, None)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: must be true or false, got {value!r}")
    return value


def _prompts(value: Any) -> list[Prompt]:
    if isinstance(value, str):
        return read_prompts(value if value == "-" else Path(value).expanduser())
    if not isinstance(value, list) or not value:
        raise ConfigError(f"prompts: must be a list of prompts or the name of a file, got {value!r:.60}")
    return [from_record(item, f"prompts[{number}]") for number, item in enumerate(value)]


def _output(value: Any) -> Path | None:
    """Where results are to go. ConfigError for a place where they cannot."""
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise ConfigError(f"output: must be the name of a file, got {value!r}")
    target = Path(value).expanduser()
    if not target.parent.is_dir():
        raise ConfigError(f"output: no such folder: {target.parent}")
    if target.is_dir():
        raise ConfigError(f"output: {target} is a folder; give the name of a file")
    if target.exists() and not os.access(target, os.W_OK):
        raise ConfigError(f"output: {target} is write-protected")
    return target


def load_run(path: str | Path, changes: list[str] | None = None) -> Run:
    """Reads a run file, or a predict file of mindformers, and applies changes to it.

    A prompt file that the run file names is looked for beside it; one given as a change, in the current folder.

    Raises:
        ValueError: anything in it that is unknown or not allowed, with the nearest right name.
    """
    config = load_yaml(path)
    for change in changes or []:
        override(config, change)
    known = {*OWN_KEYS, *engine_names()}
    no_effect: list[str] = []
    if is_mindformers(config):
        config, no_effect = as_run_file(config, {*known, *NEUTRAL})
    for name in config:
        if name not in known and name not in NEUTRAL:
            raise ConfigError(unknown_name("option", name, known, (*NEUTRAL, BASE)))
    sampling = config.pop("sampling_params", None) or {}
    if not isinstance(sampling, dict):
        raise ConfigError(f"sampling_params: must be a mapping, got {sampling!r:.60}")
    if "prompts" not in config:
        raise ConfigError(f"{path}: no prompts; add a list, or prompts: FILE")
    asked, output = config.pop("prompts"), _output(config.pop("output", None))
    read = [Path(path), Path(asked).expanduser()] if isinstance(asked, str) else [Path(path)]
    if output is not None and output.resolve() in [file.resolve() for file in read]:
        raise ConfigError(f"output: {output} is read by this run; give another name")
    prompts = _prompts(asked)
    chat, batch = _flag(config, "chat"), config.pop("batch", None)
    as_json, show_drafts = _flag(config, "json"), _flag(config, "show_drafts")
    if output is None and as_json and show_drafts:
        raise ConfigError("show_drafts colours text, json prints none: set one of them")
    return Run(Job(prompts, config, sampling, chat, batch), output, as_json, show_drafts, no_effect)
