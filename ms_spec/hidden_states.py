"""Files of hidden states, one a request, written beside the steps. Imports no MindSpore."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from ms_spec.errors import ConfigError
from ms_spec.extraction import FOLDER, Storage, storage
from ms_spec.limits import weights_dtype
from ms_spec.models.floats import held
from ms_spec.models.ops.limits import storage_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ms_spec.config import EngineConfig
    from ms_spec.models.config import ModelConfig

SUFFIX = ".safetensors"
_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64"}
_NUMBER = itertools.count()


@dataclass(frozen=True)
class Written:
    """The end of one file: where it is, or in one line why it is not there. ``key``: whose it is."""

    key: int
    path: str | None
    error: str | None = None


class HiddenStatesSink:
    """Collects the states of requests as their prompts are read, and writes them in threads of its own.

    A file has ``token_ids`` int64 [T] and ``hidden_states`` [T, ids, hidden] in the safetensors format. It gets its
    name when it is whole, and takes no other file's place. All calls come from one thread at a time.

    Args:
        storage: the folder, made if it is not there, and the number of threads.
        dtype: of the states in the files: float32, bfloat16 or float16.

    Raises:
        ConfigError: nothing can be written there.
    """

    def __init__(self, storage: Storage, dtype: str) -> None:
        self._folder = _writable(storage.folder)
        self._dtype = dtype
        self._most = 2 * storage.threads
        self._pool = ThreadPoolExecutor(storage.threads, "hidden-states")
        self._chunks: dict[int, list[np.ndarray]] = {}
        self._writing: dict[int, Future[Path]] = {}

    def take(self, key: int, start: int, states: np.ndarray) -> None:
        """States float32 [n, ids, hidden] of the prompt's tokens from ``start`` on. From 0 on it begins anew."""
        if start == 0:
            self._chunks[key] = []
        self._chunks[key].append(states)

    def write(self, key: int, name: str, token_ids: Sequence[int]) -> None:
        """Begins to write what was taken. :meth:`written` tells when that is done."""
        chunks = self._chunks.pop(key)
        self._writing[key] = self._pool.submit(_write, self._folder, name, token_ids, chunks, self._dtype)

    def written(self, wait_for_one: bool) -> list[Written]:
        """Files that are done since the last call. ``wait_for_one``: not before one is, if any is being written.

        Waits in any case while more is to be written than two files a thread: the states are in memory until then.
        """
        while True:
            running = [future for future in self._writing.values() if not future.done()]
            enough = len(running) < len(self._writing) or not wait_for_one
            if not running or (enough and len(running) <= self._most):
                break
            wait(running, return_when=FIRST_COMPLETED)
        done = {key: future for key, future in self._writing.items() if future.done()}
        for key in done:
            del self._writing[key]
        return [_outcome(key, future) for key, future in done.items()]

    def drop(self, key: int) -> None:
        """Forgets what was taken, and leaves no file of it, though it may be written already."""
        self._chunks.pop(key, None)
        future = self._writing.pop(key, None)
        if future is not None and not future.cancel():
            with suppress(Exception):
                future.result().unlink()

    def close(self) -> None:
        """Waits for what is being written and ends the threads."""
        self._pool.shutdown()


def open_sink(config: EngineConfig, model: ModelConfig, device: str) -> HiddenStatesSink | None:
    """The sink of an engine, None where it extracts nothing. Raises ConfigError."""
    if not config.extracts or config.kv_transfer_config is None:
        return None
    dtype = weights_dtype(config, model)
    if device == "ascend":
        dtype, _ = storage_dtype(dtype)
    return HiddenStatesSink(storage(config.kv_transfer_config.model_dump(exclude_unset=True)), dtype)


def _outcome(key: int, future: Future[Path]) -> Written:
    error = future.exception()
    if error is None:
        return Written(key, str(future.result()))
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
    return Written(key, None, f"the hidden states cannot be written: {' '.join(reason.split())}")


def _writable(name: str) -> Path:
    """The folder, after a file was made in it and removed."""
    folder = Path(name).absolute()
    trial = folder / _temporary("trial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.touch(exist_ok=False)
        trial.unlink()
    except OSError as error:
        raise ConfigError(
            f"{FOLDER} = {json.dumps(name)}: cannot be written: {error.strerror or error}; use a folder that can"
        ) from None
    return folder


def _temporary(name: str) -> str:
    return f".{name}.{os.getpid()}-{next(_NUMBER)}.part"


def file_name(request_id: str) -> str:
    """A request's name as the name of a file in the folder: letters, digits and . _ - only, and no dot in front."""
    return re.sub(r"[^A-Za-z0-9._-]|^\.", "_", request_id)[:100] or "_"


def _write(folder: Path, name: str, token_ids: Sequence[int], chunks: list[np.ndarray], dtype: str) -> Path:
    """Writes one file and returns where it is. What does not become a whole file is removed."""
    states = held(np.concatenate(chunks), dtype)
    ids = np.array(token_ids, np.int64)
    if len(states) != len(ids):
        raise RuntimeError(f"internal error: {len(states)} states of {len(ids)} tokens")
    if dtype == "float16" and not np.isfinite(states).all():
        raise ValueError("some are beyond float16; use dtype bfloat16 or float32")
    part = folder / _temporary(file_name(name))
    try:
        with part.open("xb") as stream:
            write_tensors(stream, {"token_ids": ("int64", ids), "hidden_states": (dtype, states)})
        return _published(part, folder, file_name(name))
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _published(part: Path, folder: Path, name: str) -> Path:
    """Gives a whole file its name: the first of NAME, NAME-2, NAME-3 ... that is free."""
    for number in itertools.count(1):
        path = folder / (name + (f"-{number}" if number > 1 else "") + SUFFIX)
        try:
            os.link(part, path)  # unlike a renaming, it fails where something is
        except FileExistsError:
            continue
        except OSError:  # a file system without links
            if path.exists():
                continue
            part.replace(path)
        else:
            part.unlink()
        return path
    raise AssertionError


def write_tensors(stream: BinaryIO, tensors: Mapping[str, tuple[str, np.ndarray]]) -> None:
    """Writes (dtype, C-ordered array) by name in the safetensors format; bfloat16 comes as its bits, uint16.

    The package of that name has no NumPy type for bfloat16, and its raw interface differs from version to version.
    """
    header, end = {}, 0
    for name, (dtype, array) in tensors.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _CODES[dtype], "shape": array.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for _, array in tensors.values():
        stream.write(array.data)
