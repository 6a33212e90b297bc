"""Checkpoints on disk behind one small interface."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np


class Checkpoint(Protocol):
    """Named tensors of which rows can be read without loading the rest. Names are Hugging Face's."""

    def names(self) -> list[str]:
        """All tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; ValueError if there is no such tensor."""

    def dtype(self, name: str) -> str:
        """How it is stored: "float32", "bfloat16", "float16", "float64", or the format's name ("Q4_1", "F8_E4M3")."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows start:stop along axis 0 as float32. ValueError names a dtype that cannot be read."""

    def read_int(self, name: str) -> np.ndarray:
        """All of an integer or boolean tensor, int64. ValueError names another dtype."""

    def identity(self) -> str:
        """A hash of the content, the same wherever the files lie."""


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A Hugging Face directory, or a file: ``.safetensors``, ``.gguf`` or PyTorch's (``.bin``, ``.pt``, ``.pth``).

    In a directory safetensors come first, then pytorch_model.bin (or its index), then the only PyTorch file there is.
    ValueError for anything missing, damaged or truncated.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file or directory")
    if path.suffix.lower() == ".gguf" and path.is_file():
        from ms_spec.models.checkpoint.gguf_reader import GGUFCheckpoint

        return GGUFCheckpoint(path)
    from ms_spec.models.checkpoint.safetensors_reader import SafetensorsCheckpoint
    from ms_spec.models.checkpoint.torch_reader import SUFFIXES, TorchCheckpoint, weights_in

    if path.is_dir():
        safetensors = ("model.safetensors", "model.safetensors.index.json")
        weights = None if any((path / name).exists() for name in safetensors) else weights_in(path)
        return SafetensorsCheckpoint(path) if weights is None else TorchCheckpoint(weights)
    if path.suffix.lower() in SUFFIXES:
        return TorchCheckpoint(path)
    if path.suffix.lower() == ".safetensors":
        return SafetensorsCheckpoint(path)
    raise ValueError(
        f"{path}: not a checkpoint; expected a Hugging Face directory, a .safetensors or .gguf file or a PyTorch file "
        f"({', '.join(SUFFIXES)})"
    )
