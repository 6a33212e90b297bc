"""The operations for Ascend NPUs, on the fused operators that MindSpore offers there.

Rows are not compacted: row i is cell i of the [n, w] grid, and a dead row (no token, or beyond max_len) embeds token 0,
writes to slot 0 of the null block and attends to that slot alone. Entries of ``rows`` beyond the common six:

====  ========  ===============================================================================================
 6    bounds    int32 [R], the graph's input: from 1 to B * block_size, for a live row at least its horizon + 1
 7    slots     int32 [R], where each row's key and value go in the cache, counted in tokens
 8    mask      uint8, 1 = discard: [R, 1, B * block_size], or [1, 1, R, B * block_size] for a prefill chunk
 9    tables    int32 [R, B], each row's block table (zeros for dead rows)
10    live      int32 [R], 1 where the row has a token
====  ========  ===============================================================================================

**Decode** (w <= 16): each row is one batch entry of FusedInferAttentionScore with one query token, the form for which
MindSpore documents paged caches. A kernel launch reads the lengths on the host, so they are upper bounds that the host
knows before the launch; a mask computed once per step from the true horizons (a row's own position, or its request's
last one after ``Block``) hides what lies between. **Prefill**
(n = 1, w > 16): the request's keys and values are gathered by its block table, and one batch entry of w query tokens
attends to them under an explicit mask.

Weights, caches and activations are bfloat16 or float16 (float32 is stored as bfloat16: fused attention takes no
float32); rotation and sampling run in float32.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import auto_generate

from ms_spec.models.ops import plain_rows, plain_sampling, plain_shaping
from ms_spec.models.ops.constants import numbers
from ms_spec.models.ops.interface import Geometry
from ms_spec.models.ops.limits import DTYPES, MAX_WIDTH, storage_dtype
from ms_spec.models.ops.reference import WriteHistory
from ms_spec.models.weights import WeightSpec

_log = logging.getLogger("ms_spec")
BOUNDS, SLOTS, MASK, TABLES, LIVE = 6, 7, 8, 9, 10


class AscendKernels:
    """The fused operators that the backend calls. A test hands over its own object to run without an NPU."""

    FusedInferAttentionScore = auto_generate.FusedInferAttentionScore
    ReshapeAndCache = auto_generate.ReshapeAndCache
    RmsNorm = auto_generate.RmsNorm
    Swiglu = auto_generate.Swiglu


def _mask(horizon: Tensor, span: int, chunk: bool) -> Tensor:
    """uint8, 1 where a row [R] must not look among ``span`` positions, in the form that its kernel takes."""
    rows = horizon.shape[0]
    hidden = (numbers(span).reshape(1, span) > horizon.reshape(rows, 1)).astype(ms.uint8)
    return hidden.reshape(1, 1, rows, span) if chunk else hidden.reshape(rows, 1, span)


class Rows(nn.Cell):
    """Lays the grid out as rows and computes once what all layers share: slots, block tables and the mask."""

    def __init__(self, max_len: int, block_size: int):
        super().__init__()
        self.max_len = max_len
        self.block_size = block_size

    def construct(self, tokens, start, block_tables, bounds, end=None):
        n, w = tokens.shape
        if w > MAX_WIDTH and n > 1:
            raise ValueError("a prefill chunk belongs to one request")
        blocks = block_tables.shape[1]
        span = blocks * self.block_size
        column = numbers(w).reshape(1, w)
        position = start.reshape(n, 1) + column
        before = position < (self.max_len if end is None else end.reshape(n, 1))
        live = ops.logical_and(tokens >= 0, before).astype(ms.int32)
        token = (tokens * live).reshape(n * w)
        position = (position * live).reshape(n * w)
        tables = (block_tables.reshape(n, 1, blocks) * live.reshape(n, w, 1)).reshape(n * w, blocks)
        live = live.reshape(n * w)
        cell = numbers(n * w)
        request = ops.broadcast_to(numbers(n).reshape(n, 1), (n, w)).reshape(n * w)
        count = Tensor(np.array([n * w], np.int32))
        block = ops.floor_div(position, self.block_size)
        offset = position - block * self.block_size
        first = ops.gather_elements(tables, 1, block.reshape(n * w, 1)).reshape(n * w)
        slots = first * self.block_size + offset
        mask = _mask(position, span, w > MAX_WIDTH)
        return (token, position, request, cell, count, block_tables, bounds, slots, mask, tables, live)


class Block(nn.Cell):
    """Rows that see all rows of their request. Dead ones keep to slot 0 of the null block."""

    def construct(self, rows):
        n, span = rows[5].shape[0], rows[MASK].shape[-1]
        horizon = ops.gather(ops.amax(rows[1].reshape(n, -1), 1), rows[2], 0) * rows[LIVE]
        return (*rows[:MASK], _mask(horizon, span, rows[MASK].ndim == 4), *rows[MASK + 1 :])


class Linear(nn.Cell):
    """x [R, K] -> x W^T + b [R, N], W held as [N, K]."""

    def __init__(self, out: int, inner: int, dtype: str, bias: bool, tied: Any = None):
        super().__init__()
        self.shape, self.dtype, self.tied = (out, inner), dtype, tied is not None
        self.weight = _parameter("weight", (out, inner), dtype) if tied is None else tied.weight
        self.bias = _parameter("bias", (out,), dtype) if bias else None
        self.matmul = ops.MatMul(transpose_b=True)

    def weights(self, *sources: str) -> list[WeightSpec]:
        specs = []
        if not self.tied:
            names = tuple(f"{s}.weight" for s in sources)
            specs.append(WeightSpec(self.weight, self.shape, "rows", self.dtype, names))
        if self.bias is not None:
            specs.append(_vector(self.bias, self.shape[0], self.dtype, *(f"{s}.bias" for s in sources)))
        return specs

    def construct(self, x, rows):
        y = self.matmul(x, self.weight)
        return y if self.bias is None else y + self.bias


class Norm(nn.Cell):
    """RMS norm over the last dimension."""

    def __init__(self, size: int, eps: float, dtype: str, kernels: Any, tied: Any = None):
        super().__init__()
        self.size, self.dtype, self.tied = size, dtype, tied is not None
        self.gamma = _parameter("gamma", (size,), dtype) if tied is None else tied.norm.gamma
        self.rms_norm = kernels.RmsNorm(eps)

    def weights(self, source: str) -> list[WeightSpec]:
        if self.tied:
            return []
        return [_vector(self.gamma, self.size, self.dtype, f"{source}.weight")]

    def construct(self, x, rows):
        return self.rms_norm(x, self.gamma)[0]


class Embedding(nn.Cell):
    """One row of the table per token."""

    def __init__(self, vocab: int, hidden: int, dtype: str):
        super().__init__()
        self.shape, self.dtype = (vocab, hidden), dtype
        self.weight = _parameter("weight", (vocab, hidden), dtype)
        self.gather = ops.Gather()

    def weights(self, source: str) -> list[WeightSpec]:
        return [WeightSpec(self.weight, self.shape, "rows", self.dtype, (source,))]

    def construct(self, rows):
        return self.gather(self.weight, rows[0], 0)


class NormLinear(nn.Cell):
    """RMS norm, then a linear map."""

    def __init__(self, out: int, hidden: int, eps: float, dtype: str, bias: bool, tied: Any, kernels: Any):
        super().__init__()
        self.norm = Norm(hidden, eps, dtype, kernels)
        self.linear = Linear(out, hidden, dtype, bias, tied)

    @property
    def weight(self) -> Parameter:
        """The matrix, for others to share."""
        return self.linear.weight

    def weights(self, norm: str, *sources: str) -> list[WeightSpec]:
        return self.norm.weights(norm) + self.linear.weights(*sources)

    def construct(self, x, rows):
        return self.linear(self.norm(x, rows), rows)


class NormGatedLinear(nn.Cell):
    """RMS norm, then silu(gate) * up; the weights of gate and up stand in one matrix."""

    def __init__(self, out: int, hidden: int, eps: float, dtype: str, bias: bool, kernels: Any):
        super().__init__()
        self.norm = Norm(hidden, eps, dtype, kernels)
        self.linear = Linear(2 * out, hidden, dtype, bias)
        self.swiglu = kernels.Swiglu()

    def weights(self, norm: str, gate: str, up: str) -> list[WeightSpec]:
        return self.norm.weights(norm) + self.linear.weights(gate, up)

    def construct(self, x, rows):
        return self.swiglu(self.linear(self.norm(x, rows), rows), -1)


class LinearAdd(nn.Cell):
    """A linear map added to the residual."""

    def __init__(self, out: int, inner: int, dtype: str, bias: bool):
        super().__init__()
        self.linear = Linear(out, inner, dtype, bias)

    def weights(self, *sources: str) -> list[WeightSpec]:
        return self.linear.weights(*sources)

    def construct(self, x, residual, rows):
        return residual + self.linear(x, rows)


def _rotate(x, cos, sin):
    """Pairs (i, i + D/2) of x [R, heads, D] turn by the row's angles cos, sin float32 [R, 1, D/2]."""
    half = x.shape[-1] // 2
    wide = x.astype(ms.float32)
    a = wide[:, :, :half]
    b = wide[:, :, half:]
    return ops.cat((a * cos - b * sin, b * cos + a * sin), -1).astype(x.dtype)


