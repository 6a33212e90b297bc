"""The operations that drafters are written in, on all three backends, against NumPy: odd grids, dead rows, blocks."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace

import ascend_emulator as emulator
import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from numpy_decoder import RandomCheckpoint, config
from test_ascend_export import DOCUMENTED, FUSED, STRUCTURE, Graph
from test_row_independence import _Tensors

from ms_spec.models.decoder import DecoderLayer
from ms_spec.models.ops.ascend import AscendOps
from ms_spec.models.ops.cpu import CpuOps
from ms_spec.models.ops.interface import Geometry
from ms_spec.models.ops.reference import ReferenceOps
from ms_spec.models.weights import load_weights

BLOCK, BLOCKS, MAX_LEN = 16, 20, 320
HEADS, KV_HEADS, DIM = 6, 2, 32
WIDTH = 2 * KV_HEADS * DIM
TABLES = np.random.default_rng(8).permutation(np.arange(1, 3 * BLOCKS + 1)).reshape(3, BLOCKS).astype(np.int32)
GEOMETRY = Geometry(HEADS, KV_HEADS, DIM, 3 * BLOCKS + 1, BLOCK, MAX_LEN, 1e-5, True)
INF = np.float32(np.inf)
START = [254, 63, 3]
"""Where the grids of three requests begin: right before a segment of keys ends, before a tile does, and early."""


@pytest.fixture(autouse=True)
def eager():
    before = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    ms.set_context(mode=before)


@pytest.fixture(params=["cpu", "reference", "ascend"])
def kit(request) -> SimpleNamespace:
    return make_kit(request.param)


@pytest.fixture(params=["cpu", "reference"])
def exact(request) -> SimpleNamespace:
    """Backends that promise that a row's bits are its own."""
    return make_kit(request.param)


def make_kit(name: str) -> SimpleNamespace:
    if name == "ascend":
        return SimpleNamespace(name=name, ops=AscendOps("float16", emulator), float=np.float16, atol=0.02)
    return SimpleNamespace(
        name=name, ops={"cpu": CpuOps, "reference": ReferenceOps}[name](), float=np.float32, atol=3e-5
    )


def i32(x) -> Tensor:
    return Tensor(np.asarray(x, np.int32))


def make_rows(kit, tokens, start=None, tables=TABLES):
    tokens = np.asarray(tokens)
    start = np.zeros(len(tokens)) if start is None else start
    cell = kit.ops.Rows(MAX_LEN, BLOCK)
    return cell(i32(tokens), i32(start), i32(tables), i32(np.full(tokens.size, tables.shape[1] * BLOCK)))


def to_rows(kit, grid: np.ndarray, rows) -> Tensor:
    """[n, w, H] -> [R, H] in the order of the rows; dead rows hold NaN."""
    cell, live = rows[3].asnumpy(), np.arange(len(rows[3])) < rows[4].asnumpy()[0]
    flat = grid.reshape(len(cell), -1)
    return Tensor(np.where(live[:, None], flat[cell], np.nan).astype(kit.float))


def to_grid(x: Tensor, rows, tokens) -> np.ndarray:
    """[R, H] -> [n, w, H] in the order of the grid; 0 in dead cells."""
    tokens, count = np.asarray(tokens), rows[4].asnumpy()[0]
    out = np.zeros((tokens.size, x.shape[1]), np.float32)
    out[rows[3].asnumpy()[:count]] = x.asnumpy()[:count]
    return np.where(tokens.reshape(-1, 1) >= 0, out, 0).reshape(*tokens.shape, -1)


def same_bits(got: np.ndarray, wanted: np.ndarray) -> None:
    assert np.isfinite(wanted).all()
    np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))


# Norm, Linear

RAGGED = np.array([[5, 6, 7, 8], [9, -1, -1, -1], [-1, 4, -1, 3]])
"""Tokens of three requests: a full one, a short one, one with gaps."""


