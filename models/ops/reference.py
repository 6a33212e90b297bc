"""The same operations in plain MindSpore: any device, slow, and the oracle of the fused kernels.

A matrix product's bits depend on its number of rows, so every product here runs on exactly 16 rows at a time.
"""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_spec.models.ops import plain_rows, plain_sampling, plain_shaping
from ms_spec.models.ops.constants import numbers
from ms_spec.models.ops.interface import Geometry
from ms_spec.models.weights import WeightSpec

CHUNK = 16
SLOT, CONTEXT, HORIZON, LIVE = 6, 7, 8, 9


def _chunked(x: Tensor) -> Tensor:
    """[R, ...] -> [ceil(R/16), 16, ...], padded with zero rows."""
    pad = -x.shape[0] % CHUNK
    if pad:
        x = ops.cat((x, ops.zeros((pad, *x.shape[1:]), x.dtype)), 0)
    return x.reshape(x.shape[0] // CHUNK, CHUNK, *x.shape[1:])


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, K] times weight [N, K] transposed, 16 rows at a time."""
    parts = []
    chunks = _chunked(x)
    for i in range(chunks.shape[0]):
        parts.append(ops.MatMul(transpose_b=True)(chunks[i], weight))
    return ops.cat(parts, 0)[: x.shape[0]]


def _rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return x * ops.rsqrt(ops.mean(x * x, -1, True) + eps) * gamma


def _matrix(name: str, out: int, inner: int) -> Parameter:
    return Parameter(Tensor(np.zeros((1, 1), np.float32)), name=name, requires_grad=False)


def _vector(name: str, size: int, fill: float = 0.0) -> Parameter:
    return Parameter(Tensor(np.full(size, fill, np.float32)), name=name, requires_grad=False)


class Norm(nn.Cell):
    """RMS norm."""

    def __init__(self, size: int, eps: float, tied: Any = None) -> None:
        super().__init__()
        self.size, self.eps, self.tied = size, eps, tied is not None
        self.gamma = _vector("gamma", size, 1.0) if tied is None else tied.norm.gamma

    def weights(self, source: str) -> list[WeightSpec]:
        if self.tied:
            return []
        return [WeightSpec(self.gamma, (self.size,), "vector", "float32", (f"{source}.weight",))]

    def construct(self, x: Tensor, rows: tuple) -> Tensor:
        return _rms_norm(x, self.gamma, self.eps)


class Linear(nn.Cell):
    """x [R, K] -> x W^T (+ b) [R, N], 16 rows at a time."""

    def __init__(self, out: int, inner: int, dtype: str, bias: bool = False, tied: Any = None) -> None:
        super().__init__()
        self.shape, self.dtype, self.tied = (out, inner), dtype, tied is not None
        self.weight = _matrix("weight", out, inner) if tied is None else tied.weight
        self.bias = _vector("bias", out) if bias else None

    def weights(self, *sources: str) -> list[WeightSpec]:
        specs = []
        if not self.tied:
            names = tuple(f"{s}.weight" for s in sources)
            specs.append(WeightSpec(self.weight, self.shape, "rows", "float32", names, round_to=self.dtype))
        if self.bias is not None:
            names = tuple(f"{s}.bias" for s in sources)
            specs.append(WeightSpec(self.bias, self.shape[:1], "vector", "float32", names))
        return specs

    def construct(self, x: Tensor, rows: tuple) -> Tensor:
        y = _matmul(x, self.weight)
        return y if self.bias is None else y + self.bias


class Rows(nn.Cell):
    """Rows stay at their cells; dead ones carry token 0 and write to block 0.

    Own entries: 6 cache slot int32 [R]; 7 slots of each request's whole context int32 [n, B * block_size]; 8 horizon
    int32 [R], the last position that a row sees; 9 live int32 [R], 1 where the row has a token.
    """

    def __init__(self, max_len: int, block_size: int) -> None:
        super().__init__()
        self.max_len, self.block_size = max_len, block_size

    def construct(
        self, tokens: Tensor, start: Tensor, block_tables: Tensor, bounds: Tensor, end: Tensor | None = None
    ) -> tuple:
        n, w = tokens.shape
        grid = start.reshape(n, 1) + ops.arange(w).astype(ms.int32).reshape(1, w)
        live = ops.logical_and(tokens >= 0, grid < (self.max_len if end is None else end.reshape(n, 1)))
        token = ops.select(live, tokens, ops.zeros_like(tokens)).reshape(-1)
        position = ops.select(live, grid, ops.zeros_like(grid))
        block = ops.gather_elements(block_tables, 1, (position // self.block_size).astype(ms.int32))
        slot = block * self.block_size + position % self.block_size
        slot = ops.select(live, slot, ops.zeros_like(slot)).reshape(-1)
        cell = ops.arange(n * w).astype(ms.int32)
        offsets = ops.arange(self.block_size).astype(ms.int32)
        context = (block_tables.expand_dims(-1) * self.block_size + offsets).reshape(n, -1)
        count = ops.full((1,), n * w, dtype=ms.int32)
        position, live = position.reshape(-1), live.reshape(-1).astype(ms.int32)
        return token, position, cell // w, cell, count, block_tables, slot, context, position, live


class Pick(nn.Cell):
    """The last live row of a prefill chunk."""

    def construct(self, x: Tensor, rows: tuple) -> tuple:
        # Positions of a chunk rise, and dead rows carry 0.
        last = ops.argmax(rows[1], 0).astype(ms.int32).reshape(1)
        zero = ops.zeros((1,), ms.int32)
        position = ops.gather(rows[1], last, 0)
        token, slot = ops.gather(rows[0], last, 0), ops.gather(rows[SLOT], last, 0)
        one = zero + 1
        return ops.gather(x, last, 0), (token, position, zero, zero, one, rows[5], slot, rows[CONTEXT], position, one)


class Block(nn.Cell):
    """Rows that see all rows of their request. Dead ones have position 0, which is nobody's last."""

    def construct(self, rows: tuple) -> tuple:
        n = rows[5].shape[0]
        last = ops.amax(rows[1].reshape(n, -1), 1)
        return (*rows[:HORIZON], ops.gather(last, rows[2], 0), *rows[HORIZON + 1 :])


