"""Whose fault it is that a draft cannot be used: the caller's, config.json's or the tensors'."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class OverrideError(ValueError):
    """A field that the caller gave instead of config.json's. The text begins with its name."""


class TensorError(ValueError):
    """What is in the files of tensors. The text says which files."""


@contextlib.contextmanager
def of_tensors(location: str) -> Iterator[None]:
    """Makes a TensorError of what goes wrong inside. ``location``: of the files."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        raise TensorError(text if text.startswith(location) else f"{location}: {text}") from None
