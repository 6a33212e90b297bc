"""The emulated Ascend operators compute what they should, and notice every call that their documentation forbids."""

from __future__ import annotations

import inspect

import ascend_emulator as emulator
import mindspore as ms
import numpy as np
import pytest
from ascend_emulator import Violation
from mindspore import Parameter, Tensor
from mindspore.ops import auto_generate

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 16
NUM_BLOCKS, BATCH, TABLE = 6, 3, 2


def half(*shape, seed=0, dtype=ms.float16):
    return Tensor(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).astype(dtype)


def integers(array, dtype=ms.int32):
    return Tensor(np.array(array), dtype)


def signature(function):
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(
    "name",
    ["ApplyRotaryPosEmb", "FusedInferAttentionScore", "PagedAttention", "ReshapeAndCache", "RmsNorm", "Swiglu"],
)
def test_signatures_are_those_of_mindspore(name):
    real, ours = getattr(auto_generate, name), getattr(emulator, name)
    assert signature(ours.__call__) == signature(real.__call__)
    if ours.__init__ is not object.__init__:
        assert signature(ours.__init__) == signature(real.__init__)


def paged(options=None, **change):
    """A call of the decode form, good unless ``change`` or ``options`` spoil it."""
    setting = {"num_heads": HEADS, "num_key_value_heads": KV_HEADS, "inner_precise": 0, "block_size": BLOCK}
    mask = np.arange(TABLE * BLOCK)[None, None] > np.array([0, 17, 30])[:, None, None]
    call = {
        "query": half(BATCH, 1, HEADS * DIM),
        "key": (half(NUM_BLOCKS, BLOCK, KV_HEADS * DIM, seed=1),),
        "value": (half(NUM_BLOCKS, BLOCK, KV_HEADS * DIM, seed=2),),
        "attn_mask": integers(mask, ms.uint8),
        "actual_seq_lengths_kv": integers([5, 20, 32]),
        "block_table": integers([[1, 0], [2, 3], [4, 5]]),
    }
    return emulator.FusedInferAttentionScore(**{**setting, **(options or {})})(**{**call, **change})


def chunk(options=None, steps=4, keys=32, **change):
    """A call of the prefill form: one batch entry, keys in one piece, a mask of one's own."""
    setting = {"num_heads": HEADS, "num_key_value_heads": KV_HEADS, "inner_precise": 2}
    call = {
        "query": half(1, steps, HEADS * DIM),
        "key": (half(1, keys, KV_HEADS * DIM, seed=1),),
        "value": (half(1, keys, KV_HEADS * DIM, seed=2),),
        "attn_mask": integers(np.triu(np.ones((1, 1, steps, keys)), 8), ms.uint8),
    }
    return emulator.FusedInferAttentionScore(**{**setting, **(options or {})})(**{**call, **change})


def attention(query, key, value, scale=1.0):
    """[H, D] x [T, KV, D] -> [H, D], written apart from the emulator."""
    out = np.zeros(query.shape, np.float64)
    for h in range(HEADS):
        kv = h * KV_HEADS // HEADS
        score = np.exp(key[:, kv].astype(np.float64) @ query[h] * scale)
        out[h] = score / score.sum() @ value[:, kv]
    return out


def test_paged_attention_looks_up_blocks_and_obeys_lengths_and_mask():
    query, key, value = (
        half(BATCH, 1, HEADS * DIM),
        half(NUM_BLOCKS, BLOCK, 32, seed=1),
        half(NUM_BLOCKS, BLOCK, 32, seed=2),
    )
    got = paged({"scale_value": 0.25})[0]
    assert got.dtype == ms.float16 and got.shape == (BATCH, 1, HEADS * DIM)
    for row, (blocks, seen) in enumerate([([1], 1), ([2, 3], 18), ([4, 5], 31)]):
        k = key.asnumpy()[blocks].reshape(-1, KV_HEADS, DIM)[:seen]
        v = value.asnumpy()[blocks].reshape(-1, KV_HEADS, DIM)[:seen]
        want = attention(query.asnumpy()[row].reshape(HEADS, DIM), k, v, 0.25)
        np.testing.assert_allclose(got.asnumpy()[row].reshape(HEADS, DIM), want, atol=2e-3)
    shorter = paged({"scale_value": 0.25}, actual_seq_lengths_kv=integers([1, 18, 31]), attn_mask=None)[0]
    np.testing.assert_array_equal(shorter.asnumpy(), got.asnumpy())


