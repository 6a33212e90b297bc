"""Errors that a user can cause. Each carries one line that says what to change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST = 1000
"""Characters of an error's text: what a user gave may be a book."""


class Mistake(ValueError):
    """An error that quotes what a user gave: its text can be printed, whatever that is, and has an end."""

    def __init__(self, text: str) -> None:
        text, half = printable(text), LONGEST // 2
        super().__init__(text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}")


class ConfigError(Mistake):
    """An engine argument or option that cannot be honoured: field, value, what is allowed, nearest fix."""


class RequestError(Mistake):
    """A prompt or a sampling parameter that cannot be served. Concerns one request only."""


class OutputError(RuntimeError):
    """Results cannot be written where they are to go."""


class ClosedPipe(Exception):
    """Nobody reads the results any more. (typer makes an exit code of its own of BrokenPipeError.)"""


class EngineError(RuntimeError):
    """The model failed while it ran; every request in flight was ended with this error."""


def printable(text: str) -> str:
    """The text with lone surrogates (half a character) written out; nothing can print them."""
    return text.encode("utf-8", "backslashreplace").decode()


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
    hint = f"did you mean '{near}'?" if near else "known: " + ", ".join(names)
    return printable(f"{what} '{name}' is unknown; {hint}")
