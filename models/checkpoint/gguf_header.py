"""The head of a GGUF file: metadata and the table of tensors.

The ``gguf`` package's reader turns every token of the vocabulary into an array and needs seconds for it; here lists
stay where they are in the file until somebody asks for them.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32


@dataclass(frozen=True)
class TensorInfo:
    """One row of the table. ``shape`` is in NumPy's order, ``kind`` a ggml type's number, ``offset`` absolute."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class _List:
    """An array that has not been decoded."""

    kind: int
    count: int
    offset: int


class Metadata(Mapping[str, Any]):
    """Key -> int, float, bool, str or list. Lists are decoded when they are first looked at."""

    def __init__(self, data: mmap.mmap, values: dict[str, Any]) -> None:
        self._data = data
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _List):
            value = self._values[key] = _read_list(self._data, value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def read_header(path: Path) -> tuple[Metadata, list[TensorInfo]]:
    """Metadata and tensors of a GGUF file. ValueError (one line) if the head is damaged or cut off."""
    try:
        with path.open("rb") as stream:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        if data[:4] != b"GGUF":
            raise ValueError("it does not start with the letters GGUF")
        (version,) = struct.unpack_from("<I", data, 4)
        if version not in (2, 3):
            raise ValueError(f"version {version} (or the other byte order); supported: 2 and 3, little-endian")
        return _parse(data)
    except (struct.error, UnicodeDecodeError, OverflowError, IndexError):
        raise ValueError(f"{path}: truncated or damaged GGUF header ({path.stat().st_size} bytes)") from None
    except ValueError as error:
        raise ValueError(f"{path}: not a usable GGUF file: {error}") from None


def _parse(data: mmap.mmap) -> tuple[Metadata, list[TensorInfo]]:
    tensors, keys = struct.unpack_from("<QQ", data, 8)
    at = 24
    values: dict[str, Any] = {}
    for _ in range(keys):
        key, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        values[key], at = _value(data, kind, at + 4)
    alignment = values.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    table = []
    for _ in range(tensors):
        name, at = _string(data, at)
        (dims,) = struct.unpack_from("<I", data, at)
        shape = struct.unpack_from(f"<{dims}Q", data, at + 4)
        kind, offset = struct.unpack_from("<IQ", data, at + 4 + 8 * dims)
        at += 16 + 8 * dims
        table.append(TensorInfo(name, tuple(reversed(shape)), kind, offset))
    start = -(-at // alignment) * alignment
    return Metadata(data, values), [TensorInfo(t.name, t.shape, t.kind, start + t.offset) for t in table]


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    if at + 8 + length > len(data):
        raise IndexError
    return data[at + 8 : at + 8 + length].decode("utf-8"), at + 8 + length


def _value(data: mmap.mmap, kind: int, at: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _string(data, at)
    if kind == _ARRAY:
        inner, count = struct.unpack_from("<IQ", data, at)
        return _List(inner, count, at + 12), _after(data, inner, count, at + 12)
    if kind not in _SCALARS:
        raise ValueError(f"metadata of unknown type {kind}")
    (value,) = struct.unpack_from("<" + _SCALARS[kind], data, at)
    return value, at + struct.calcsize("<" + _SCALARS[kind])


def _after(data: mmap.mmap, kind: int, count: int, at: int) -> int:
    """Where a list ends."""
    if kind in _SCALARS:
        end = at + count * struct.calcsize("<" + _SCALARS[kind])
        if end > len(data):
            raise IndexError
        return end
    if kind != _STRING:
        raise ValueError(f"a list of type {kind}")
    length = struct.Struct("<Q").unpack_from
    for _ in range(count):
        at += 8 + length(data, at)[0]
    return at


def _read_list(data: mmap.mmap, where: _List) -> list[Any]:
    if where.kind == _STRING:
        result, at = [], where.offset
        for _ in range(where.count):
            text, at = _string(data, at)
            result.append(text)
        return result
    return np.frombuffer(data, "<" + _SCALARS[where.kind], where.count, where.offset).tolist()
