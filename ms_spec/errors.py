"""Errors that a user can cause. Each carries one line that says what to change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """An engine argument or option that cannot be honoured: field, value, what is allowed, nearest fix."""


class RequestError(ValueError):
    """A prompt or a sampling parameter that cannot be served. Concerns one request only."""


class EngineError(RuntimeError):
    """The model failed while it ran; every request in flight was ended with this error."""


def closest(name: object, known: Iterable[str]) -> str:
    """The known name nearest to ``name``, or an empty string when none is near."""
    found = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    return found[0] if found else ""


def unknown_name(what: str, name: object, known: Iterable[str]) -> str:
    """The one-line message for a name that is not among ``known``."""
    names = sorted(known)
    near = closest(name, names)
    return f"{what} '{name}' is unknown; " + (f"did you mean '{near}'?" if near else "known: " + ", ".join(names))
