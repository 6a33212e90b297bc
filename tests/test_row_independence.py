"""A row's logits have the same bits whatever runs beside it, and single operations are right at odd sizes."""

from __future__ import annotations

import functools

import mindspore as ms
import numpy as np
import pytest
from forward import BACKENDS, Forward
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn
from safetensors.torch import load_file, save_file
from tiny import copy_of, tiny_model

from ms_spec.models.ops.interface import Geometry
from ms_spec.models.weights import load_weights
from ms_spec.runtime import graph_thread, setup_mindspore

# heads, KV heads, head_dim, hidden, intermediate, vocab: groups of 1, 3, 8; sizes that are no multiples of 16
SHAPES = {
    "groups of 1, D 16": (4, 4, 16, 64, 96, 160),
    "groups of 3, D 24": (3, 1, 24, 72, 100, 163),
    "groups of 8, D 80": (8, 1, 80, 56, 60, 161),
    "groups of 2, D 128": (4, 2, 128, 40, 72, 177),
}
CASES = [(shape, dtype) for shape in SHAPES for dtype in ("bfloat16", "float32", "float16")]


def ids(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 160, length)


@functools.cache
def made(shape: str, dtype: str, backend: str, max_len: int) -> Forward:
    heads, kv_heads, dim, hidden, inner, vocab = SHAPES[shape]
    path = tiny_model(
        "qwen3", hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=dim, intermediate=inner, vocab=vocab, layers=1
    )
    return Forward(path, backend, dtype, max_len=max_len, requests=4)


def equal(got: np.ndarray, wanted: np.ndarray) -> None:
    assert np.isfinite(wanted).all()
    np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))


