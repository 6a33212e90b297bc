"""The part of a checkpoint that one worker of several holds."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ms_spec.models.checkpoint import Checkpoint

if TYPE_CHECKING:
    from ms_spec.models.config import LayerShape
    from ms_spec.models.parallel import Shard


def sharded(source: Checkpoint, shape: LayerShape, shard: Shard, vocabulary: Mapping[str, int]) -> Checkpoint:
    """``source``, or what ``shard`` holds of it; see :class:`ShardedCheckpoint`."""
    return source if shard.size == 1 else ShardedCheckpoint(source, shape, shard, vocabulary)


class ShardedCheckpoint:
    """A worker's part of each tensor of ``source``, under the same names.

    Matrices that make heads or the width of the feed-forward network are cut by rows, those that take them by columns;
    the latter's biases are zeros but on worker 0, so that a sum over the workers has them once. Whole rows are read
    where columns are cut; nothing else is read that is not held.

    Args:
        source: the whole checkpoint.
        shape: that of its layers.
        shard: the worker.
        vocabulary: tables of the vocabulary that are cut, by the last word of their names, and their numbers of rows.
            The last part is filled up with rows of zeros.
    """

    def __init__(self, source: Checkpoint, shape: LayerShape, shard: Shard, vocabulary: Mapping[str, int]) -> None:
        self._source, self._shard = source, shard
        self.location: str = getattr(source, "location", "checkpoint")
        dim = shape.head_dim
        heads = _times(shard.span(shape.num_heads), dim), shape.num_heads * dim
        kv = _times(shard.kv_span(shape.num_kv_heads), dim), shape.num_kv_heads * dim
        wide = shard.span(shape.intermediate_size), shape.intermediate_size
        self._rows = {"q_proj": heads, "k_proj": kv, "v_proj": kv, "gate_proj": wide, "up_proj": wide}
        self._rows.update({name: (shard.span(rows), rows) for name, rows in vocabulary.items()})
        self._columns = {"o_proj": heads, "down_proj": wide}

    def names(self) -> list[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        whole = tuple(self._source.shape(name))
        cut = self._cut(name)
        if cut is None:
            return whole
        axis, (first, last), total = cut
        if len(whole) <= axis or whole[axis] != total:
            raise ValueError(
                f"{self.location}: tensor {name} {list(whole)} has the wrong shape; the config asks for {total} "
                f"{('rows', 'columns')[axis]}"
            )
        return (*whole[:axis], last - first, *whole[axis + 1 :])

    def dtype(self, name: str) -> str:
        return self._source.dtype(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows start:stop of the part along the first axis, float32."""
        shape, cut = self.shape(name), self._cut(name)
        if shape:
            start, stop, _ = slice(start, stop).indices(shape[0])
        if cut is None:
            values = self._source.read(name, start, stop)
            return np.zeros_like(values) if self._shard.rank and self._is_added(name) else values
        axis, (first, last), total = cut
        if axis == 1:
            return np.ascontiguousarray(self._source.read(name, start, stop)[:, first:last])
        assert stop is not None
        values = self._source.read(name, min(first + start, total), min(first + stop, total))
        short = stop - start - len(values)
        return np.concatenate([values, np.zeros((short, *shape[1:]), np.float32)]) if short else values

    def read_int(self, name: str) -> np.ndarray:
        """A whole integer tensor: none of them is cut."""
        return self._source.read_int(name)

    def identity(self) -> str:
        """Of the content, and of which part it is."""
        part = [self._source.identity(), self._shard.rank, self._shard.size, sorted(self._rows), sorted(self._columns)]
        return hashlib.sha256(json.dumps(part).encode()).hexdigest()[:32]

    def _cut(self, name: str) -> tuple[int, tuple[int, int], int] | None:
        """(axis, part, number there are in all); None: everybody has the whole tensor."""
        module, kind = _words(name)
        if module in self._rows:
            return (0, *self._rows[module])
        return (1, *self._columns[module]) if module in self._columns and kind == "weight" else None

    def _is_added(self, name: str) -> bool:
        """Whether it is a bias of what the workers sum up."""
        module, kind = _words(name)
        return module in self._columns and kind == "bias"


def _times(span: tuple[int, int], width: int) -> tuple[int, int]:
    return span[0] * width, span[1] * width


def _words(name: str) -> tuple[str, str]:
    """``model.layers.0.self_attn.q_proj.weight`` -> ("q_proj", "weight")."""
    match = re.search(r"(?:^|\.)(\w+)\.(weight|bias)$", name)
    return (match[1], match[2]) if match else ("", "")