class Attention(nn.Cell):
    """Rotates, caches and attends. Caches are [blocks, block_size, kv_heads * head_dim] and start at zero."""

    def __init__(self, geometry: Geometry, cos: Parameter, sin: Parameter, dtype: str, kernels: Any):
        super().__init__()
        g = geometry
        self.heads, self.kv_heads, self.dim = g.num_heads, g.num_kv_heads, g.head_dim
        self.cos, self.sin = cos, sin
        self.qk_norm = g.qk_norm
        if g.qk_norm:
            self.q_norm = Norm(g.head_dim, g.rms_norm_eps, dtype, kernels)
            self.k_norm = Norm(g.head_dim, g.rms_norm_eps, dtype, kernels)
        cache = (g.num_blocks, g.block_size, g.num_kv_heads * g.head_dim)
        self.k_cache = _parameter("k_cache", cache, dtype)
        self.v_cache = _parameter("v_cache", cache, dtype)
        self.gather = ops.Gather()
        self.write = kernels.ReshapeAndCache()
        common = {
            "num_heads": g.num_heads,
            "num_key_value_heads": g.num_kv_heads,
            "scale_value": 1 / math.sqrt(g.head_dim),
            "input_layout": "BSH",
        }
        # Row correction (2) is advised with a mask of one's own, and exists only for more than one query token.
        self.attend_rows = kernels.FusedInferAttentionScore(inner_precise=0, block_size=g.block_size, **common)
        self.attend_chunk = kernels.FusedInferAttentionScore(inner_precise=2, sparse_mode=0, **common)

    def weights(self, q_norm: str, k_norm: str) -> list[WeightSpec]:
        return self.q_norm.weights(q_norm) + self.k_norm.weights(k_norm) if self.qk_norm else []

    def writer(self) -> WriteKV:
        """A Cell that fills the same caches."""
        return WriteKV(self)

    def construct(self, qkv, rows):
        count = qkv.shape[0]
        q_end = self.heads * self.dim
        k_end = q_end + self.kv_heads * self.dim
        q = qkv[:, :q_end].reshape(count, self.heads, self.dim)
        k = qkv[:, q_end:k_end].reshape(count, self.kv_heads, self.dim)
        v = qkv[:, k_end:]
        if self.qk_norm:
            q = self.q_norm(q, rows)
            k = self.k_norm(k, rows)
        cos = self.gather(self.cos, rows[1], 0).expand_dims(1)
        sin = self.gather(self.sin, rows[1], 0).expand_dims(1)
        q = _rotate(q, cos, sin)
        k = _rotate(k, cos, sin)
        self.write(k.reshape(count, self.kv_heads * self.dim), v, self.k_cache, self.v_cache, rows[SLOTS])
        if rows[MASK].ndim == 3:
            return self.decode(q.reshape(count, 1, q_end), rows).reshape(count, q_end)
        return self.prefill(q.reshape(1, count, q_end), rows).reshape(count, q_end)

    def decode(self, q, rows):
        """q [R, 1, H]: R batch entries over the paged cache."""
        return self.attend_rows(
            q, (self.k_cache,), (self.v_cache,), None, rows[MASK], None, rows[BOUNDS],
            None, None, None, None, None, None, None, rows[TABLES],
        )[0]  # fmt: skip

    def prefill(self, q, rows):
        """q [1, w, H]: one batch entry over the request's keys, gathered into one piece."""
        blocks = rows[5].reshape(-1)
        k = self.gather(self.k_cache, blocks, 0).reshape(1, -1, self.kv_heads * self.dim)
        v = self.gather(self.v_cache, blocks, 0).reshape(1, -1, self.kv_heads * self.dim)
        return self.attend_chunk(q, (k,), (v,), None, rows[MASK])[0]