def check_beside(model: Forward, length: int, width: int) -> None:
    """Four rows at the end of a context: alone one by one, together, with neighbours, with dead rows, at any place."""
    context, tail = ids(length), ids(4, 1)
    both = np.concatenate([context, tail])
    chunks = [width] * (length // width) + ([length % width] if length % width else [])
    one_by_one = model.run(both, [*chunks, 1, 1, 1, 1], context=0, width=width)
    wanted = one_by_one[length:]
    equal(model.run(both, [*chunks, 4], context=2, width=width)[length:], wanted)

    lengths = (3, 17, length)
    for context_number, other in zip((0, 1, 3), (ids(3, 2), ids(17, 3), context)):
        pieces = [width] * (len(other) // width) + ([len(other) % width] if len(other) % width else [])
        model.run(other, pieces, context=context_number, width=width)
    for place in range(4):
        for rows in (4, 2):
            # The request stands at `place`; the others have 1..4 rows or none at all, and there are dead columns.
            tokens, start, which = np.full((4, 6), -1), np.zeros(4, int), np.full(4, -1)
            tokens[place, :rows], start[place], which[place] = tail[:rows], length, 2
            for i, (other, number) in enumerate(zip([p for p in range(4) if p != place], (0, 1, 3))):
                if (i + place) % 3:
                    tokens[other, : 1 + i], start[other], which[other] = ids(1 + i, 5 + i), lengths[i], number
            equal(model.grid(tokens, start, which)[place, :rows], wanted[:rows])


@pytest.mark.parametrize("shape, dtype", CASES)
def test_neighbours_and_dead_rows(shape, dtype):
    check_beside(made(shape, dtype, "cpu", 64), 37, 16)


@pytest.mark.parametrize("shape", ["groups of 3, D 24", "groups of 8, D 80"])
def test_long_contexts(shape):
    """Rows just before, at and behind the places where the attention kernel begins a new segment of keys."""
    model, all_ids = made(shape, "bfloat16", "cpu", 544), ids(530)
    wanted = model.run(all_ids, [16] * 33 + [1, 1], context=0, width=16)
    for pieces in ([255, *[1] * 8, 1, 246, *[1] * 5, 15], [100] * 5 + [11, 3, 3, 3, 3, 3, 4], [512, 18]):
        equal(model.run(all_ids, pieces, context=1, width=512 if max(pieces) > 100 else 100), wanted)
    check_beside(model, 254, 100)
    check_beside(model, 510, 100)


def test_plain_operations():
    model = made("groups of 3, D 24", "bfloat16", "reference", 48)
    check_beside(model, 21, 16)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_nan_left_in_blocks_harms_nobody(backend):
    """Blocks come back as they are. What a request with NaN left there lies behind the next owner's positions."""
    path = copy_of(tiny_model("llama", layers=1))
    tensors = load_file(path / "model.safetensors")
    for poison in (0, 77):  # 0 is what dead rows carry
        tensors["model.embed_tokens.weight"][poison] = float("nan")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    model, clean = Forward(path, backend, max_len=48), ids(9)
    clean[clean == 77] = 78
    wanted = model.run(clean, [5, 1, 1, 1, 1], context=0, width=16)
    assert np.isnan(model.run(np.full(48, 77), [16] * 3, context=1, width=16)).all()
    equal(model.run(clean, [5, 1, 1, 1, 1], context=1, width=16), wanted)


# Single operations against NumPy in float64


class _Single(nn.Cell):
    """One operation over ``count`` live rows."""

    def __init__(self, cell: nn.Cell, kind: str) -> None:
        super().__init__()
        self.cell, self.kind = cell, kind

    def construct(self, first, second, token, count):
        rows = (token, token, token, token, count, token)
        if self.kind == "embedding":
            return self.cell(rows)
        if self.kind == "linear_add":
            return self.cell(first, second, rows)
        return self.cell(first, rows)


class _Tensors:
    """A checkpoint in memory."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = tensors

    def names(self):
        return list(self.tensors)

    def shape(self, name):
        return self.tensors[name].shape

    def dtype(self, name):
        return "float32"

    def read(self, name, start=0, stop=None):
        return self.tensors[name][start:stop]


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return Tensor(x).astype(ms.bfloat16).astype(ms.float32).asnumpy()
    return x


def expected(kind, x, residual, token, t, eps) -> np.ndarray:
    x, residual = x.astype(np.float64), residual.astype(np.float64)
    t = {name: value.astype(np.float64) for name, value in t.items()}
    if kind == "embedding":
        return t["w.weight"][token]
    if kind == "linear_add":
        return x @ t["w.weight"].T + t.get("w.bias", 0) + residual
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * t["norm.weight"]
    if kind == "norm_linear":
        return x @ t["w.weight"].T + t.get("w.bias", 0)
    gate, up = x @ t["w.weight"].T + t.get("w.bias", 0), x @ t["u.weight"].T + t.get("u.bias", 0)
    return gate / (1 + np.exp(-gate)) * up


def build(kind, backend, out, inner, dtype, t, bias):
    ops = BACKENDS[backend]()
    if kind == "embedding":
        cell = ops.Embedding(out, inner, dtype)
        specs = cell.weights("w.weight")
    elif kind == "linear_add":
        cell = ops.LinearAdd(out, inner, dtype, bias=bias)
        specs = cell.weights("w")
    elif kind == "norm_linear":
        cell = ops.NormLinear(out, inner, 1e-5, dtype, bias=bias)
        specs = cell.weights("norm", "w")
    else:
        cell = ops.NormGatedLinear(out, inner, 1e-5, dtype, bias=bias)
        specs = cell.weights("norm", "w", "u")
    load_weights(specs, _Tensors(t), cache_key=None)
    return _Single(cell, kind)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(["norm_linear", "norm_gated", "linear_add", "embedding"]),
    out=st.integers(1, 70),
    inner=st.integers(1, 70),
    size=st.integers(1, 40),
    dead=st.integers(0, 3),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_linear_operations_at_odd_sizes(kind, out, inner, size, dead, dtype, bias, seed):
    rng = np.random.default_rng(seed)
    t = {"w.weight": rng.normal(size=(out, inner))}
    if kind == "norm_gated":
        t["u.weight"] = rng.normal(size=(out, inner))
    if bias and kind != "embedding":
        t.update({name.replace("weight", "bias"): rng.normal(size=out) for name in list(t)})
    t = {name: value.astype(np.float32) for name, value in t.items()}
    if kind.startswith("norm"):
        t["norm.weight"] = (1 + rng.normal(size=inner) / 4).astype(np.float32)
    x = rng.normal(size=(size + dead, inner)).astype(np.float32)
    residual = rng.normal(size=(size + dead, out)).astype(np.float32)
    token = rng.integers(0, out, size + dead).astype(np.int32)
    held = {name: rounded(value, dtype) if value.ndim == 2 else value for name, value in t.items()}

    def compute():
        setup_mindspore("cpu", eager=True)  # a graph for each shape would take a second
        try:
            cell = build(kind, "cpu", out, inner, dtype, t, bias)
            return cell(*(Tensor(a) for a in (x, residual, token, np.array([size], np.int32)))).asnumpy().copy()
        finally:
            setup_mindspore("cpu")

    got = graph_thread().run(compute)[:size]
    wanted = expected(kind, x, residual, token, held, 1e-5)[:size]
    if kind == "embedding":
        np.testing.assert_array_equal(got, wanted)
    else:
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-5 * max(1.0, np.abs(wanted).max()))


class _Attend(nn.Cell):
    def __init__(self, ops, geometry, max_len, cos, sin):
        super().__init__()
        self.rows = ops.Rows(max_len, geometry.block_size)
        self.attention = ops.Attention(geometry, cos, sin)

    def construct(self, qkv, tokens, start, tables, bounds):
        return self.attention(qkv, self.rows(tokens, start, tables, bounds))


def attention_in_float64(qkv, heads, kv_heads, dim, cos, sin) -> np.ndarray:
    qkv, cos, sin = qkv.astype(np.float64), cos[: len(qkv), None], sin[: len(qkv), None]
    q, k, v = np.split(qkv.reshape(len(qkv), -1, dim), [heads, heads + kv_heads], 1)

    def rotate(x):
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    q, k = rotate(q), np.repeat(rotate(k), heads // kv_heads, 1)
    scores = np.einsum("rhd,thd->hrt", q, k) / np.sqrt(dim)
    scores = np.where(np.tri(len(qkv), dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("hrt,thd->rhd", p, np.repeat(v, heads // kv_heads, 1)).reshape(len(qkv), -1)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    group=st.sampled_from([1, 2, 3, 5, 8, 17, 49]),
    kv_heads=st.integers(1, 3),
    half=st.integers(1, 40),
    length=st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 300, 511, 513]),
    chunk=st.integers(1, 200),
    block=st.sampled_from([16, 32, 128]),
    seed=st.integers(0, 99),
)
def test_attention_at_odd_sizes(group, kv_heads, half, length, chunk, block, seed):
    rng = np.random.default_rng(seed)
    heads, dim = group * kv_heads, 2 * half
    qkv = rng.normal(size=(length, (heads + 2 * kv_heads) * dim)).astype(np.float32)
    angles = rng.uniform(0, 6, (length, half))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    blocks = -(-length // block)
    tables = (1 + rng.permutation(blocks)).astype(np.int32)[None]
    chunk = max(chunk, length // 4)

    def compute():
        setup_mindspore("cpu", eager=True)
        try:
            geometry = Geometry(heads, kv_heads, dim, blocks + 1, block, length, 1e-5, False)
            tables_of = [Parameter(Tensor(x), name=name) for x, name in ((cos, "cos"), (sin, "sin"))]
            cell, out = _Attend(BACKENDS["cpu"](), geometry, length, *tables_of), []
            for at in range(0, length, chunk):
                part = qkv[at : at + chunk]
                inputs = (part, np.full((1, len(part)), 5, np.int32), np.array([at], np.int32), tables)
                out.append(cell(*(Tensor(x) for x in (*inputs, np.ones(1, np.int32)))).asnumpy().copy())
            return np.concatenate(out)
        finally:
            setup_mindspore("cpu")

    got = graph_thread().run(compute)
    wanted = attention_in_float64(qkv, heads, kv_heads, dim, cos, sin)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-5)