def test_chunk_attention_obeys_the_mask_or_the_causal_mode():
    got = chunk()[0].asnumpy()
    query, key, value = half(1, 4, HEADS * DIM), half(1, 32, 32, seed=1), half(1, 32, 32, seed=2)
    for row in range(4):
        k, v = (x.asnumpy()[0].reshape(-1, KV_HEADS, DIM)[: row + 8] for x in (key, value))
        want = attention(query.asnumpy()[0, row].reshape(HEADS, DIM), k, v)
        np.testing.assert_allclose(got[0, row].reshape(HEADS, DIM), want, atol=2e-3)
    square = Tensor(np.triu(np.ones((2048, 2048)), 1), ms.uint8)
    causal = chunk({"sparse_mode": 3}, attn_mask=square, actual_seq_lengths_kv=(11,))[0]
    np.testing.assert_array_equal(causal.asnumpy(), got)


@pytest.mark.parametrize(
    ("words", "options", "change"),
    [
        ("float16 or bfloat16", {}, {"query": half(BATCH, 1, 64, dtype=ms.float32)}),
        ("different dtypes", {}, {"query": half(BATCH, 1, 64, dtype=ms.bfloat16)}),
        ("different dtypes", {}, {"value": (half(NUM_BLOCKS, BLOCK, 32, dtype=ms.float32),)}),
        ("lists of tensors", {}, {"key": half(NUM_BLOCKS, BLOCK, 32)}),
        ("BSH", {"input_layout": "TND"}, {}),
        (r"not \[B, S, H\]", {}, {"query": half(BATCH, 64)}),
        (
            "not 3-D",
            {},
            {"key": (half(NUM_BLOCKS, KV_HEADS, BLOCK, DIM),), "value": (half(NUM_BLOCKS, KV_HEADS, BLOCK, DIM),)},
        ),
        ("no multiple of num_heads", {"num_heads": 6}, {}),
        ("multiple of 16", {"num_heads": 8}, {}),
        ("multiple of num_key_value_heads", {"num_key_value_heads": 3}, {}),
        ("1 to 256", {"num_heads": 512, "num_key_value_heads": 512}, {}),
        ("share", {"num_heads": 128, "num_key_value_heads": 1}, {}),
        ("kv heads", {"num_key_value_heads": 1}, {}),
        ("up to 512", {"num_heads": 1, "num_key_value_heads": 1}, {"query": half(BATCH, 1, 528)}),
        ("16's multiple", {"block_size": 8}, {"key": (half(12, 8, 32),), "value": (half(12, 8, 32),)}),
        ("16's multiple", {"block_size": 528}, {"key": (half(2, 528, 32),), "value": (half(2, 528, 32),)}),
        ("not block_size", {"block_size": 32}, {}),
        ("both block_table and block_size", {"block_size": 0}, {}),
        ("both block_table and block_size", {}, {"block_table": None}),
        ("not int32", {}, {"block_table": integers([[1, 0], [2, 3], [4, 5]], ms.int64)}),
        ("block_table", {}, {"block_table": integers([1, 2, 3])}),
        ("block_table", {}, {"block_table": integers([[1, 0], [2, 3]])}),
        ("outside the cache", {}, {"block_table": integers([[1, 0], [2, 3], [4, 6]])}),
        ("outside the cache", {}, {"block_table": integers([[-1, 0], [2, 3], [4, 5]])}),
        ("needs actual_seq_lengths_kv", {}, {"actual_seq_lengths_kv": None}),
        ("2 entries for a batch of 3", {}, {"actual_seq_lengths_kv": integers([5, 20])}),
        ("leaves 1 to 32", {}, {"actual_seq_lengths_kv": integers([5, 20, 33])}),
        ("leaves 1 to 32", {}, {"actual_seq_lengths_kv": integers([0, 20, 32])}),
        ("not int32 or int64", {}, {"actual_seq_lengths_kv": Tensor(np.array([5, 20, 32], np.float32))}),
        ("not 1-D", {}, {"actual_seq_lengths_kv": integers([[5], [20], [32]])}),
        ("bool, int8 or uint8", {}, {"attn_mask": half(BATCH, 1, 32)}),
        (r"not \[B, S\]", {}, {"attn_mask": integers(np.zeros((2, 1, 32)), ms.uint8)}),
        (r"not \[B, S\]", {}, {"attn_mask": integers(np.zeros((BATCH, 4, 32)), ms.uint8)}),
        ("covers 16 keys of 32", {}, {"attn_mask": integers(np.zeros((BATCH, 1, 16)), ms.uint8)}),
        ("else than 0 and 1", {}, {"attn_mask": integers(np.full((BATCH, 1, 32), 2), ms.uint8)}),
        ("attend to nothing", {}, {"attn_mask": integers(np.ones((BATCH, 1, 32)), ms.uint8)}),
        ("0 or 1 when Q_S is 1", {"inner_precise": 2}, {}),
        ("inner_precise 4", {"inner_precise": 4}, {}),
        ("void when Q_S > 1", {}, {"query": half(BATCH, 2, 64)}),
        ("not emulated", {}, {"antiquant_scale": half(2)}),
        ("not emulated", {"antiquant_mode": 1}, {}),
        ("longer than 64K", {"num_key_value_heads": 256, "num_heads": 256, "scale_value": 0.1}, "wide"),
    ],
)
def test_paged_attention_notices(words, options, change):
    if change == "wide":
        cache = (half(2, BLOCK, 256 * 272),)
        change = {"query": half(BATCH, 1, 256 * 272), "key": cache, "value": cache}
    with pytest.raises(Violation, match=words):
        paged(options, **change)


