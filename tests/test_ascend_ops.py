"""The Ascend operations, on emulated operators, against a NumPy transformer that knows no cache, block or bucket."""

from __future__ import annotations

import ascend_emulator as emulator
import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor
from numpy_decoder import THETA, RandomCheckpoint, config, oracle

from ms_spec.models.config import RopeConfig
from ms_spec.models.decoder import Decoder
from ms_spec.models.ops.ascend import BOUNDS, MASK, SLOTS, TABLES, AscendOps
from ms_spec.models.ops.interface import Geometry
from ms_spec.models.ops.limits import storage_dtype
from ms_spec.models.rope import rope_tables
from ms_spec.models.weights import load_weights

BLOCK, MAX_LEN, NUM_BLOCKS = 16, 96, 24
GARBAGE = 2.0
"""What the caches hold before the first write: a key that is wrongly attended to shows."""


pytestmark = pytest.mark.usefixtures("eager")


def build(family: str) -> tuple[Decoder, dict[str, np.ndarray]]:
    """A decoder with random weights, and the same weights under their checkpoint names."""
    net = Decoder(config(family), AscendOps(None, emulator), NUM_BLOCKS, BLOCK, MAX_LEN, "float16")
    checkpoint = RandomCheckpoint(family, net.weights())
    load_weights(net.weights(), checkpoint, cache_key=None)
    for layer in net.layers:
        for cache in (layer.attention.k_cache, layer.attention.v_cache):
            assert cache.dtype == ms.float16
            cache.set_data(Tensor(np.full(cache.shape, GARBAGE, np.float16)))
    return net, {name: value.astype(np.float64) for name, value in checkpoint.tensors.items()}


def i32(array) -> Tensor:
    return Tensor(np.array(array, np.int32))


