"""Where files that can be made again are kept: compiled kernels, packed weights, tokenizers, fetched models."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

KINDS = ("kernels", "weights", "tokenizers", "models", "hashes")
NOWHERE = Path(os.devnull) / "ms-spec"
"""Cannot be made or written."""
_ABANDONED_S = 3600.0
"""A file that is being written changes more often."""


def cache_root() -> Path:
    """``$MS_SPEC_CACHE``, else ``$XDG_CACHE_HOME/ms-spec``, else ``~/.cache/ms-spec``. Perhaps it cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        if os.environ.get("MS_SPEC_CACHE"):
            return Path(os.environ["MS_SPEC_CACHE"]).expanduser()
        return (Path(base) if base else Path.home() / ".cache") / "ms-spec"
    except RuntimeError:  # a user without a home
        return NOWHERE


@dataclass(frozen=True)
class CacheEntry:
    """All that is kept of one kind."""

    kind: str
    path: Path
    files: int
    bytes: int


def cache_entries() -> list[CacheEntry]:
    """One entry for each of KINDS, also where nothing is kept. ValueError where the root is no folder."""
    root, entries = cache_root(), []
    if root.exists() and not root.is_dir():
        raise ValueError(f"cache: {root} is no folder; set MS_SPEC_CACHE to one")
    for kind in KINDS:
        sizes = []
        for file in (root / kind).rglob("*"):
            with contextlib.suppress(OSError):
                if file.is_file():
                    sizes.append(file.stat().st_size)
        entries.append(CacheEntry(kind, root / kind, len(sizes), sum(sizes)))
    return entries


def clear_cache(kinds: Iterable[str] | None = None) -> int:
    """Deletes what is kept of these kinds (all by default) and returns the bytes freed.

    Processes that run keep what they have read. Only the known folders are touched, never the root itself.

    Raises:
        OSError: the first thing that cannot be removed, when all others are.
    """
    chosen = list(KINDS if kinds is None else kinds)
    for kind in chosen:
        if kind not in KINDS:
            raise ValueError(f"cache kind: {kind!r} is unknown; allowed: {', '.join(KINDS)}")
    before = sum(e.bytes for e in cache_entries())
    for kind in chosen:
        shutil.rmtree(cache_root() / kind, ignore_errors=True)
    for kind in chosen:
        if any((cache_root() / kind).glob("*")):
            shutil.rmtree(cache_root() / kind)  # once more, for the reason
    return before - sum(e.bytes for e in cache_entries())


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write: readers see the old one or the whole new one. OSError where the folder cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """``content`` through :func:`atomic_file`."""
    with atomic_file(path) as stream:
        stream.write(content)


def _remove_abandoned(folder: Path) -> None:
    """Temporary files and folders of processes that were killed."""
    for left in folder.iterdir():
        if left.name.startswith((".", "tmp")):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
