"""YAML files of options: read with what they inherit, and changed by ``key=value``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from ms_spec.errors import ConfigError

BASE = "base_config"
"""Names the file, or the files, that another one builds on. The name and the rules are mindformers'."""
# YAML 1.1 reads 1e-3 as a text; people mean the number.
EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def _numbers(value: Any) -> Any:
    if isinstance(value, str) and EXPONENT.fullmatch(value):
        return float(value)
    if isinstance(value, dict):
        return {key: _numbers(item) if key not in ("prompts", "stop") else item for key, item in value.items()}
    return value


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file, on top of those that its ``base_config`` names (relative to it).

    Mappings merge with their base's, at any depth; everything else replaces what the base has. Of several bases a
    later one replaces whole entries of an earlier one. A file of ``prompts`` lies beside the file that names it.

    Raises:
        ConfigError: a file is not there, not YAML, or not a mapping, or it builds on itself.
    """
    return _inherited(Path(path), [])


def _inherited(path: Path, above: list[Path]) -> dict[str, Any]:
    config = _mapping(path)
    bases = config.pop(BASE, None)
    names = [bases] if isinstance(bases, str) else bases or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{path}: {BASE}: must be the name of a file or a list of names, got {bases!r:.60}")
    below: dict[str, Any] = {}
    for name in names:
        base = path.parent / Path(name).expanduser()
        if base.resolve() in (one.resolve() for one in (*above, path)):
            circle = " -> ".join(one.name for one in (*above, path, base))
            raise ConfigError(f"{path}: {BASE}: {name} builds on this file, which goes round in a circle: {circle}")
        below.update(_inherited(base, [*above, path]))
    if isinstance(config.get("prompts"), str) and config["prompts"] != "-":
        config["prompts"] = str(path.parent / Path(config["prompts"]).expanduser())
    return _merged(config, below)


def _merged(config: dict[str, Any], below: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in config.items():
        under = below.get(key)
        merged[key] = _merged(value, under) if isinstance(value, dict) and isinstance(under, dict) else value
    return merged


def _mapping(path: Path) -> dict[str, Any]:
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
    numbers: dict[str, Any] = _numbers(value)
    return numbers


def override(config: dict[str, Any], change: str) -> None:
    """Applies one ``a.b=value`` to a configuration; the value is YAML.

    Raises:
        ConfigError: it is not of that form, or goes into something that has no fields.
    """
    name, sign, text = change.partition("=")
    if not sign or not name.strip():
        raise ConfigError(f"expected key=value, got {change!r}")
    if name.strip() == BASE:
        raise ConfigError(f"{BASE}: is read before anything is changed; name it in the file")
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
