"""One file of many aligned arrays, written in one pass and read as a whole.

Data first, each array at a multiple of 64 bytes; then a table (JSON: offsets, sizes, checksums); then 16 bytes: the
table's length and a magic word. A file without that end was never finished and counts as absent.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ms_spec.models.user_cache import atomic_file

_MAGIC = b"MSSPECW1"
_ALIGN = 64
_PIECE = 1 << 30  # one read call gives at most 2 GB
_log = logging.getLogger("ms_spec")


class PackedFile:
    """A finished file, read into memory."""

    def __init__(self, data: np.ndarray, table: list[dict[str, int]]) -> None:
        self._data = data
        self._table = table

    @classmethod
    def open(cls, path: Path, sizes: Sequence[int], verify: bool = True) -> PackedFile | None:
        """The file, or None if it is absent, unfinished, damaged, or does not hold arrays of these sizes (bytes)."""
        try:
            if not path.exists():
                return None
            data = _read(path)
            length, magic = struct.unpack("<Q8s", data[-16:].tobytes())
            if magic != _MAGIC or length > data.size - 16:
                raise ValueError("unfinished")
            table = json.loads(data[-16 - length : -16].tobytes())
            packed = cls(data, table)
            if [t["size"] for t in table] != list(sizes) or any(t["offset"] + t["size"] > data.size for t in table):
                raise ValueError("other arrays than expected")
            if verify:
                for entry in table:
                    stored = data[entry["offset"] : entry["offset"] + _padded(entry["size"])]
                    if _checksum(stored) != entry["sum"]:
                        raise ValueError("wrong checksum")
            return packed
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            _log.warning("packed weights in %s cannot be used (%s); packing them again", path, error)
            return None

    def tensor(self, index: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """Array ``index`` as a view of the mapping."""
        entry = self._table[index]
        return self._data[entry["offset"] : entry["offset"] + entry["size"]].view(dtype).reshape(shape)


def write_packed(path: Path, arrays: Iterable[Iterable[np.ndarray]]) -> None:
    """Writes arrays given in pieces. The file appears under its name when it is complete. OSError if it cannot be."""
    with atomic_file(path) as stream:
        table: list[dict[str, Any]] = []
        offset = 0
        for pieces in arrays:
            size, total, rest = 0, 0, b""
            for piece in pieces:
                # Sums are taken over whole 8-byte words: what is left of a piece waits for the next.
                content = np.concatenate([np.frombuffer(rest, np.uint8), _bytes(piece)]) if rest else _bytes(piece)
                whole = content.size // 8 * 8
                total = (total + _checksum(content[:whole])) % 2**64
                rest = content[whole:].tobytes()
                stream.write(content[:whole].data)
                size += piece.nbytes
            tail = rest + bytes(_padded(size) - size)
            total = (total + _checksum(np.frombuffer(tail, np.uint8))) % 2**64
            stream.write(tail)
            table.append({"offset": offset, "size": size, "sum": total})
            offset += _padded(size)
        encoded = json.dumps(table).encode()
        stream.write(encoded + struct.pack("<Q8s", len(encoded), _MAGIC))


def _read(path: Path) -> np.ndarray:
    """The file's bytes, aligned. NumPy asks for huge pages where there are some: with those, and not with a mapping of
    the file, a pass over the weights is faster. What is larger than the machine's memory is mapped."""
    size = path.stat().st_size
    try:
        room = np.empty(size + _ALIGN, np.uint8)
    except MemoryError:
        return np.memmap(path, np.uint8, "c")
    data = room[-room.ctypes.data % _ALIGN :][:size]
    with path.open("rb", buffering=0) as stream:
        done = 0
        while done < size and (count := stream.readinto(data[done : done + _PIECE].data)):
            done += count
    if done < size:
        raise ValueError("cut off while it was read")
    return data


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _bytes(piece: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(piece).reshape(-1).view(np.uint8)


def _checksum(content: np.ndarray) -> int:
    """Sum of the 64-bit words: as fast as memory, and it sees flipped bits and pages that were never written."""
    return int(np.add.reduce(content.view(np.uint64), dtype=np.uint64)) if content.size else 0
