"""A checkpoint under other names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ms_spec.models.checkpoint import Checkpoint
from ms_spec.models.drafts.errors import TensorError

if TYPE_CHECKING:
    import numpy as np


class RenamedCheckpoint:
    """Those tensors of ``source`` that ``names`` lists (new name -> name in ``source``); nothing else is in it.

    ``rows``: new name -> how many of the tensor's first rows are shown.
    """

    def __init__(self, source: Checkpoint, names: Mapping[str, str], rows: Mapping[str, int] | None = None) -> None:
        self._source, self._names, self._rows = source, dict(names), dict(rows or {})
        self.location: str = getattr(source, "location", "checkpoint")

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = tuple(self._source.shape(self._stored(name)))
        return (min(shape[0], self._rows[name]), *shape[1:]) if name in self._rows else shape

    def dtype(self, name: str) -> str:
        return self._source.dtype(self._stored(name))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows start:stop along the first axis, float32."""
        if name in self._rows:
            start, stop, _ = slice(start, stop).indices(self.shape(name)[0])
        return self._source.read(self._stored(name), start, stop)

    def read_int(self, name: str) -> np.ndarray:
        """A whole integer tensor, int64."""
        return self._source.read_int(self._stored(name))[: self._rows.get(name)]

    def identity(self) -> str:
        """Of the content and of what is shown of it."""
        shown = [self._source.identity(), sorted(self._names.items()), sorted(self._rows.items())]
        return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:32]

    def _stored(self, name: str) -> str:
        if name not in self._names:
            raise TensorError(f"{self.location}: there is no tensor {name}")
        return self._names[name]
