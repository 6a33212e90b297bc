"""How the launcher sees that a worker lives, keeps up, and computes what the others compute. Imports no MindSpore.

Each worker has one line in a file of its own: graph calls begun, calls ended, a checksum over what they all gave, and
the same checksum as it was after the last multiple of ``MARK`` calls, at which workers that run side by side can be
compared. The line is written anew with each call, and each second by a thread, so that the file's time tells whether
the process is alive.
"""

from __future__ import annotations

import os
import threading
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = "MS_SPEC_HEARTBEATS"
"""Environment variable with the folder of the files."""
MARK = 16
PERIOD_S = 1.0
_WIDTH = 96


@dataclass(frozen=True)
class Beat:
    """A worker's state as its file tells it. sums: the checksum after so many calls, where it is known."""

    begun: int
    ended: int
    sums: dict[int, int]


class Heartbeat:
    """This worker's line. ``folder`` None: nobody looks, and nothing is written."""

    def __init__(self, folder: str | None, rank: int) -> None:
        self._begun = self._ended = self._sum = self._marked = self._mark_sum = 0
        self._file: int | None = None
        if folder is not None:
            self._file = os.open(path_of(folder, rank), os.O_WRONLY | os.O_CREAT, 0o600)
            self._write()
            threading.Thread(target=self._live, name="ms-spec-heartbeat", daemon=True).start()

    def begin(self) -> None:
        """A graph call begins."""
        self._begun += 1
        self._write()

    def end(self, content: bytes) -> None:
        """It has ended and has given ``content``, the same on all workers."""
        if self._file is None:
            return
        self._sum = zlib.crc32(content, self._sum)
        self._ended += 1
        if self._ended % MARK == 0:
            self._marked, self._mark_sum = self._ended, self._sum
        self._write()

    def _write(self) -> None:
        if self._file is not None:
            line = f"{self._begun} {self._ended} {self._sum} {self._marked} {self._mark_sum}"
            os.pwrite(self._file, line.ljust(_WIDTH).encode(), 0)

    def _live(self) -> None:
        pause = threading.Event()
        with suppress(OSError):  # the folder's disk is full or gone: the launcher will see
            while not pause.wait(PERIOD_S):
                self._write()


def path_of(folder: str | Path, rank: int) -> Path:
    """The file of a worker."""
    return Path(folder) / f"rank_{rank}"


def read_beat(path: Path) -> tuple[Beat, float] | None:
    """A worker's state, and when it was written (seconds, as ``time.time``); None before it has begun."""
    try:
        begun, ended, last, marked, mark_sum = map(int, path.read_text().split())
        return Beat(begun, ended, {marked: mark_sum, ended: last}), path.stat().st_mtime
    except (OSError, ValueError):
        return None
