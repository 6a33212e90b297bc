"""One file of ``torch.save``: where each tensor lies in it.

Since PyTorch 1.6 that is a zip archive with a pickle, data.pkl, and one entry for each storage, as a rule not
compressed. Before, it was five pickles (a magic number, a version, facts of the machine, the object, the keys of the
storages) and behind them the storages, each headed by its number of elements. See ``torch/serialization.py``.
"""

from __future__ import annotations

import io
import math
import mmap
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ms_spec.models.checkpoint.restricted_pickle import Refused, shown
from ms_spec.models.checkpoint.torch_pickle import WIDTHS, Storage, TensorUnpickler, View, extent

_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001
_MOST_PICKLE = 1 << 28
_MOST_ELEMENTS = 1 << 40  # a view with stride 0 may be far larger than its storage
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, struct.error, OSError)


@dataclass(frozen=True)
class _Place:
    """A storage's bytes: at ``offset`` of the file, or what the zip's entry ``packed`` unpacks to."""

    offset: int
    size: int
    packed: str | None = None


class TorchFile:
    """The named tensors of a file. ValueError (one line, with the path) for all that cannot be read or is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._archive: zipfile.ZipFile | None = None
        self._unpacking: dict[str, IO[bytes]] = {}
        try:
            content, self._places = self._open()
            self.tensors = _state_dict(content)
            for name, view in self.tensors.items():
                self._check(name, view)
        except _ZIP_ERRORS as error:
            raise ValueError(f"{path}: cannot be read ({type(error).__name__}: {shown(str(error))})") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def rows(self, view: View, start: int, stop: int | None, dtype: np.dtype[Any]) -> np.ndarray:
        """Rows start:stop along axis 0 (all of a scalar) as the file has them: a strided, mapped array of ``dtype``."""
        shape, first = view.shape, view.offset
        if shape:
            start, stop, _ = slice(start, stop).indices(shape[0])
            shape = (max(stop - start, 0), *shape[1:])
            first += start * view.strides[0]
        if 0 in shape:
            return np.empty(shape, dtype)
        window = self._window(view.storage, first * dtype.itemsize, extent(shape, view.strides) * dtype.itemsize)
        return np.ndarray(shape, dtype, window, 0, tuple(stride * dtype.itemsize for stride in view.strides))

    def _window(self, storage: Storage, begin: int, size: int) -> Any:
        """Bytes of a storage, mapped for this call alone, so that pages that were read do not pile up in memory."""
        place = self._places[storage.key]
        if place.packed is None:
            return np.memmap(self.path, np.uint8, "r", place.offset + begin, (size,))
        try:
            # Kept open: rows are asked for in their order, and what lies before them need not be unpacked again.
            if self._archive is None:
                self._archive = zipfile.ZipFile(self.path)
            if place.packed not in self._unpacking:
                self._unpacking[place.packed] = self._archive.open(place.packed)
            stream = self._unpacking[place.packed]
            stream.seek(begin)
            data = stream.read(size)
        except (*_ZIP_ERRORS, KeyError) as error:
            raise ValueError(f"{self.path}: cannot unpack {place.packed} ({type(error).__name__}: {error})") from None
        if len(data) < size:
            raise ValueError(f"{self.path}: {place.packed} ends {size - len(data)} bytes too early; fetch it again")
        return data

    def _check(self, name: str, view: View) -> None:
        if 0 in view.shape:
            return
        place = self._places.get(view.storage.key)
        if place is None:
            raise ValueError(f"tensor {shown(name)} is in storage {shown(view.storage.key)}, which is not there")
        if math.prod(view.shape) > _MOST_ELEMENTS or view.end() > place.size:
            raise ValueError(
                f"tensor {shown(name)} with shape {list(view.shape)} ends at byte {view.end()} of its storage, which "
                f"has {place.size}; the file is damaged"
            )

    def _open(self) -> tuple[Any, dict[str, _Place]]:
        size = self.path.stat().st_size
        with self.path.open("rb") as stream:
            if stream.read(4) == b"PK\x03\x04":
                return self._open_zip(stream, size)
            if size == 0:
                raise ValueError("is empty (0 bytes); fetch it again")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _open_stream(data, size)

    def _open_zip(self, stream: IO[bytes], size: int) -> tuple[Any, dict[str, _Place]]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                entries = {entry.filename: entry for entry in archive.infolist()}
                pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
                if len(pickles) != 1:
                    raise Refused("is a zip file, but not one of torch.save: there is no data.pkl in it")
                root = pickles[0][: -len("data.pkl")]
                if root + "constants.pkl" in entries:
                    raise Refused("is a TorchScript program; save model.state_dict() with torch.save instead")
                if root + "byteorder" in entries and archive.read(root + "byteorder") != b"little":
                    raise Refused("was saved on a big-endian machine; save it again on a little-endian one")
                if entries[pickles[0]].file_size > _MOST_PICKLE:
                    raise Refused(f"data.pkl has {entries[pickles[0]].file_size} bytes, which no table of tensors has")
                unpickler = TensorUnpickler()
                content = unpickler.load(io.BytesIO(archive.read(pickles[0])))
        except (zipfile.BadZipFile, UnicodeDecodeError, struct.error, EOFError, zlib.error) as error:
            raise ValueError(f"truncated or damaged zip file ({size} bytes; {shown(str(error))})") from None
        except NotImplementedError as error:
            raise ValueError(f"a zip file that cannot be unpacked ({error})") from None
        places = {}
        for key, storage in unpickler.storages.items():
            entry = entries.get(f"{root}data/{key}")
            if entry is not None:
                places[key] = _place(stream, size, entry, storage)
        return content, places


def _place(stream: IO[bytes], size: int, entry: zipfile.ZipInfo, storage: Storage) -> _Place:
    needed = storage.count * WIDTHS[storage.dtype]
    if entry.file_size < needed:
        raise ValueError(f"truncated: {shown(entry.filename)} has {entry.file_size} bytes, but {needed} are needed")
    if entry.compress_type != zipfile.ZIP_STORED:
        return _Place(0, entry.file_size, entry.filename)
    stream.seek(min(entry.header_offset, size))
    head = stream.read(30)
    if len(head) < 30 or head[:4] != b"PK\x03\x04" or entry.flag_bits & 1:
        raise ValueError(f"damaged zip file: {shown(entry.filename)} is not where the directory says, or encrypted")
    name, extra = struct.unpack_from("<HH", head, 26)
    offset = entry.header_offset + len(head) + name + extra
    if offset + entry.file_size > size:
        raise ValueError(f"truncated: {shown(entry.filename)} ends at byte {offset + entry.file_size}, not {size}")
    return _Place(offset, entry.file_size)


def _open_stream(data: mmap.mmap, size: int) -> tuple[Any, dict[str, _Place]]:
    """The format before PyTorch 1.6."""
    unpickler = TensorUnpickler()
    stream: Any = data
    try:
        magic = unpickler.load(stream)
    except Refused:
        raise
    except ValueError as error:
        raise ValueError(f"not a PyTorch file, neither a zip archive nor pickles: {error}") from None
    if type(magic) is not int or magic != _MAGIC:
        raise ValueError("a pickle, but not one of torch.save; save the tensors with torch.save")
    try:
        version, machine = unpickler.load(stream), unpickler.load(stream)
        if type(version) is not int or version != _VERSION:
            raise Refused(f"is not of version {_VERSION}, the only one of this format; save it again")
        if type(machine) is not dict or machine.get("little_endian") is not True:
            raise Refused("was saved on a big-endian machine; save it again on a little-endian one")
        content, keys = unpickler.load(stream), unpickler.load(stream)
    except Refused:
        raise
    except ValueError as error:
        raise ValueError(f"{error} (the file has {size} bytes); fetch it again") from None
    if type(keys) is not list or not all(type(key) is str and key in unpickler.storages for key in keys):
        raise ValueError("its list of storages does not fit its tensors; the file is damaged")
    return content, dict(_places(data, size, [unpickler.storages[key] for key in keys]))


def _places(data: mmap.mmap, size: int, storages: list[Storage]) -> Iterator[tuple[str, _Place]]:
    at = data.tell()
    for storage in storages:
        if at + 8 > size:
            raise ValueError(f"truncated: storage {shown(storage.key)} starts at byte {at}, but the file has {size}")
        (count,) = struct.unpack_from("<q", data, at)
        end = at + 8 + count * WIDTHS[storage.dtype]
        if count != storage.count:
            raise ValueError(f"storage {shown(storage.key)} has {count} elements, not {storage.count}; it is damaged")
        if end > size:
            raise ValueError(
                f"truncated: storage {shown(storage.key)} ends at byte {end}, but the file has {size}; fetch it again"
            )
        yield storage.key, _Place(at + 8, end - at - 8)
        at = end


def _state_dict(content: Any) -> dict[str, View]:
    """The named tensors: the content itself, or what it has under "state_dict" or "model"."""
    if type(content) is View:
        raise Refused("holds one tensor without a name; save a dict of names and tensors")
    if type(content) is not dict:
        raise Refused(f"holds something of type {type(content).__name__}; expected a dict of names and tensors")
    for inner in (content.get("state_dict"), content.get("model"), content):
        if type(inner) is dict:
            tensors = {k: v for k, v in inner.items() if type(k) is str and type(v) is View}
            if tensors:
                return tensors
    keys = ", ".join(shown(str(key), 40) for key in list(content)[:5]) or "nothing"
    raise Refused(f'holds no named tensors, neither itself nor under "state_dict" or "model"; it has {keys}')