class Embedding(nn.Cell):
    """Rows of the token table."""

    def __init__(self, vocab: int, hidden: int, dtype: str) -> None:
        super().__init__()
        self.shape, self.dtype = (vocab, hidden), dtype
        self.weight = _matrix("weight", vocab, hidden)

    def weights(self, source: str) -> list[WeightSpec]:
        return [WeightSpec(self.weight, self.shape, "rows", "float32", (source,), round_to=self.dtype)]

    def construct(self, rows: tuple) -> Tensor:
        return ops.gather(self.weight, rows[0], 0)


class NormLinear(nn.Cell):
    """RMS norm, then a linear map."""

    def __init__(self, out: int, hidden: int, eps: float, dtype: str, bias: bool = False, tied: Any = None) -> None:
        super().__init__()
        self.norm = Norm(hidden, eps)
        self.linear = Linear(out, hidden, dtype, bias, tied)

    @property
    def weight(self) -> Parameter:
        """The matrix, for others to share."""
        return self.linear.weight

    def weights(self, norm: str, *sources: str) -> list[WeightSpec]:
        return [*self.norm.weights(norm), *self.linear.weights(*sources)]

    def construct(self, x: Tensor, rows: tuple) -> Tensor:
        return self.linear(self.norm(x, rows), rows)


class NormGatedLinear(nn.Cell):
    """RMS norm, then silu(gate) * up."""

    def __init__(self, out: int, hidden: int, eps: float, dtype: str, bias: bool = False) -> None:
        super().__init__()
        self.norm = Norm(hidden, eps)
        self.gate, self.up = Linear(out, hidden, dtype, bias), Linear(out, hidden, dtype, bias)

    def weights(self, norm: str, gate: str, up: str) -> list[WeightSpec]:
        return [*self.norm.weights(norm), *self.gate.weights(gate), *self.up.weights(up)]

    def construct(self, x: Tensor, rows: tuple) -> Tensor:
        x = self.norm(x, rows)
        gate = self.gate(x, rows)
        return gate * ops.sigmoid(gate) * self.up(x, rows)