@pytest.mark.parametrize(
    ("words", "options", "change"),
    [
        ("void when Q_S > 1", {"block_size": BLOCK}, {}),
        ("void when Q_S > 1", {}, {"block_table": integers([[1, 0]])}),
        ("batch", {}, {"key": (half(2, 32, 32),), "value": (half(2, 32, 32),)}),
        ("attn_mask", {}, {"attn_mask": integers(np.zeros((1, 1, 4, 16)), ms.uint8)}),
        ("attn_mask", {}, {"attn_mask": integers(np.zeros((1, 1, 32)), ms.uint8)}),
        ("inner_precise 2 or 3", {"inner_precise": 0}, {}),
        ("needs a mask", {"sparse_mode": 1}, {"attn_mask": None}),
        ("2048", {"sparse_mode": 3}, {}),
        ("triu", {"sparse_mode": 2}, {"attn_mask": Tensor(np.zeros((2048, 2048)), ms.uint8)}),
        ("sparse_mode 5", {"sparse_mode": 5}, {}),
        ("2 entries for a batch of 1", {}, {"actual_seq_lengths_kv": (16, 16)}),
        ("leaves 1 to 32", {}, {"actual_seq_lengths_kv": (33,)}),
        ("leaves 1 to 4", {}, {"actual_seq_lengths": (5,)}),
    ],
)
def test_chunk_attention_notices(words, options, change):
    with pytest.raises(Violation, match=words):
        chunk(options, **change)


def cache(change=None):
    call = {
        "key": half(3, 32),
        "value": half(3, 32, seed=1),
        "key_cache": Parameter(half(4, 16, 32, seed=2) * 0),
        "value_cache": Parameter(half(4, 16, 32, seed=2) * 0),
        "slot_mapping": integers([16, 63, 0]),
    }
    call.update(change or {})
    emulator.ReshapeAndCache()(**call)
    return call


