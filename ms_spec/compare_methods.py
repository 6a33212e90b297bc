"""Which methods are compared: names, and for each of them a ``speculative_config``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ms_spec.errors import ConfigError, unknown_name
from ms_spec.speculative_config import METHODS

PLAIN = "none"
"""Decoding without drafts."""
NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,31}", re.ASCII)


@dataclass(frozen=True)
class Method:
    """One side of a comparison. ``config``: its speculative_config, None for plain decoding."""

    name: str
    config: Mapping[str, Any] | None

    @property
    def num_speculative_tokens(self) -> int:
        """K, 0 for plain decoding."""
        return 0 if self.config is None else self.config["num_speculative_tokens"]


def read_config(name: str, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A config as it was given, with the name or without ("" then), to a name and a config with a method.

    Raises:
        ConfigError: neither says which method it is, or the name cannot be one.
    """
    if not name:
        name = str(config.get("method") or "")
        if not name:
            raise ConfigError('--speculative-config: which method? add a "method", or write NAME={...}')
    if name == PLAIN:
        raise ConfigError(f"--speculative-config: '{PLAIN}' is plain decoding and has no config; use another name")
    if not NAME.fullmatch(name):
        raise ConfigError(f"--speculative-config: {name!r:.60} is no name; use up to 32 letters, digits and . + - _")
    return name, {"method": name, **config}


def choose_methods(
    names: Sequence[str] | None, configs: Sequence[tuple[str, Mapping[str, Any]]], num_speculative_tokens: int
) -> list[Method]:
    """The methods of a comparison, in order.

    Args:
        names: methods, or names that ``configs`` explain. None: plain decoding and those of ``configs``, or ngram.
        configs: (name, speculative_config) pairs, see :func:`read_config`.
        num_speculative_tokens: K of those whose config has none.

    Raises:
        ConfigError: a name is unknown or there twice, or a config belongs to none. What is in the configs is not
            looked at.
    """
    known: dict[str, Mapping[str, Any]] = {}
    for name, config in configs:
        if name in known:
            raise ConfigError(f"--speculative-config: two for '{name}'; give one of them another name, as NAME={{...}}")
        known[name] = config
    if names is None:
        names = [PLAIN, *(known or ["ngram"])]
    methods: list[Method] = []
    for name in names:
        if not name:
            raise ConfigError("--methods: a name is empty; expected names with commas between, such as none,ngram")
        if name not in (PLAIN, *METHODS, *known):
            raise ConfigError("--methods: " + unknown_name("method", name, (PLAIN, *METHODS, *known)))
        if any(one.name == name for one in methods):
            raise ConfigError(f"--methods: '{name}' is there twice; name each method once")
        config = {"num_speculative_tokens": num_speculative_tokens, **known.get(name, {"method": name})}
        methods.append(Method(name, None if name == PLAIN else config))
    for name in known:
        if name not in names:
            raise ConfigError(f"--speculative-config: '{name}' is not among --methods; add it there")
    return methods
