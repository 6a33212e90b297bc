"""The decoder layers of drafters whose first layer is fed something else than what it adds to."""

from __future__ import annotations

from mindspore import Parameter, Tensor, nn

from ms_spec.models.config import LayerShape
from ms_spec.models.decoder import DecoderLayer, Layer, geometry_of, rotary
from ms_spec.models.ops.interface import Backend, Geometry
from ms_spec.models.weights import WeightSpec


class FedLayer(Layer):
    """(z [R, inner], residual [R, hidden], rows) -> [R, hidden]: attends to z as it is, and adds to something else."""

    def __init__(
        self,
        shape: LayerShape,
        inner: int,
        backend: Backend,
        geometry: Geometry,
        cos: Parameter,
        sin: Parameter,
        dtype: str,
    ) -> None:
        qkv = backend.Linear(geometry.qkv, inner, dtype, shape.qkv_bias)
        super().__init__(shape, qkv, backend, geometry, cos, sin, dtype)

    def construct(self, z: Tensor, residual: Tensor, rows: tuple) -> Tensor:
        return self.added(z, residual, rows)


class FedLayers(nn.Cell):
    """(z [R, inner], residual [R, hidden], rows) -> [R, hidden]: a :class:`FedLayer`, then plain decoder layers.

    Args:
        shape: of all of them.
        inner: width of z.
        backend: the device operations.
        num_blocks, block_size: the paged KV cache, of the same numbering as the target's.
        max_len: positions that the rotary tables cover.
        dtype: how weights are stored.
    """

    def __init__(
        self,
        shape: LayerShape,
        inner: int,
        backend: Backend,
        num_blocks: int,
        block_size: int,
        max_len: int,
        dtype: str,
    ) -> None:
        super().__init__()
        s = shape
        self.cos, self.sin = rotary(s, max_len)
        geometry = geometry_of(s, num_blocks, block_size, max_len)
        self.first = backend.fuse([FedLayer(s, inner, backend, geometry, self.cos, self.sin, dtype)])[0]
        more = [DecoderLayer(s, backend, geometry, self.cos, self.sin, dtype) for _ in range(1, s.num_layers)]
        self.more = nn.CellList(backend.fuse(more) if more else [])
        self.behind = backend.join(list(self.more)) if more else None

    def weights(self, first: str) -> list[WeightSpec]:
        """``first``: prefix of the first layer; the others are ``layers.1`` and so on."""
        specs = self.first.weights(first)
        for i, layer in enumerate(self.more):
            specs += layer.weights(f"layers.{i + 1}")
        return specs

    def construct(self, z: Tensor, residual: Tensor, rows: tuple) -> Tensor:
        x = self.first(z, residual, rows)
        return x if self.behind is None else self.behind(x, rows)
