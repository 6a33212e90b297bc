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

    def identity(self) -> str:
        """A hash of the content, the same wherever the files lie."""


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A Hugging Face directory or a ``.gguf`` file. ValueError for anything missing, damaged or truncated."""
    path = Path(path)
    if path.is_dir():
        from ms_spec.models.checkpoint.safetensors_reader import SafetensorsCheckpoint

        return SafetensorsCheckpoint(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file or directory")
    if path.suffix.lower() == ".gguf":
        from ms_spec.models.checkpoint.gguf_reader import GGUFCheckpoint

        return GGUFCheckpoint(path)
    raise ValueError(f"{path}: not a checkpoint; expected a Hugging Face directory or a .gguf file")
