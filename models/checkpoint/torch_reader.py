"""PyTorch files (``.bin``, ``.pt``, ``.pth``), single or sharded, read a few rows at a time, without PyTorch.

Nothing that a file names is imported or called; see ``restricted_pickle``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ms_spec.models.checkpoint.identity import file_identity
from ms_spec.models.checkpoint.shards import check_shard, shards_of
from ms_spec.models.checkpoint.torch_file import TorchFile
from ms_spec.models.checkpoint.torch_pickle import View

SUFFIXES = (".bin", ".pt", ".pth")
_SINGLE, _INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# What trainers leave beside the weights.
_OTHERS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")
_FLOATS = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
_INTEGERS = {"int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "i1"}
_INTEGERS.update({"uint32": "<u4", "uint16": "<u2", "uint8": "u1", "bool": "u1"})


class TorchCheckpoint:
    """The tensors of a file that ``torch.save`` wrote, or of the shards that an ``.index.json`` names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.location = str(path)
        self.files: list[Path] = []
        self._tensors: dict[str, tuple[TorchFile, View]] = {}
        if path.suffix.lower() == ".json":
            for file, expected in shards_of(path, "PyTorch"):
                self._add(file, expected)
        else:
            self._add(path, set())

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name)[1].shape

    def dtype(self, name: str) -> str:
        """As PyTorch calls it, without "torch."."""
        return self._tensor(name)[1].dtype

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows start:stop along the first axis, float32."""
        dtype, stored = self._rows(name, start, stop, _FLOATS, "not a float that can be read")
        if dtype == "bfloat16":
            return (stored.astype(np.uint32, order="C") << np.uint32(16)).view(np.float32)
        with np.errstate(over="ignore"):
            return np.array(stored, dtype=np.float32, order="C")

    def read_int(self, name: str) -> np.ndarray:
        """All of an integer or boolean tensor, int64."""
        dtype, stored = self._rows(name, 0, None, _INTEGERS, "not an integer that can be read")
        return np.array(stored != 0 if dtype == "bool" else stored, dtype=np.int64, order="C")

    def identity(self) -> str:
        return file_identity(self.files)

    def _rows(
        self, name: str, start: int, stop: int | None, readable: dict[str, str], otherwise: str
    ) -> tuple[str, np.ndarray]:
        file, view = self._tensor(name)
        if view.dtype not in readable:
            raise ValueError(
                f"{file.path.name}: tensor {name} has dtype {view.dtype}, {otherwise}; supported: {', '.join(readable)}"
            )
        dtype: np.dtype[Any] = np.dtype(readable[view.dtype])
        return view.dtype, file.rows(view, start, stop, dtype)

    def _tensor(self, name: str) -> tuple[TorchFile, View]:
        if name not in self._tensors:
            raise ValueError(f"{self.path}: there is no tensor {name}")
        return self._tensors[name]

    def _add(self, path: Path, expected: set[str]) -> None:
        file = TorchFile(path)
        check_shard(path, file.tensors, expected)
        self.files.append(path)
        self._tensors.update({name: (file, view) for name, view in file.tensors.items()})


def weights_in(folder: Path) -> Path | None:
    """The file or index with a folder's PyTorch weights, None if there is none, ValueError if it could be several."""
    for name in (_SINGLE, _INDEX):
        if (folder / name).is_file():
            return folder / name
    files = [f for f in sorted(folder.iterdir()) if f.suffix.lower() in SUFFIXES and not f.stem.startswith(_OTHERS)]
    if len(files) > 1:
        raise ValueError(
            f"{folder}: holds {len(files)} PyTorch files ({', '.join(f.name for f in files[:5])}) and no "
            f"{_SINGLE} or {_INDEX}; give the path of one"
        )
    return files[0] if files else None
