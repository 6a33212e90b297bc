"""The user's cache folder: compiled kernels, packed weights, tokenizers, fetched models."""

from __future__ import annotations

import shutil
from pathlib import Path

from ms_spec.job import UserError
from ms_spec.models.user_cache import cache_root


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    if path.is_file() or path.is_symlink():
        return path.lstat().st_size
    return sum(item.lstat().st_size for item in path.rglob("*") if item.is_file() or item.is_symlink())


def kinds() -> dict[str, Path]:
    """What there is, by kind: each entry of the cache folder is one."""
    root = cache_root()
    return {item.name: item for item in sorted(root.iterdir())} if root.is_dir() else {}


def clear_kind(kind: str | None) -> int:
    """Removes one kind, or all. Returns the bytes that were freed.

    Raises:
        UserError: there is no such kind.
    """
    there = kinds()
    if kind is not None and kind not in there:
        raise UserError(f"cache: nothing of kind {kind!r}; there is {', '.join(there) or 'nothing'}")
    freed = 0
    for name, path in there.items():
        if kind is None or name == kind:
            freed += size_of(path)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    return freed


def show(kind: str | None = None) -> None:
    """Prints the folder and the size of each kind."""
    print(cache_root())
    total = 0
    for name, path in kinds().items():
        if kind is None or name == kind:
            size = size_of(path)
            total += size
            files = sum(item.is_file() for item in path.rglob("*")) if path.is_dir() else 1
            print(f"  {name:<12} {size / 1e6:>10.1f} MB  {files} files")
    print(f"  {'total':<12} {total / 1e6:>10.1f} MB")