def grid(works: list[tuple[list[int], int]], n: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    tokens, start = np.full((n, width), -1), np.zeros(n)
    for i, (given, first) in enumerate(works):
        tokens[i, : len(given)] = given
        start[i] = first
    return tokens, start


def prefill(net: Decoder, prompt: list[int], table: list[int], width: int) -> np.ndarray:
    """Runs the prompt in chunks of ``width``; returns the logits of its last token."""
    for first in range(0, len(prompt), width):
        tokens, start = grid([(prompt[first : first + width], first)], 1, width)
        bounds = np.minimum(first + np.arange(width) + 1, len(table) * BLOCK)
        rows = net.rows(i32(tokens), i32(start), i32([table]), i32(bounds))
        x = net(rows)[-1]
        picked, rows = AscendOps("float16").Pick()(x, rows)
    assert rows[1].asnumpy().tolist() == [len(prompt) - 1] and rows[0].asnumpy().tolist() == [prompt[-1]]
    return net.head(picked, rows).asnumpy().astype(np.float32)


# Blocks in no order, shared by nobody; 0 where a request needs none.
TABLES_OF = [[5, 1, 17, 8, 0, 0], [2, 20, 3, 0, 0, 0], [9, 4, 0, 0, 0, 0]]
LENGTHS = [47, 31, 3]
DRAFTS = [4, 1, 0]
USED = {b for t in TABLES_OF for b in t}


@pytest.mark.parametrize("chunk", [32, 16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_chunked_prefill_and_ragged_decode_equal_numpy(family, chunk):
    net, weights = build(family)
    rng = np.random.default_rng(3)
    texts = [rng.integers(1, 97, size + 1 + drafts).tolist() for size, drafts in zip(LENGTHS, DRAFTS)]
    wanted = [oracle(family, weights, text) for text in texts]
    for text, size, table, (logits, _, _) in zip(texts, LENGTHS, TABLES_OF, wanted):
        got = prefill(net, text[:size], table, chunk)
        np.testing.assert_allclose(got[0], logits[size - 1], atol=0.03)

    # n = 3 requests in a bucket of 4; lengths are upper bounds, some by a few tokens and some by all there is.
    width = 5
    tokens, start = grid([(text[size:], size) for text, size in zip(texts, LENGTHS)], 4, width)
    tables = np.array([*TABLES_OF, [0] * 6])
    bounds = np.minimum(start[:, None] + np.arange(width) + 1 + np.array([[0], [7], [96], [0]]), 96).reshape(-1)
    rows = net.rows(i32(tokens), i32(start), i32(tables), i32(bounds))
    logits = net.head(net(rows)[-1], rows).asnumpy().astype(np.float32).reshape(4, width, -1)
    assert np.isfinite(logits).all()
    for i, (size, drafts) in enumerate(zip(LENGTHS, DRAFTS)):
        np.testing.assert_allclose(logits[i, : drafts + 1], wanted[i][0][size:], atol=0.03)

    for number, layer in enumerate(net.layers):
        for cache, which in ((layer.attention.k_cache, 1), (layer.attention.v_cache, 2)):
            held = cache.asnumpy().astype(np.float32)
            for i, table in enumerate(TABLES_OF):
                lines, length = held[table].reshape(-1, 64), len(texts[i])
                np.testing.assert_allclose(lines[:length], wanted[i][which][number], atol=0.02)
                owned = sum(b > 0 for b in table) * BLOCK
                assert (lines[length:owned] == GARBAGE).all()
            assert (held[[b for b in range(1, NUM_BLOCKS) if b not in USED]] == GARBAGE).all()
            assert (held[0, 1:] == GARBAGE).all()


def test_rows_place_every_cell():
    tokens = i32([[7, 8, -1], [9, 9, 9], [-1, -1, -1]])
    tables = i32([[3, 4, 0, 0, 0, 0], [1, 2, 5, 6, 7, 8], [0] * 6])
    bounds = i32([20, 17, 1, 96, 96, 96, 1, 1, 1])
    rows = AscendOps().Rows(MAX_LEN, BLOCK)(tokens, i32([15, 94, 0]), tables, bounds)
    token, position, request, cell, count = (x.asnumpy().tolist() for x in rows[:5])
    assert token == [7, 8, 0, 9, 9, 0, 0, 0, 0]
    assert position == [15, 16, 0, 94, 95, 0, 0, 0, 0]
    assert request == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert cell == list(range(9)) and count == [9]
    assert rows[SLOTS].asnumpy().tolist() == [63, 64, 0, 142, 143, 0, 0, 0, 0]
    assert rows[BOUNDS].asnumpy().tolist() == [20, 17, 1, 96, 96, 96, 1, 1, 1]
    assert rows[TABLES].asnumpy().tolist()[1:4] == [[3, 4, 0, 0, 0, 0], [0] * 6, [1, 2, 5, 6, 7, 8]]
    assert rows[MASK].dtype == ms.uint8 and rows[MASK].shape == (9, 1, 96)
    hidden = np.arange(96)[None] > np.array(position)[:, None]
    np.testing.assert_array_equal(rows[MASK].asnumpy()[:, 0], hidden)
    assert all(x.dtype == ms.int32 for x in (*rows[:7], rows[SLOTS], rows[TABLES]))


def test_a_chunk_belongs_to_one_request():
    with pytest.raises(ValueError, match="one request"):
        AscendOps().Rows(MAX_LEN, BLOCK)(i32(np.zeros((2, 32))), i32([0, 0]), i32(np.zeros((2, 6))), i32(np.ones(64)))


def test_bounds_do_not_matter_beyond_the_position():
    geometry = Geometry(4, 2, 32, NUM_BLOCKS, BLOCK, MAX_LEN, 1e-5, False)
    ops = AscendOps("float16", emulator)
    cos, sin = (Parameter(Tensor(x)) for x in rope_tables(RopeConfig(theta=THETA), 32, MAX_LEN))
    attention = ops.Attention(geometry, cos, sin)
    rng = np.random.default_rng(0)
    stale = rng.normal(size=attention.k_cache.shape).astype(np.float16)
    qkv = Tensor(rng.normal(size=(10, 256)).astype(np.float16))
    results = []
    for extra in (0, 5, 96):
        for cache in (attention.k_cache, attention.v_cache):
            cache.set_data(Tensor(stale))
        start = np.array([20, 47])
        bounds = np.minimum((start[:, None] + np.arange(5) + 1 + extra).reshape(-1), 96)
        tokens = i32(np.ones((2, 5)))
        rows = ops.Rows(MAX_LEN, BLOCK)(tokens, i32(start), i32([[1, 2, 3, 0, 0, 0], [4, 5, 6, 7, 0, 0]]), i32(bounds))
        results.append(attention(qkv, rows).asnumpy())
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_float32_is_stored_as_bfloat16_and_said(caplog):
    ops = AscendOps(None, emulator)
    assert ops.Embedding(16, 16, "float32").weight.dtype == ms.bfloat16
    assert ops.LinearAdd(16, 16, "bfloat16", bias=True).linear.weight.dtype == ms.bfloat16
    assert [r.getMessage() for r in caplog.records] == [storage_dtype("float32")[1]]


def test_one_dtype_throughout():
    ops = AscendOps("float16", emulator)
    with pytest.raises(ValueError, match="'float16'; use one"):
        ops.Embedding(16, 16, "bfloat16")
    with pytest.raises(ValueError, match="int8"):
        AscendOps("int8", emulator)
    geometry = Geometry(4, 2, 32, NUM_BLOCKS, BLOCK, MAX_LEN, 1e-5, False)
    with pytest.raises(ValueError, match="not known yet"):
        AscendOps(None, emulator).Attention(geometry, None, None)
