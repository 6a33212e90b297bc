"""Which part of a model each worker holds, and reads."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_drafts as td
from tiny import tiny_model

from ms_spec.models.checkpoint.sharded import sharded
from ms_spec.models.drafts import open_draft
from ms_spec.models.loading import Loaded, load
from ms_spec.models.parallel import Shard, part, sizes_near, unshared


def shape(heads: int, kv_heads: int, intermediate: int) -> Any:
    return SimpleNamespace(num_heads=heads, num_kv_heads=kv_heads, intermediate_size=intermediate)


@pytest.mark.parametrize("heads, kv_heads, size", [(9, 3, 3), (4, 2, 4), (8, 2, 4), (32, 8, 8), (12, 4, 2), (6, 6, 3)])
def test_query_heads_find_their_keys(heads, kv_heads, size):
    """A worker's query heads, counted within the worker, look at the same key heads as in the whole model."""
    for rank in range(size):
        first, last = Shard(rank, size).span(heads)
        kv_first, kv_last = Shard(rank, size).kv_span(kv_heads)
        for own in range(last - first):
            whole = (first + own) // (heads // kv_heads)
            assert kv_first + own // ((last - first) // (kv_last - kv_first)) == whole


def test_every_token_has_one_owner():
    for vocab in (1, 7, 16, 49152, 151936):
        for size in (1, 2, 3, 4, 8):
            parts = [range(*Shard(rank, size).span(vocab)) for rank in range(size)]
            assert len({len(one) for one in parts}) == 1
            assert [token for one in parts for token in one if token < vocab] == list(range(vocab))


@pytest.mark.parametrize(
    "counts, size, reason, near",
    [
        ((9, 3, 1536), 2, "num_attention_heads = 9", [1, 3]),
        ((9, 3, 1536), 3, None, [3]),
        ((9, 3, 1536), 9, "intermediate_size = 1536", [3]),
        ((4, 2, 96), 4, None, [4]),
        ((12, 4, 96), 3, "num_key_value_heads = 4", [2, 4]),
        ((4, 2, 96), 8, "num_attention_heads = 4", [4]),
    ],
)
def test_counts_that_do_not_divide(counts, size, reason, near):
    assert unshared(shape(*counts), size) == reason
    assert sizes_near(shape(*counts), size) == near


@dataclass
class Counting:
    """A checkpoint that counts the numbers that are read."""

    source: Any
    numbers: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def read(self, name: str, *rows: Any) -> np.ndarray:
        values: np.ndarray = self.source.read(name, *rows)
        self.numbers += values.size
        return values


def vocabulary(loaded: Loaded) -> dict[str, int]:
    return dict.fromkeys(("embed_tokens", "lm_head"), loaded.config.vocab_size)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_parts_are_the_whole(size):
    """Put together, in order, they are the checkpoint's tensors; key heads that several have are each time the same."""
    loaded = load(tiny_model("llama", heads=12, kv_heads=2 if size != 3 else 3, hidden=96, bias=True, mlp_bias=True))
    whole = loaded.checkpoint
    views = [sharded(whole, loaded.config, Shard(rank, size), vocabulary(loaded)) for rank in range(size)]
    assert len({view.identity() for view in [*views, whole]}) == size + 1
    for name in whole.names():
        parts = [view.read(name) for view in views]
        assert [part.shape for part in parts] == [view.shape(name) for view in views]
        wanted = whole.read(name)
        if name.endswith(("o_proj.bias", "down_proj.bias")):
            assert all((part == (wanted if rank == 0 else 0)).all() for rank, part in enumerate(parts))
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            assert np.array_equal(np.concatenate(parts, 1), wanted)
        elif ("k_proj" in name or "v_proj" in name) and size == 4:
            assert np.array_equal(np.concatenate(parts[::2]), wanted)
            assert np.array_equal(parts[0], parts[1]) and np.array_equal(parts[2], parts[3])
        elif "norm" in name:
            assert all(np.array_equal(part, wanted) for part in parts)
        else:
            assert np.array_equal(np.concatenate(parts)[: len(wanted)], wanted)
            assert not np.concatenate(parts)[len(wanted) :].any()
        for view in views:
            rows = view.shape(name)[0]
            pieces = [view.read(name, at, at + 5) for at in range(0, rows, 5)]
            assert np.array_equal(np.concatenate(pieces), view.read(name))


def test_a_worker_reads_its_part_only():
    """But for the matrices whose columns are shared out, of which whole rows are read."""
    loaded = load(tiny_model("llama", heads=4, kv_heads=4, vocab=512))
    for rank in range(4):
        counting = Counting(loaded.checkpoint)
        view = sharded(counting, loaded.config, Shard(rank, 4), vocabulary(loaded))
        for name in view.names():
            before = counting.numbers
            size = view.read(name).size
            whole = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert counting.numbers - before == (4 * size if whole else size), name


def test_a_tensor_of_another_size_is_refused():
    loaded = load(tiny_model("llama", vocab=512))
    view = sharded(loaded.checkpoint, loaded.config, Shard(0, 2), {"embed_tokens": 600})
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight \[512, 64\] has the wrong shape.* 600 rows"):
        view.shape("model.embed_tokens.weight")


def test_the_part_of_a_draft():
    draft = open_draft("eagle3", td.eagle3(own_embedding=True), load(td.target()))
    half = draft.part(Shard(1, 2))
    assert (half.shape.num_heads, half.shape.num_kv_heads) == (2, 1)
    assert half.shape == part(draft.shape, Shard(1, 2))
    assert half.kv_numbers == draft.kv_numbers // 2
    assert half.checkpoint.shape("embed_tokens.weight")[0] == td.VOCAB // 2
    assert half.checkpoint.shape("lm_head.weight") == draft.checkpoint.shape("lm_head.weight")
    assert np.array_equal(
        half.checkpoint.read("midlayer.self_attn.q_proj.weight"),
        draft.checkpoint.read("midlayer.self_attn.q_proj.weight")[32:],
    )