class WriteKV(nn.Cell):
    """Norms, rotates and caches keys, caches values. kv is [R, 2 * kv_heads * head_dim]."""

    def __init__(self, attention: Attention):
        super().__init__()
        self.kv_heads, self.dim, self.qk_norm = attention.kv_heads, attention.dim, attention.qk_norm
        if self.qk_norm:
            self.k_norm = attention.k_norm
        self.cos, self.sin = attention.cos, attention.sin
        self.k_cache, self.v_cache = attention.k_cache, attention.v_cache
        self.gather, self.write = attention.gather, attention.write

    def construct(self, kv, rows):
        count, width = kv.shape[0], self.kv_heads * self.dim
        k = kv[:, :width].reshape(count, self.kv_heads, self.dim)
        if self.qk_norm:
            k = self.k_norm(k, rows)
        cos = self.gather(self.cos, rows[1], 0).expand_dims(1)
        sin = self.gather(self.sin, rows[1], 0).expand_dims(1)
        k = _rotate(k, cos, sin).reshape(count, width)
        self.write(k, kv[:, width:], self.k_cache, self.v_cache, rows[SLOTS])
        return rows[4]


class Pick(nn.Cell):
    """The last live row of a prefill chunk, as a grid of one cell."""

    def __init__(self):
        super().__init__()
        self.gather = ops.Gather()

    def construct(self, x, rows):
        last = ops.ReduceSum(True)(rows[LIVE].astype(ms.float32), 0).astype(ms.int32) - 1
        last = ops.maximum(last, 0)
        zero = Tensor(np.zeros(1, np.int32))
        one = Tensor(np.ones(1, np.int32))
        token = self.gather(rows[0], last, 0)
        position = self.gather(rows[1], last, 0)
        return self.gather(x, last, 0), (token, position, zero, zero, one, rows[5])