def test_cache_writes_rows_to_their_slots_and_nothing_else():
    call = cache()
    for rows, held in ((call["key"], call["key_cache"]), (call["value"], call["value_cache"])):
        want = np.zeros((64, 32), np.float16)
        want[[16, 63, 0]] = rows.asnumpy()
        np.testing.assert_array_equal(held.asnumpy().reshape(64, 32), want)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("not int32", {"slot_mapping": integers([16, 63, 0], ms.int64)}),
        ("not 1-D", {"slot_mapping": integers([[16, 63, 0]])}),
        ("2 slots for 3 rows", {"slot_mapping": integers([16, 63])}),
        ("beyond the cache", {"slot_mapping": integers([16, 64, 0])}),
        ("negative", {"slot_mapping": integers([16, -1, 0])}),
        ("two rows for one slot", {"slot_mapping": integers([16, 16, 0])}),
        ("8-bit", {"key": half(3, 32, dtype=ms.float32)}),
        ("a cache of", {"key": half(3, 32, dtype=ms.bfloat16)}),
        (r"not \[T, H\]", {"key": half(3, 2, 16)}),
        ("do not fit", {"key": half(3, 16)}),
        (r"not \[blocks", {"key_cache": Parameter(half(64, 32))}),
        ("without", {"value": None}),
    ],
)
def test_cache_notices(words, change):
    with pytest.raises(Violation, match=words):
        cache(change)


def test_null_block_may_be_written_twice():
    cache({"slot_mapping": integers([0, 63, 0])})


def test_rms_norm_and_swiglu():
    x, gamma = half(3, 16), half(16, seed=1)
    got, rstd = emulator.RmsNorm(1e-5)(x, gamma)
    wide = x.asnumpy().astype(np.float64)
    scale = 1 / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(got.asnumpy(), wide * scale * gamma.asnumpy(), atol=4e-3)
    np.testing.assert_allclose(rstd.asnumpy(), scale, rtol=1e-5)
    gate, up = wide[:, :8], wide[:, 8:]
    np.testing.assert_allclose(emulator.Swiglu()(x, -1).asnumpy(), gate / (1 + np.exp(-gate)) * up, atol=2e-3)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("gamma is", lambda: emulator.RmsNorm()(half(3, 16), half(16, dtype=ms.float32))),
        ("does not fit", lambda: emulator.RmsNorm()(half(3, 16), half(8))),
        ("x is", lambda: emulator.RmsNorm()(integers([[1]]), integers([1]))),
        ("epsilon", lambda: emulator.RmsNorm(0.0)),
        ("halved", lambda: emulator.Swiglu()(half(3, 15))),
        ("input is", lambda: emulator.Swiglu()(integers([[1, 2]]))),
    ],
)
def test_norm_and_swiglu_notice(words, call):
    with pytest.raises(Violation, match=words):
        call()


def lookahead(**change):
    """PagedAttention for three requests of 2, 1 and 3 query tokens, good unless ``change`` spoils it."""
    places = [3, 4, 0, 29, 30, 31]
    call = {
        "query": half(6, HEADS * DIM),
        "key_cache": half(NUM_BLOCKS, BLOCK, KV_HEADS, DIM, seed=1),
        "value_cache": half(NUM_BLOCKS, BLOCK, KV_HEADS, DIM, seed=2),
        "block_tables": integers([[1, 0], [2, 3], [4, 5]]),
        "context_lens": integers([5, 1, 32]),
        "attn_mask": Tensor(np.where(np.arange(32)[None] > np.array(places)[:, None], -10000, 0), ms.float16),
        "q_seq_lens": integers([2, 1, 3]),
    }
    options = {"head_num": HEADS, "scale_value": 0.25, "kv_head_num": KV_HEADS, **change.pop("options", {})}
    return emulator.PagedAttention(**options)(**{**call, **change})


def test_lookahead_attention_sees_what_the_mask_leaves():
    got = lookahead()
    assert got.dtype == ms.float16 and got.shape == (6, HEADS * DIM)
    query, key, value = (
        x.asnumpy() for x in (half(6, 64), half(NUM_BLOCKS, BLOCK, 32, seed=1), half(NUM_BLOCKS, BLOCK, 32, seed=2))
    )
    for row, (blocks, seen) in enumerate([([1], 4), ([1], 5), ([2], 1), ([4, 5], 30), ([4, 5], 31), ([4, 5], 32)]):
        k, v = (x[blocks].reshape(-1, KV_HEADS, DIM)[:seen] for x in (key, value))
        want = attention(query[row].reshape(HEADS, DIM), k, v, 0.25)
        np.testing.assert_allclose(got.asnumpy()[row].reshape(HEADS, DIM), want, atol=2e-3)