class LinearAdd(nn.Cell):
    """A linear map added to the residual."""

    def __init__(self, out: int, inner: int, dtype: str, bias: bool = False) -> None:
        super().__init__()
        self.linear = Linear(out, inner, dtype, bias)

    def weights(self, *sources: str) -> list[WeightSpec]:
        return self.linear.weights(*sources)

    def construct(self, x: Tensor, residual: Tensor, rows: tuple) -> Tensor:
        return self.linear(x, rows) + residual


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor) -> Tensor:
    """Pairs (i, i + D/2) of x [R, heads, D] turn by the angles of the row's position."""
    cos, sin = ops.gather(cos, position, 0).expand_dims(1), ops.gather(sin, position, 0).expand_dims(1)
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return ops.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Cell):
    """Norm, rotation, cache write, softmax over the whole context, masked.

    Caches are [blocks * block_size, kv_heads * D].
    """

    def __init__(self, geometry: Geometry, cos: Parameter, sin: Parameter) -> None:
        super().__init__()
        self.g = geometry
        shape = (geometry.num_blocks * geometry.block_size, geometry.num_kv_heads * geometry.head_dim)
        self.k_cache = Parameter(ops.zeros(shape, ms.float32), name="k_cache", requires_grad=False)
        self.v_cache = Parameter(ops.zeros(shape, ms.float32), name="v_cache", requires_grad=False)
        self.q_gamma, self.k_gamma = (_vector(f"{c}_gamma", geometry.head_dim, 1.0) for c in "qk")
        self.heads, self.kv, self.dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
        self.qk_norm, self.eps = geometry.qk_norm, geometry.rms_norm_eps
        self.scale = 1.0 / math.sqrt(geometry.head_dim)
        self.cos, self.sin = cos, sin
        self.write = WriteKV(self)

    def weights(self, q_norm: str, k_norm: str) -> list[WeightSpec]:
        if not self.qk_norm:
            return []
        return [
            WeightSpec(self.q_gamma, (self.dim,), "vector", "float32", (f"{q_norm}.weight",)),
            WeightSpec(self.k_gamma, (self.dim,), "vector", "float32", (f"{k_norm}.weight",)),
        ]

    def writer(self) -> WriteKV:
        """A Cell that fills the same caches."""
        return WriteKV(self)

    def construct(self, qkv: Tensor, rows: tuple) -> Tensor:
        size, heads, kv, dim = qkv.shape[0], self.heads, self.kv, self.dim
        request, context, horizon = rows[2], rows[CONTEXT], rows[HORIZON]
        q = qkv[:, : heads * dim].reshape(size, heads, dim)
        if self.qk_norm:
            q = _rms_norm(q, self.q_gamma, self.eps)
        q = _rotate(q, self.cos, self.sin, rows[1])
        self.write(qkv[:, heads * dim :], rows)

        length = context.shape[1]
        keys_at = ops.arange(length).astype(ms.int32)
        q, horizon, request = _chunked(q), _chunked(horizon), _chunked(request)
        parts = []
        for i in range(q.shape[0]):
            where = ops.gather(context, request[i], 0)  # [16, length]
            keys = ops.gather(self.k_cache, where, 0).reshape(CHUNK, length, kv, dim).transpose(0, 2, 1, 3)
            values = ops.gather(self.v_cache, where, 0).reshape(CHUNK, length, kv, dim).transpose(0, 2, 1, 3)
            scores = ops.BatchMatMul(transpose_b=True)(q[i].reshape(CHUNK, kv, heads // kv, dim), keys) * self.scale
            hidden = keys_at.reshape(1, 1, 1, length) > horizon[i].reshape(CHUNK, 1, 1, 1)
            p = ops.softmax(ops.masked_fill(scores, hidden, -3.0e38), -1)
            # Blocks come as their last owner left them: zero times NaN would spread.
            values = ops.masked_fill(values, hidden.reshape(CHUNK, 1, length, 1), 0.0)
            parts.append(ops.BatchMatMul()(p, values).reshape(CHUNK, heads * dim))
        return ops.cat(parts, 0)[:size]


class WriteKV(nn.Cell):
    """Norm and rotation of keys, cache write. kv is [R, 2 * kv_heads * D]."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.kv, self.dim = attention.kv, attention.dim
        self.qk_norm, self.eps, self.k_gamma = attention.qk_norm, attention.eps, attention.k_gamma
        self.cos, self.sin = attention.cos, attention.sin
        self.k_cache, self.v_cache = attention.k_cache, attention.v_cache

    def construct(self, kv: Tensor, rows: tuple) -> Tensor:
        size, width = kv.shape[0], self.kv * self.dim
        k = kv[:, :width].reshape(size, self.kv, self.dim)
        if self.qk_norm:
            k = _rms_norm(k, self.k_gamma, self.eps)
        k = _rotate(k, self.cos, self.sin, rows[1])
        ops.ScatterUpdate()(self.k_cache, rows[SLOT], k.reshape(size, width))
        ops.ScatterUpdate()(self.v_cache, rows[SLOT], kv[:, width:])
        return rows[4]


class WriteHistory(nn.Cell):
    """Appends committed ids to each request's history. The last column of ``history`` takes what does not fit."""

    def construct(self, history: Parameter, slot: Tensor, start: Tensor, tokens: Tensor, count: Tensor) -> Tensor:
        n, w = tokens.shape
        column = start.reshape(n, 1) + numbers(w).reshape(1, w)
        column = ops.minimum(column, history.shape[1] - 1).astype(ms.int32)
        row = ops.broadcast_to(slot.reshape(n, 1), (n, w))
        ops.ScatterNdUpdate()(history, ops.stack((row, column), -1), tokens)
        return start + count


class ReferenceOps:
    """The plain backend. See :class:`ms_spec.models.ops.interface.Backend`."""

    name = "reference"
    host_bounds = False
    chunks: tuple[int, ...] = (16, 64)  # a graph grows with its rows

    Rows = Rows
    Pick = Pick
    Block = Block
    Embedding = Embedding
    Norm = Norm
    Linear = Linear
    NormLinear = NormLinear
    Head = NormLinear
    NormGatedLinear = NormGatedLinear
    LinearAdd = LinearAdd
    Attention = Attention
    WriteHistory = WriteHistory
    ReadCarry = plain_rows.ReadCarry
    Probs = plain_sampling.Probs
    Match = plain_sampling.Match
    Logprobs = plain_shaping.Logprobs
    Entropy = plain_sampling.Entropy
    Grid = plain_sampling.Grid
    NgramLookup = plain_sampling.NgramLookup
    Stamp = plain_rows.Stamp

    def Argmax(self) -> plain_sampling.Argmax:
        return plain_sampling.Argmax(LIVE)

    def InverseCDF(self) -> plain_sampling.InverseCDF:
        return plain_sampling.InverseCDF(LIVE)

    def TakeRows(self) -> plain_rows.TakeRows:
        return plain_rows.TakeRows(LIVE)

    def fuse(self, layers: list[nn.Cell], total: Any = None) -> list[nn.Cell]:
        return layers

    join = staticmethod(plain_rows.InTurn)

    def AddParts(self) -> plain_rows.AddParts:
        return plain_rows.AddParts()

    def JoinParts(self, size: int, width: int) -> plain_rows.JoinParts:
        return plain_rows.JoinParts(size, width)

    def Writer(self, layers: list[Any]) -> nn.Cell:
        return plain_rows.Writers([layer.attention.writer() for layer in layers])