class InFloat32(nn.Cell):
    """Hands the first argument (logits, say) to a Cell that computes in float32."""

    def __init__(self, cell: nn.Cell):
        super().__init__()
        self.cell = cell

    def construct(self, x, *rest):
        return self.cell(x.astype(ms.float32), *rest)


class AscendOps:
    """The backend for Ascend NPUs. See :class:`ms_spec.models.ops.interface.Backend` for the operations.

    ``dtype`` is that of weights, caches and activations; None: that of the first operation built. ``kernels`` is an
    object like ``AscendKernels``.
    """

    name = "ascend"
    host_bounds = True
    chunks: tuple[int, ...] = (64, 512)

    def __init__(self, dtype: str | None = None, kernels: Any = AscendKernels):
        self.dtype = ""
        self.kernels = kernels
        if dtype is not None:
            self._stored(dtype)

    def _stored(self, dtype: str) -> str:
        stored, note = storage_dtype(dtype)
        if stored not in DTYPES:
            raise ValueError(f"dtype={dtype!r}: on Ascend {' or '.join(DTYPES)} are supported; use 'bfloat16'")
        if not self.dtype:
            self.dtype = stored
            if note:
                _log.warning(note)
        if stored != self.dtype:
            raise ValueError(f"dtype={dtype!r}: these operations were set up for {self.dtype!r}; use one throughout")
        return stored

    def _known(self) -> str:
        if not self.dtype:
            raise ValueError("dtype: not known yet; give one to AscendOps, or build an operation with weights first")
        return self.dtype

    def Rows(self, max_len: int, block_size: int) -> Rows:
        return Rows(max_len, block_size)

    def Embedding(self, vocab: int, hidden: int, dtype: str) -> Embedding:
        return Embedding(vocab, hidden, self._stored(dtype))

    def Norm(self, size: int, eps: float, tied: Any = None) -> Norm:
        return Norm(size, eps, self._known(), self.kernels, tied)

    def Linear(self, out: int, inner: int, dtype: str, bias: bool = False, tied: Any = None) -> Linear:
        return Linear(out, inner, self._stored(dtype), bias, tied)

    def fuse(self, layers: list[nn.Cell], total: Any = None) -> list[nn.Cell]:
        return layers

    join = staticmethod(plain_rows.InTurn)

    def AddParts(self) -> plain_rows.AddParts:
        return plain_rows.AddParts()

    def JoinParts(self, size: int, width: int) -> plain_rows.JoinParts:
        return plain_rows.JoinParts(size, width)

    def Writer(self, layers: list[Any]) -> nn.Cell:
        return plain_rows.Writers([layer.attention.writer() for layer in layers])

    def NormLinear(
        self, out: int, hidden: int, eps: float, dtype: str, bias: bool = False, tied: Any = None
    ) -> NormLinear:
        return NormLinear(out, hidden, eps, self._stored(dtype), bias, tied, self.kernels)

    def Head(self, out: int, hidden: int, eps: float, dtype: str, bias: bool = False, tied: Any = None) -> Any:
        return self.NormLinear(out, hidden, eps, dtype, bias, tied)

    def NormGatedLinear(self, out: int, hidden: int, eps: float, dtype: str, bias: bool = False) -> NormGatedLinear:
        return NormGatedLinear(out, hidden, eps, self._stored(dtype), bias, self.kernels)

    def LinearAdd(self, out: int, inner: int, dtype: str, bias: bool = False) -> LinearAdd:
        return LinearAdd(out, inner, self._stored(dtype), bias)

    def Attention(self, geometry: Geometry, cos: Parameter, sin: Parameter) -> Attention:
        return Attention(geometry, cos, sin, self._known(), self.kernels)

    def Pick(self) -> Pick:
        return Pick()

    def Block(self) -> Block:
        return Block()

    def TakeRows(self) -> plain_rows.TakeRows:
        return plain_rows.TakeRows(LIVE)

    def Stamp(self) -> plain_rows.Stamp:
        return plain_rows.Stamp()

    def ReadCarry(self) -> plain_rows.ReadCarry:
        return plain_rows.ReadCarry()

    def WriteHistory(self) -> WriteHistory:
        return WriteHistory()

    def Match(self, width: int) -> InFloat32:
        return InFloat32(plain_sampling.Match(width))

    def Logprobs(self, most: int, column: int) -> InFloat32:
        return InFloat32(plain_shaping.Logprobs(most, column))

    def Probs(self) -> InFloat32:
        return InFloat32(plain_sampling.Probs())

    def Argmax(self) -> InFloat32:
        return InFloat32(plain_sampling.Argmax(LIVE))

    def InverseCDF(self) -> plain_sampling.InverseCDF:
        return plain_sampling.InverseCDF(LIVE)

    def Entropy(self) -> InFloat32:
        return InFloat32(plain_sampling.Entropy())

    def Grid(self) -> InFloat32:
        return InFloat32(plain_sampling.Grid())

    def NgramLookup(self, min_n: int, max_n: int, num_drafts: int) -> plain_sampling.NgramLookup:
        return plain_sampling.NgramLookup(min_n, max_n, num_drafts)


def _parameter(name: str, shape: tuple[int, ...], dtype: str) -> Parameter:
    return Parameter(Tensor(np.zeros(shape, np.float32), getattr(ms, dtype)), name=name, requires_grad=False)


def _vector(parameter: Parameter, size: int, dtype: str, *sources: str) -> WeightSpec:
    """In the activations' dtype: RmsNorm wants x and gamma alike, and an Add of two dtypes is one kernel more."""
    return WeightSpec(parameter, (size,), "vector", dtype, sources)