def test_single_tokens_take_no_mask():
    one = {"query": half(3, 64), "q_seq_lens": integers([1, 1, 1])}
    got = lookahead(**one, attn_mask=Tensor(np.full((1, 1), -10000), ms.float16))
    np.testing.assert_array_equal(got.asnumpy(), lookahead(**one, attn_mask=None).asnumpy())


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("see each other's future", {"attn_mask": None}),
        ("attn_mask is", {"attn_mask": Tensor(np.zeros((6, 32)), ms.float32)}),
        (r"not \[T, S\]", {"attn_mask": half(3, 32)}),
        ("covers 16 keys of 32", {"attn_mask": half(6, 16)}),
        ("not of 6 query tokens", {"q_seq_lens": integers([2, 1, 2])}),
        ("not of 6 query tokens", {"q_seq_lens": integers([3, 0, 3])}),
        ("q_seq_lens has to be int32", {"q_seq_lens": None}),
        ("context_lens has to be int32", {"context_lens": integers([5, 1, 32], ms.int64)}),
        ("less than q_seq_lens", {"context_lens": integers([1, 1, 32])}),
        ("leave the block table", {"context_lens": integers([5, 1, 33])}),
        ("one row and length a request", {"block_tables": integers([[1, 0], [2, 3]])}),
        ("outside the cache", {"block_tables": integers([[1, 0], [2, 3], [4, 6]])}),
        ("float16 or bfloat16", {"query": half(6, 64, dtype=ms.float32)}),
        ("different dtypes", {"query": half(6, 64, dtype=ms.bfloat16)}),
        (r"not \[T, heads", {"query": half(6, 4, 16)}),
        ("differ in shape", {"value_cache": half(NUM_BLOCKS, BLOCK, 1, DIM)}),
        (r"kv, dim\]", {"key_cache": half(NUM_BLOCKS, BLOCK, 32), "value_cache": half(NUM_BLOCKS, BLOCK, 32)}),
        ("not emulated", {"alibi_mask": half(6, 32)}),
        ("not emulated", {"options": {"mask_mode": "TRAPEZOIDAL"}}),
        ("no multiple", {"options": {"kv_head_num": 3}}),
    ],
)
def test_lookahead_attention_notices(words, change):
    with pytest.raises(Violation, match=words):
        lookahead(**change)


def rotated(**change):
    call = {"query": half(2, 64), "key": half(2, 32, seed=1), "cos": half(2, DIM, seed=2), "sin": half(2, DIM, seed=3)}
    call = {**call, "position_ids": integers([2]), **change}
    return emulator.ApplyRotaryPosEmb(call.pop("cos_format", 2))(**call)


def test_rotation_turns_pairs():
    cos, sin = (half(2, DIM, seed=seed).asnumpy().astype(np.float64) for seed in (2, 3))
    for got, given in zip(rotated(), (half(2, 64), half(2, 32, seed=1))):
        heads = given.asnumpy().astype(np.float64).reshape(2, -1, DIM)
        for i in range(DIM // 2):
            a, b = heads[:, :, i], heads[:, :, i + DIM // 2]
            turned = got.asnumpy().reshape(heads.shape)
            np.testing.assert_allclose(turned[:, :, i], a * cos[:, None, i] - b * sin[:, None, i], atol=1e-2)
            at = i + DIM // 2
            np.testing.assert_allclose(turned[:, :, at], b * cos[:, None, at] + a * sin[:, None, at], atol=1e-2)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("only 2 is emulated", {"cos_format": 0}),
        ("float16 or bfloat16", {"query": half(2, 64, dtype=ms.float32)}),
        ("different dtypes", {"cos": half(2, DIM, dtype=ms.float32)}),
        (r"not \[T, H\]", {"query": half(2, 4, 16)}),
        (r"not \[T, D\]", {"sin": half(2, 8)}),
        ("one row of angles", {"cos": half(9, DIM), "sin": half(9, DIM)}),
        ("position_ids", {"position_ids": integers([2], ms.int64)}),
        ("no multiple of", {"key": half(2, 40)}),
    ],
)
def test_rotation_notices(words, change):
    with pytest.raises(Violation, match=words):
        rotated(**change)
