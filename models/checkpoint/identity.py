"""A hash of what files hold, computed once for each state of a file."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from ms_spec.models.user_cache import cache_root, write_atomically

_CHUNK = 1 << 22


def file_identity(files: Iterable[Path]) -> str:
    """Hex digest of the files' contents in order. Unchanged files (path, size, time) are not read again."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(_digest(file).encode())
    return digest.hexdigest()[:32]


def _digest(file: Path) -> str:
    real = file.resolve()
    stat = real.stat()
    state = [str(real), stat.st_size, stat.st_mtime_ns, stat.st_ino]
    memo = cache_root() / "hashes" / f"{hashlib.sha256(str(real).encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(memo.read_text(encoding="utf-8"))
        if known["state"] == state and len(known["digest"]) == 64:
            return str(known["digest"])
    digest = hashlib.sha256()
    with real.open("rb") as stream:
        for chunk in iter(lambda: stream.read(_CHUNK), b""):
            digest.update(chunk)
    with contextlib.suppress(OSError):
        write_atomically(memo, json.dumps({"state": state, "digest": digest.hexdigest()}).encode())
    return digest.hexdigest()