class Layers:
    """A norm, a linear map with a bias, one that shares the matrix, all with random weights."""

    def __init__(self, kit, out: int, inner: int, dtype: str) -> None:
        rng = np.random.default_rng(0)
        self.norm, self.linear = kit.ops.Norm(inner, 1e-5), kit.ops.Linear(out, inner, dtype, bias=True)
        self.tied = kit.ops.Linear(out, inner, dtype, tied=self.linear)
        assert self.tied.weights("elsewhere") == []
        tensors = {
            "n.weight": 1 + rng.normal(size=inner) / 4,
            **{f"{part}.weight": rng.normal(size=(out // 2, inner)) / 4 for part in "ab"},
            **{f"{part}.bias": rng.normal(size=out // 2) for part in "ab"},
        }
        self.held = {name: value.astype(np.float16).astype(np.float32) for name, value in tensors.items()}
        load_weights([*self.norm.weights("n"), *self.linear.weights("a", "b")], _Tensors(self.held), cache_key=None)

    def __call__(self, x: Tensor, rows) -> tuple[Tensor, Tensor, Tensor]:
        return self.norm(x, rows), self.linear(x, rows), self.tied(x, rows)


@pytest.mark.parametrize("out, inner, dtype", [(36, 48, "float16"), (78, 72, "bfloat16"), (16, 19, "float32")])
def test_norm_and_linear(kit, out, inner, dtype):
    dtype = "float16" if kit.name == "ascend" else dtype  # one dtype throughout
    layers, rows = Layers(kit, out, inner, dtype), make_rows(kit, RAGGED)
    grid = np.random.default_rng(1).normal(size=(3, 4, inner)).astype(np.float16).astype(np.float64)
    normed, mapped, tied = (to_grid(x, rows, RAGGED) for x in layers(to_rows(kit, grid, rows), rows))
    t, live = layers.held, (RAGGED >= 0)[..., None]
    weight = np.concatenate([t["a.weight"], t["b.weight"]])
    if dtype == "bfloat16":
        weight = Tensor(weight).astype(ms.bfloat16).astype(ms.float32).asnumpy()
    product = grid @ weight.T.astype(np.float64)
    wanted = grid / np.sqrt((grid**2).mean(-1, keepdims=True) + 1e-5) * t["n.weight"]
    np.testing.assert_allclose(normed, wanted * live, atol=kit.atol)
    np.testing.assert_allclose(mapped, (product + np.concatenate([t["a.bias"], t["b.bias"]])) * live, atol=kit.atol)
    np.testing.assert_allclose(tied, product * live, atol=kit.atol)


def test_norm_and_linear_keep_a_rows_bits(exact):
    layers = Layers(exact, 70, 72, "bfloat16")
    grid = np.random.default_rng(2).normal(size=(3, 20, 72)).astype(np.float32)
    full = np.ones((3, 20), np.int32)
    rows = make_rows(exact, full)
    together = [to_grid(x, rows, full) for x in layers(to_rows(exact, grid, rows), rows)]
    for tokens in (np.where(np.arange(60).reshape(3, 20) % 7 == 3, 1, -1), np.where(np.arange(20) < 13, full, -1)):
        rows = make_rows(exact, tokens)
        for got, wanted in zip(layers(to_rows(exact, grid, rows), rows), together):
            same_bits(to_grid(got, rows, tokens)[tokens >= 0], wanted[tokens >= 0])
    rows = make_rows(exact, full[:1, :1], tables=TABLES[:1])
    for got, wanted in zip(layers(to_rows(exact, grid[2, 17], rows), rows), together):
        same_bits(got.asnumpy()[0], wanted[2, 17])


# Argmax, TakeRows


def test_argmax(kit):
    vocab = 9000
    logits = np.random.default_rng(3).integers(-50, 50, (3, 4, vocab)).astype(np.float32)
    logits[0, 0, [4095, 4096, 8999]] = 60
    logits[0, 1, [8999, 8192]] = 60
    logits[0, 2, 10:] = -INF
    logits[0, 3] = -INF
    logits[1, 0, 8000] = np.nan
    logits[2, 1, 3] = INF
    tokens = np.where(np.arange(12).reshape(3, 4) == 9, 1, RAGGED)
    rows = make_rows(kit, tokens)
    got = kit.ops.Argmax()(to_rows(kit, logits, rows), rows).asnumpy()
    wanted = np.where(tokens >= 0, logits.argmax(-1), -1)
    wanted[0, 3] = wanted[1, 0] = wanted[2, 1] = -1
    assert got.dtype == np.int32 and wanted[0, :2].tolist() == [4095, 8192]
    np.testing.assert_array_equal(got, wanted)


def test_nothing_is_drawn_for_dead_rows(kit):
    rows = make_rows(kit, RAGGED)
    p = np.random.default_rng(3).uniform(1, 2, (3, 4, 7)).astype(np.float32)
    p[0, 1] = 0
    u = Tensor(np.full((3, 4), 0.999, np.float32))
    got = kit.ops.InverseCDF()(Tensor(to_rows(kit, p, rows).asnumpy().astype(np.float32)), rows, u).asnumpy()
    wanted = np.where(RAGGED >= 0, 6, -1)
    wanted[0, 1] = -1
    np.testing.assert_array_equal(got, wanted)


def test_argmax_of_a_picked_row(kit):
    rows = make_rows(kit, [[3, 4, 5, -1]], tables=TABLES[:1])
    x = np.eye(4, 7)[None]
    picked, one = kit.ops.Pick()(to_rows(kit, x, rows), rows)
    assert kit.ops.Argmax()(picked, one).asnumpy().tolist() == [[2]]


def test_take_rows_between_grids(kit):
    rows = make_rows(kit, RAGGED)
    x = np.random.default_rng(4).normal(size=(3, 4, 24)).astype(kit.float)
    tokens = np.array([[1, -1], [-1, 1], [1, 1]])
    there = np.array([[3, 0], [0, 4], [9, 11]])
    for cells, kept in ((there, 1), (np.array([[5, 0], [0, -1], [12, 8]]), 0)):  # dead, none, none, dead
        to = make_rows(kit, tokens)
        got = to_grid(kit.ops.TakeRows()(to_rows(kit, x, rows), rows, i32(cells), to), to, tokens)
        wanted = x.reshape(12, -1)[np.clip(cells, 0, 11)] * (tokens >= 0)[..., None] * kept
        np.testing.assert_array_equal(got, wanted)
    wide = np.full((3, 5), 1)  # more rows than there were
    to = make_rows(kit, wide)
    got = kit.ops.TakeRows()(to_rows(kit, x, rows), rows, i32(np.full((3, 5), 11)), to)
    np.testing.assert_array_equal(to_grid(got, to, wide), np.broadcast_to(x[2, 3].astype(np.float32), (3, 5, 24)))


# Attention


def angles() -> tuple[np.ndarray, np.ndarray]:
    turn = np.random.default_rng(5).uniform(0, 6, (MAX_LEN, DIM // 2))
    return np.cos(turn).astype(np.float32), np.sin(turn).astype(np.float32)


def gammas() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(6)
    return {f"{x}.weight": (1 + rng.normal(size=DIM) / 4).astype(np.float16).astype(np.float32) for x in "qk"}


def make_attention(kit):
    cell = kit.ops.Attention(GEOMETRY, *(Parameter(Tensor(x), name=f"angle{i}") for i, x in enumerate(angles())))
    load_weights(cell.weights("q", "k"), _Tensors(gammas()), cache_key=None)
    return cell


def turned(x: np.ndarray, gamma: np.ndarray, position: np.ndarray) -> np.ndarray:
    """x [T, heads, D] normed and rotated, in float64."""
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * gamma
    a, b = np.split(x, 2, -1)
    cos, sin = (t[position][:, None].astype(np.float64) for t in angles())
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def full_attention(context: np.ndarray, qkv: np.ndarray, columns: np.ndarray, block: bool) -> np.ndarray:
    """What rows qkv [T, ..] at the given columns behind a context [C, WIDTH] attend to -> [T, heads * D]."""
    position = np.concatenate([np.arange(len(context)), len(context) + columns])
    own = qkv[:, HEADS * DIM :]
    k, v = np.split(np.concatenate([context, own]).astype(np.float64).reshape(-1, 2 * KV_HEADS, DIM), 2, 1)
    q = turned(
        qkv[:, : HEADS * DIM].astype(np.float64).reshape(-1, HEADS, DIM), gammas()["q.weight"], position[len(context) :]
    )
    k = np.repeat(turned(k, gammas()["k.weight"], position), HEADS // KV_HEADS, 1)
    scores = np.einsum("rhd,thd->hrt", q, k) / np.sqrt(DIM)
    horizon = position[len(context) :] if not block else np.full(len(columns), position[-1])
    scores = np.where(position[None] <= horizon[:, None], scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("hrt,thd->rhd", p, np.repeat(v, HEADS // KV_HEADS, 1)).reshape(len(qkv), -1)


def text(kit, size: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(size, width)).astype(np.float16).astype(kit.float)


def fill(kit, attention, lengths) -> list[np.ndarray]:
    """Writes a context for each request, one by one -> [length, WIDTH] each."""
    contexts, write = [text(kit, length, WIDTH, 20 + i) for i, length in enumerate(lengths)], attention.writer()
    for i, context in enumerate(contexts):
        rows = make_rows(kit, np.ones((1, len(context))), tables=TABLES[i : i + 1])
        done = write(Tensor(context), rows)
        assert done.dtype == ms.int32 and done.asnumpy().tolist() == [len(context)]
    return contexts


@pytest.mark.parametrize("block", [False, True])
def test_attention_to_a_block(kit, block):
    """Blocks that cross the borders of cache blocks, key tiles and segments; a short one; one with gaps."""
    attention, start = make_attention(kit), START
    contexts = fill(kit, attention, start)
    grid = text(kit, 12, HEADS * DIM + WIDTH, 7).reshape(3, 4, -1)
    rows = make_rows(kit, RAGGED, start)
    got = to_grid(attention(to_rows(kit, grid, rows), kit.ops.Block()(rows) if block else rows), rows, RAGGED)
    for i in range(3):
        columns = np.arange(np.nonzero(RAGGED[i] >= 0)[0].max() + 1)
        live = RAGGED[i, columns] >= 0
        # In the cache a gap holds what was there before: zeros.
        wanted = full_attention(contexts[i], grid[i, columns] * live[:, None], columns, block)
        np.testing.assert_allclose(got[i, columns[live]], wanted[live], atol=kit.atol)


def test_a_blocks_bits_do_not_depend_on_neighbours(exact):
    attention, start = make_attention(exact), START
    fill(exact, attention, start)
    grid = text(exact, 12, HEADS * DIM + WIDTH, 7).reshape(3, 4, -1)
    tokens = np.array([[1, 1, 1, 1], [1, 1, -1, -1], [1, 1, 1, -1]])
    rows, block = make_rows(exact, tokens, start), exact.ops.Block()
    together = to_grid(attention(to_rows(exact, grid, rows), block(rows)), rows, tokens)
    for i in range(3):
        one = make_rows(exact, tokens[i : i + 1], start[i : i + 1], TABLES[i : i + 1])
        alone = to_grid(attention(to_rows(exact, grid[i], one), block(one)), one, tokens[i : i + 1])
        same_bits(alone[0], together[i])
    # All of a block see the same keys: queries that are the same get the same.
    q = HEADS * DIM
    grid[0, :, :q] = grid[0, 0, :q]
    half = dataclasses.replace(GEOMETRY, qk_norm=False)
    still = exact.ops.Attention(
        half, *(Parameter(Tensor(np.full_like(x, 1 - i)), name=f"still{i}") for i, x in enumerate(angles()))
    )
    got = to_grid(still(to_rows(exact, grid, rows), block(rows)), rows, tokens)[0]
    same_bits(got, np.broadcast_to(got[:1], got.shape).copy())


def test_a_writer_writes_what_attention_writes(kit):
    apart, whole = make_attention(kit), make_attention(kit)
    start, tokens = START, np.array([[1, 1, 1], [1, -1, -1], [1, 1, -1]])
    grid, behind = (text(kit, 9, HEADS * DIM + WIDTH, seed).reshape(3, 3, -1) for seed in (9, 10))
    for attention in (apart, whole):
        fill(kit, attention, start)
    rows = make_rows(kit, tokens, start)
    apart.writer()(to_rows(kit, grid[..., HEADS * DIM :], rows), rows)
    whole(to_rows(kit, grid, rows), rows)
    rows = make_rows(kit, tokens, [at + 1 for at in start])
    same_bits(*(to_grid(attention(to_rows(kit, behind, rows), rows), rows, tokens) for attention in (apart, whole)))
    for name in ("k_cache", "v_cache"):
        a, b = (np.nan_to_num(getattr(attention, name).asnumpy().astype(np.float32)) for attention in (apart, whole))
        assert np.abs(a).max() > 0
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("start", START)
def test_nan_of_a_later_row_does_not_reach_earlier_ones(exact, start):
    grid = text(exact, 10, HEADS * DIM + WIDTH, 11).reshape(1, 10, -1)
    tokens, seen = np.ones((1, 10), int), []
    for poisoned in (False, True):
        attention = make_attention(exact)
        fill(exact, attention, [start])
        grid[0, 7:] = np.nan if poisoned else grid[0, 7:]
        rows = make_rows(exact, tokens, [start], TABLES[:1])
        seen.append(to_grid(attention(to_rows(exact, grid, rows), rows), rows, tokens)[0])
    same_bits(seen[1][:7], seen[0][:7])
    assert np.isnan(seen[1][7:]).all()


@pytest.mark.parametrize("halved", [False, True])
def test_fused_layers_see_blocks_too(halved):
    """In one kernel, or in the two of a layer that workers share: here a single one, who has all of it."""
    kit, c = make_kit("cpu"), config("qwen3")
    geometry = Geometry(c.num_heads, c.num_kv_heads, c.head_dim, 3 * BLOCKS + 1, BLOCK, MAX_LEN, 1e-5, True)
    cos, sin = (Parameter(Tensor(x), name=f"angle{i}") for i, x in enumerate(angles()))
    alone, other = (DecoderLayer(c, kit.ops, geometry, cos, sin, "float32") for _ in range(2))
    (fused,) = kit.ops.fuse([other], kit.ops.AddParts if halved else None)
    checkpoint = RandomCheckpoint("qwen3", alone.weights("x"))
    for layer in (alone, fused):
        load_weights(layer.weights("x"), checkpoint, cache_key=None)
    rows = make_rows(kit, RAGGED, [100, 7, 0])
    x = to_rows(kit, text(kit, 12, c.hidden_size, 12), rows)
    results = [
        to_grid(layer(x, seen), seen, RAGGED) for seen in (rows, kit.ops.Block()(rows)) for layer in (alone, fused)
    ]
    same_bits(results[1], results[0])
    same_bits(results[3], results[2])
    assert np.abs(results[0] - results[2]).max() > 1e-3


@pytest.mark.parametrize("workers, width", [(1, 5), (2, 16), (3, 39), (4, 64)])
def test_workers_parts_are_added_in_their_order(kit, workers, width):
    """In float32, whatever the backend computes in."""
    rows, rng = make_rows(kit, RAGGED), np.random.default_rng(13)
    *parts, residual = (rng.normal(size=(workers + 1, 3, 4, width)) * 10).astype(kit.float)
    stacked = ops.cat([to_rows(kit, part, rows) for part in parts])
    got = to_grid(kit.ops.AddParts()(stacked, to_rows(kit, residual, rows), rows), rows, RAGGED)
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part.astype(np.float32)
    wanted = np.where((RAGGED >= 0)[..., None], total.astype(kit.float) + residual, 0)
    same_bits(got, wanted.astype(np.float32))


@pytest.mark.parametrize("workers, width, all_columns", [(1, 5, 5), (2, 16, 31), (3, 39, 117), (4, 2, 5)])
def test_workers_columns_stand_side_by_side(kit, workers, width, all_columns):
    """The last workers may have nothing but filling."""
    rows, rng = make_rows(kit, RAGGED), np.random.default_rng(14)
    parts = rng.normal(size=(workers, 3, 4, width)).astype(kit.float)
    stacked = ops.cat([to_rows(kit, part, rows) for part in parts])
    got = to_grid(kit.ops.JoinParts(workers, all_columns)(stacked, rows), rows, RAGGED)
    wanted = np.concatenate(list(parts), -1)[..., :all_columns].astype(np.float32)
    same_bits(got, np.where((RAGGED >= 0)[..., None], wanted, 0))


# In one graph


class Chain(nn.Cell):
    """Everything in one graph: two attentions with their writers, and a clock in front and behind."""

    def __init__(self, kit, hidden: int) -> None:
        super().__init__()
        make = kit.ops
        self.grid, self.block = make.Rows(MAX_LEN, BLOCK), make.Block()
        self.take, self.argmax = make.TakeRows(), make.Argmax()
        self.norm, self.first = make.Norm(hidden, 1e-5), make.Linear(HEADS * DIM + WIDTH, hidden, "float16", bias=True)
        self.head = make.Linear(40, HEADS * DIM, "float16")
        angle = [Parameter(Tensor(x), name=f"angle{i}") for i, x in enumerate(angles())]
        self.attentions = nn.CellList([make.Attention(GEOMETRY, *angle) for _ in range(2)])
        self.writers = nn.CellList([attention.writer() for attention in self.attentions])
        self.before, self.behind = make.Stamp(), make.Stamp()

    def weights(self):
        specs = [*self.norm.weights("n"), *self.first.weights("a"), *self.head.weights("b")]
        for attention in self.attentions:
            specs += attention.weights("q", "k")
        return specs

    def construct(self, x, tokens, start, tables, bounds, cells, taken, taken_bounds):
        tokens, began = self.before(tokens)
        rows = self.grid(tokens, start, tables, bounds)
        x = self.first(self.norm(x, rows), rows)
        for write in self.writers:
            write(x[:, HEADS * DIM :], rows)
        to = self.grid(taken, start, tables, taken_bounds)
        x = self.take(x, rows, cells, to)
        seen = self.block(to)
        y = self.attentions[0](x, seen) + self.attentions[1](x, seen)
        token = self.argmax(self.head(y, to), to)
        token, ended = self.behind(token)
        return ops.cat((token.reshape(-1), began, ended))


def chain(kit) -> tuple[Chain, list[Tensor]]:
    rng = np.random.default_rng(13)
    cell, hidden = Chain(kit, 32), 32
    shapes = {"n.weight": (hidden,), "a.weight": (HEADS * DIM + WIDTH, hidden), "b.weight": (40, HEADS * DIM)}
    shapes["a.bias"] = shapes["a.weight"][:1]
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    load_weights(cell.weights(), _Tensors({**tensors, **gammas()}), cache_key=None)
    taken, bounds = np.array([[1, 1], [1, -1], [-1, -1]]), BLOCKS * BLOCK
    inputs = [Tensor(rng.normal(size=(12, hidden)).astype(kit.float))]
    inputs += [i32(x) for x in (RAGGED, [30, 0, 9], TABLES, np.full(12, bounds))]
    return cell, inputs + [i32(x) for x in ([[3, 1], [4, 0], [0, 0]], taken, np.full(6, bounds))]


def test_all_in_one_graph(exact):
    tokens = []
    for mode in (ms.PYNATIVE_MODE, ms.GRAPH_MODE):
        ms.set_context(mode=mode)
        cell, inputs = chain(exact)
        for _ in range(2):
            before = time.clock_gettime(time.CLOCK_MONOTONIC)
            token, began, ended = np.split(cell(*inputs).asnumpy().copy(), [6, 8])
            after = time.clock_gettime(time.CLOCK_MONOTONIC)
            tokens.append(token.reshape(3, 2))
            times = [before % 2**31, *(int(t[0]) + int(t[1]) / 1e9 for t in (began, ended)), after % 2**31]
            if exact.name == "cpu":
                assert times == sorted(times) and times[1] < times[2], times
            else:
                assert (began == 0).all() and (ended == 0).all()
    assert (tokens[0][:2, 0] >= 0).all() and (tokens[0][1:, 1] == -1).all() and (tokens[0][2] == -1).all()
    for token in tokens[1:]:
        np.testing.assert_array_equal(token, tokens[0])
    for attention in cell.attentions:  # nobody asked for what the writers return
        assert np.abs(attention.v_cache.asnumpy()).max() > 0


def test_stamps_are_not_merged_and_hand_on_any_shape():
    class Twice(nn.Cell):
        def __init__(self):
            super().__init__()
            self.one, self.two = CpuOps().Stamp(), CpuOps().Stamp()

        def construct(self, x):
            return self.one(x), self.two(x)

    ms.set_context(mode=ms.GRAPH_MODE)
    x = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    (a, first), (b, second) = Twice()(Tensor(x))
    np.testing.assert_array_equal(a.asnumpy(), x)
    np.testing.assert_array_equal(b.asnumpy(), x)
    assert first.asnumpy().tolist() < second.asnumpy().tolist()


def test_exported_for_ascend_they_are_documented_operators(tmp_path):
    cell, inputs = chain(SimpleNamespace(name="ascend", ops=AscendOps("float16"), float=np.float16))
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.export(cell, *inputs, file_name=str(tmp_path / "chain"), file_format="MINDIR")
    graph = Graph(tmp_path / "chain.mindir")
    assert graph.count["ReshapeAndCache"] == 4 and graph.count["FusedInferAttentionScore"] == 2
    known = STRUCTURE | FUSED | DOCUMENTED
    assert set(graph.count) <= known, set(graph.count) - known
