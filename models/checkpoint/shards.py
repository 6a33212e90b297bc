"""The index of a checkpoint that is spread over several files."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path


def shards_of(index: Path, kind: str) -> list[tuple[Path, set[str]]]:
    """Each file that the index names, with the tensors it has to hold. ValueError (one line) if one is not there."""
    shards: dict[str, set[str]] = {}
    try:
        for name, shard in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            shards.setdefault(str(shard), set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index}: not a {kind} index ({type(error).__name__}: {error})") from None
    for shard, names in sorted(shards.items()):
        if not (index.parent / shard).is_file():
            raise ValueError(
                f"{index.parent / shard}: shard is missing; it holds {len(names)} tensors, {min(names)} among them"
            )
    return [(index.parent / shard, names) for shard, names in sorted(shards.items())]


def check_shard(file: Path, found: Collection[str], expected: set[str]) -> None:
    """ValueError if a file lacks a tensor that the index says it holds."""
    missing = sorted(expected - set(found))
    if missing:
        raise ValueError(f"{file}: tensor {missing[0]} is missing, though the index says it is in this file")
