"""Hugging Face directories: safetensors files, single or sharded, read a few rows at a time."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ms_spec.models.checkpoint.identity import file_identity
from ms_spec.models.checkpoint.shards import check_shard, shards_of

_FLOATS = {"F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
_INTEGERS = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "u1"}
_OTHERS = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_OTHERS.update({"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1})


@dataclass(frozen=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsCheckpoint:
    """The tensors of ``model.safetensors``, of the shards that its ``.index.json`` names, or of one file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.location = str(folder)
        self.files: list[Path] = []
        self._entries: dict[str, _Entry] = {}
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if folder.is_file():
            self._add(folder, set())
        elif single.exists():
            self._add(single, set())
        elif index.exists():
            for file, expected in shards_of(index, "safetensors"):
                self._add(file, expected)
        else:
            raise ValueError(
                f"{folder}: has neither model.safetensors nor model.safetensors.index.json, and no pytorch_model.bin"
            )

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """ "float32", "bfloat16", ...; for what is no supported float, the name in the file."""
        stored = self._entry(name).dtype
        return _FLOATS[stored][0] if stored in _FLOATS else stored

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows start:stop along the first axis, float32."""
        entry = self._entry(name)
        if entry.dtype not in _FLOATS:
            raise ValueError(
                f"{entry.file.name}: tensor {name} has dtype {entry.dtype}, which is not supported; supported: "
                f"{', '.join(_FLOATS)}"
            )
        rows = entry.shape[0] if entry.shape else 1
        start, stop, _ = slice(start, stop).indices(rows)
        shape = (max(stop - start, 0), *entry.shape[1:]) if entry.shape else ()
        row = math.prod(entry.shape[1:])
        count = math.prod(shape)
        if count == 0:
            return np.empty(shape, np.float32)
        size = _FLOATS[entry.dtype][1]
        stored = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}[entry.dtype]
        # A mapping of these rows alone, gone when this returns: pages that were read do not pile up in memory.
        window = np.memmap(entry.file, stored, "r", entry.offset + start * row * size, (count,))
        if entry.dtype == "BF16":
            values = (window.astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            with np.errstate(over="ignore"):
                values = np.array(window, dtype=np.float32)
        return values.reshape(shape)

    def read_int(self, name: str) -> np.ndarray:
        """All of an integer or boolean tensor, int64."""
        entry = self._entry(name)
        if entry.dtype not in _INTEGERS:
            raise ValueError(
                f"{entry.file.name}: tensor {name} has dtype {entry.dtype}, not an integer that can be read; "
                f"supported: {', '.join(_INTEGERS)}"
            )
        count = math.prod(entry.shape)
        if count == 0:
            return np.empty(entry.shape, np.int64)
        window = np.memmap(entry.file, _INTEGERS[entry.dtype], "r", entry.offset, (count,))
        return np.array(window != 0 if entry.dtype == "BOOL" else window, dtype=np.int64).reshape(entry.shape)

    def identity(self) -> str:
        return file_identity(self.files)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise ValueError(f"{self.folder}: there is no tensor {name}")
        return self._entries[name]

    def _add(self, file: Path, expected: set[str]) -> None:
        entries = read_header(file)
        check_shard(file, entries, expected)
        self.files.append(file)
        self._entries.update(entries)


def read_header(file: Path) -> dict[str, _Entry]:
    """The table of one safetensors file, checked against the file's size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else None
        if length is None or length > size - 8:
            raise ValueError(f"{file}: truncated or not a safetensors file ({size} bytes, header incomplete)")
        raw = stream.read(length)
    try:
        table: dict[str, Any] = json.loads(raw)
        table.pop("__metadata__", None)
        entries = {n: (t["dtype"], tuple(t["shape"]), *t["data_offsets"]) for n, t in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: damaged safetensors header ({type(error).__name__})") from None
    data = 8 + length
    result = {}
    for name, (dtype, shape, begin, end) in entries.items():
        width = _FLOATS[dtype][1] if dtype in _FLOATS else _OTHERS.get(dtype)
        if width is not None and (begin < 0 or end - begin != math.prod(shape) * width):
            raise ValueError(
                f"{file}: tensor {name} with shape {list(shape)} and dtype {dtype} needs {math.prod(shape) * width} "
                f"bytes, but the header gives it {end - begin}"
            )
        if data + end > size:
            raise ValueError(
                f"{file}: truncated: tensor {name} ends at byte {data + end}, but the file has {size}; fetch it again"
            )
        result[name] = _Entry(file, dtype, shape, data + begin)
    return result
