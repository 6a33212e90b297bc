"""Run files: a job written down as YAML, and ``key=value`` changes to it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ms_spec.errors import ConfigError, unknown_name
from ms_spec.job import Job, engine_names, sampling_names
from ms_spec.prompts import Prompt, from_record, read_prompts

OWN_KEYS = ("prompts", "sampling_params", "chat", "batch", "output", "json", "show_drafts")
# YAML 1.1 reads 1e-3 as a text; people mean the number.
EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


@dataclass
class Run:
    """A job and where its results go."""

    job: Job
    output: Path | None = None
    """JSON lines go to this file; None: the terminal."""
    json: bool = False
    show_drafts: bool = False


def _numbers(value: Any) -> Any:
    if isinstance(value, str) and EXPONENT.fullmatch(value):
        return float(value)
    if isinstance(value, dict):
        return {key: _numbers(item) if key not in ("prompts", "stop") else item for key, item in value.items()}
    return value


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: it is not there, not YAML, or not a mapping.
    """
    path = Path(path)
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no such file: {path}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{place}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a mapping of options, got {type(value).__name__}")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{path}: option names are words, got {key!r}")
    return _numbers(value)


def override(config: dict[str, Any], change: str) -> None:
    """Applies one ``a.b=value`` to a configuration; the value is YAML.

    Raises:
        ConfigError: it is not of that form, or goes into something that has no fields.
    """
    name, sign, text = change.partition("=")
    if not sign or not name.strip():
        raise ConfigError(f"expected key=value, got {change!r}")
    try:
        value = _numbers(yaml.safe_load(text))
    except yaml.YAMLError:
        raise ConfigError(f"{name}: {text!r} is not a YAML value") from None
    *path, last = name.strip().split(".")
    place = config
    for depth, key in enumerate(path):
        inner = place.get(key)
        if inner is None:
            inner = place[key] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{name}: {'.'.join(path[: depth + 1])} is {inner!r}, which has no fields")
        place = inner
    place[last] = value


def _flag(config: dict[str, Any], name: str) -> bool:
    value = config.pop(name, None)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: must be true or false, got {value!r}")
    return value


def _prompts(value: Any, folder: Path) -> list[Prompt]:
    if isinstance(value, str):
        path = Path(value).expanduser()
        return read_prompts(value if value == "-" else folder / path)
    if not isinstance(value, list) or not value:
        raise ConfigError(f"prompts: must be a list of prompts or the name of a file, got {value!r:.60}")
    return [from_record(item, f"prompts[{number}]") for number, item in enumerate(value)]


def load_run(path: str | Path, changes: list[str] | None = None) -> Run:
    """Reads a run file and applies changes to it.

    A prompt file that the run file names is looked for beside it; one given as a change, in the current folder.

    Raises:
        ValueError: anything in it that is unknown or not allowed, with the nearest right name.
    """
    config = load_yaml(path)
    for change in changes or []:
        override(config, change)
    known = {*OWN_KEYS, *engine_names()}
    for name in config:
        if name not in known:
            raise ConfigError(unknown_name("option", name, known))
    sampling = config.pop("sampling_params", None) or {}
    if not isinstance(sampling, dict):
        raise ConfigError(f"sampling_params: must be a mapping, got {sampling!r:.60}")
    for name in sampling:
        if name not in sampling_names():
            raise ConfigError(unknown_name("sampling parameter", name, sampling_names()))
    if "prompts" not in config:
        raise ConfigError(f"{path}: no prompts; add a list, or prompts: FILE")
    changed = any(change.partition("=")[0].strip() == "prompts" for change in changes or [])
    prompts = _prompts(config.pop("prompts"), Path() if changed else Path(path).parent)
    output = config.pop("output", None)
    if output is not None and (not isinstance(output, str) or not output):
        raise ConfigError(f"output: must be the name of a file, got {output!r}")
    target = Path(output).expanduser() if output else None
    if target and not target.parent.is_dir():
        raise ConfigError(f"output: no such folder: {target.parent}")
    if target and target.is_dir():
        raise ConfigError(f"output: {target} is a folder; give the name of a file")
    chat, batch = _flag(config, "chat"), config.pop("batch", None)
    as_json, show_drafts = _flag(config, "json"), _flag(config, "show_drafts")
    return Run(Job(prompts, config, sampling, chat, batch), target, as_json, show_drafts)
