"""Where results go: stdout, which they have for themselves, or a file that is whole when it is there."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ms_spec.errors import ConfigError, OutputError
from ms_spec.terminal import note


class ResultStream(io.TextIOWrapper):
    """Text for results. What goes wrong with it is an OutputError that names it, or a BrokenPipeError."""

    def __init__(self, file: BinaryIO, title: str, encoding: str = "utf-8") -> None:
        super().__init__(file, encoding=encoding, errors="replace", line_buffering=True)
        self._title = title

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"{self._title} cannot be written: {error.strerror or error}") from None

    def write(self, text: str, /) -> int:
        with self._named():
            return super().write(text)

    def write_bytes(self, content: bytes) -> None:
        """Writes what is no text."""
        with self._named():
            super().flush()
            self.buffer.write(content)
            self.buffer.flush()

    def flush(self) -> None:
        with self._named():
            super().flush()


def _close(stream: ResultStream) -> None:
    with suppress(OSError, OutputError):  # it has been told
        stream.close()


@contextmanager
def result_stream() -> Iterator[TextIO]:
    """A stream for results only: whatever else in this process writes to stdout (native code too) goes to stderr.

    Raises:
        OutputError: stdout is closed.
    """
    if sys.stdout is None:
        raise OutputError("stdout is closed; there is no place for the results")
    standard: Any = sys.stdout
    try:
        own = bool(standard == sys.__stdout__) and standard.fileno() == 1
    except (OSError, ValueError, AttributeError):
        own = False
    if not own:
        yield sys.stdout
        return
    sys.stdout.flush()
    saved = os.dup(1)
    out = ResultStream(os.fdopen(os.dup(saved), "wb"), "stdout", sys.stdout.encoding or "utf-8")
    os.dup2(2, 1)
    try:
        yield out
    finally:
        sys.stdout.flush()
        _close(out)
        os.dup2(saved, 1)
        os.close(saved)


@contextmanager
def result_file(path: Path, option: str = "output") -> Iterator[ResultStream]:
    """A stream into a file that appears under its name when it is whole.

    Until then it is called ``NAME.part``, and it stays so, with what has come, when something breaks.

    option: what the file is called in errors.

    Raises:
        ConfigError: it cannot be written.
        OutputError: it cannot be written any more.
    """
    device = path.exists() and not path.is_file()
    partial = path if device else path.with_name(path.name + ".part")
    if path.exists() and not os.access(path, os.W_OK):
        raise ConfigError(f"{option}: {path} is write-protected")
    try:
        stream = ResultStream(partial.open("wb"), str(partial))
    except OSError as error:
        raise ConfigError(f"{option}: {partial} cannot be written: {error.strerror}") from None
    try:
        yield stream
        stream.close()
    except BaseException:
        _close(stream)
        if not device:
            _keep_what_came(partial)
        raise
    if not device:
        try:
            partial.replace(path)
        except OSError as error:
            raise OutputError(f"{partial} cannot be renamed to {path}: {error.strerror}") from None


def _keep_what_came(partial: Path) -> None:
    with suppress(OSError):
        if partial.stat().st_size:
            note(f"[what had come is in {partial}]")
        else:
            partial.unlink()
