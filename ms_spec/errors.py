"""Errors that a user can cause. Each carries one line that says what to change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """An engine argument or option that cannot be honoured: field, value, what is allowed, nearest fix."""


class RequestError(ValueError):
    """A prompt or a sampling parameter that cannot be served. Concerns one request only."""


class OutputError(RuntimeError):
    """Results cannot be written where they are to go."""


class ClosedPipe(Exception):
    """Nobody reads the results any more. (typer makes an exit code of its own of BrokenPipeError.)"""


class EngineError(RuntimeError):
    """The model failed while it ran; every request in flight was ended with this error."""


def closest(name: object, known: Iterable[str]) -> str:
    """The known name nearest to ``name``, whatever its case, or an empty string when none is near."""
    names = {one.lower(): one for one in known}
    found = difflib.get_close_matches(str(name).lower(), list(names), n=1, cutoff=0.6)
    return names[found[0]] if found else ""


def is_neutral(value: object, neutral: Iterable[object]) -> bool:
    """Whether ``value`` is one of ``neutral``, and no mere look-alike such as True for 1."""
    return any(type(value) is type(same) and value == same for same in neutral)


def unknown_name(what: str, name: object, known: Iterable[str], others: Iterable[str] = ()) -> str:
    """The one-line message for a name that is not among ``known``. ``others`` may be meant, but are not listed."""
    names = sorted(known)
    near = closest(name, [*names, *others])
    return f"{what} '{name}' is unknown; " + (f"did you mean '{near}'?" if near else "known: " + ", ".join(names))
