"""Tensor parallelism: which part of a model one of several workers holds. Imports no MindSpore.

Heads, the width of the feed-forward network and the vocabulary are shared out, as much to each worker as to any other.
Where there are fewer key and value heads than workers, several workers hold the same one. The last part of the
vocabulary is padded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from ms_spec.models.config import LayerShape

Shape = TypeVar("Shape", bound=LayerShape)


@dataclass(frozen=True)
class Shard:
    """Worker ``rank`` of ``size``. The default: a model in one piece."""

    rank: int = 0
    size: int = 1

    def span(self, total: int) -> tuple[int, int]:
        """Its part of ``total`` things: the first, and the one behind the last, which may be beyond the end."""
        each = -(-total // self.size)
        return self.rank * each, (self.rank + 1) * each

    def kv_span(self, heads: int) -> tuple[int, int]:
        """Its part of the key and value heads: those that its query heads look at."""
        if heads >= self.size:
            return self.span(heads)
        head = self.rank * heads // self.size
        return head, head + 1


def part(shape: Shape, shard: Shard) -> Shape:
    """The layers as ``shard`` holds them. The vocabulary stays whole: see :mod:`ms_spec.models.ops.parallel`."""
    if shard.size == 1:
        return shape
    first, last = shard.kv_span(shape.num_kv_heads)
    return replace(
        shape,
        num_heads=shape.num_heads // shard.size,
        num_kv_heads=last - first,
        intermediate_size=shape.intermediate_size // shard.size,
    )


def unshared(shape: LayerShape, size: int) -> str | None:
    """The count that ``size`` workers cannot share, such as "num_attention_heads = 9"; None: they share them all."""
    if shape.num_heads % size:
        return f"num_attention_heads = {shape.num_heads}"
    if shape.num_kv_heads % size and size % shape.num_kv_heads:
        return f"num_key_value_heads = {shape.num_kv_heads}"
    if shape.intermediate_size % size:
        return f"intermediate_size = {shape.intermediate_size}"
    return None


def sizes_near(shape: LayerShape, size: int) -> list[int]:
    """The nearest numbers of workers that can share the layers, rising: ``size`` itself, or one below and one above."""
    works = [n for n in range(1, shape.num_heads + 1) if unshared(shape, n) is None]
    if size in works:
        return [size]
    return [*[n for n in works if n < size][-1:], *[n for n in works if n > size][:1]]
