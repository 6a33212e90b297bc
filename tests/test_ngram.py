"""The n-gram proposer against a brute-force search over all places and sizes."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Tensor

from ms_spec.models.ops import plain_sampling
from ms_spec.proposers.registry import METHODS, build_proposer

SPAN, N = 24, 6


def lookup(context, min_n, max_n, k, limit):
    """Every size from the longest, every place from the first: the definition itself."""
    for size in range(min(max_n, len(context) - 1), min_n - 1, -1):
        for begin in range(len(context) - size):
            if context[begin : begin + size] == context[-size:]:
                return context[begin + size :][: max(min(k, limit), 0)]
    return []


@pytest.fixture(scope="module")
def proposers(backend):
    made = {}
    for min_n, max_n, k in [(2, 4, 4), (1, 1, 1), (1, 3, 6), (3, 30, 2)]:
        config = SimpleNamespace(
            method="ngram", prompt_lookup_min=min_n, prompt_lookup_max=max_n, num_speculative_tokens=k
        )
        made[min_n, max_n, k] = build_proposer(config, backend)
    return made


def propose(proposer, contexts, limits):
    """Runs N requests whose contexts stand in shuffled slots; what lies behind them is noise."""
    rng = np.random.default_rng(0)
    history = rng.integers(0, 3, (N + 1, SPAN)).astype(np.int32)
    slot = rng.permutation(np.arange(1, N + 1)).astype(np.int32)
    length = np.zeros(N, np.int32)
    for i, context in enumerate(contexts):
        history[slot[i], : len(context)] = context
        length[i] = len(context)
    padded = np.array([*limits, *[9] * (N - len(limits))], np.int32)
    slot[len(contexts) :] = 0
    one = Tensor(np.zeros((N, 2), np.int32))
    h, s, n, m = (Tensor(x) for x in (history, slot, length, padded))
    drafts, counts = proposer(h, s, n, one, one, n, n, None, None, m, None, None, None)
    return drafts.asnumpy(), counts.asnumpy()


def check(proposers, contexts, limits):
    for (min_n, max_n, k), proposer in proposers.items():
        drafts, counts = propose(proposer, contexts, limits)
        assert drafts.shape == (N, k) and drafts.dtype == np.int32
        for i, context in enumerate(contexts):
            wanted = lookup(list(context), min_n, max_n, k, limits[i])
            assert drafts[i].tolist() == wanted + [-1] * (k - len(wanted)), (context, min_n, max_n, k)
            assert counts[i] == len(wanted)
        assert (counts[len(contexts) :] == 0).all() and (drafts[len(contexts) :] == -1).all()


CONTEXTS = st.lists(st.lists(st.integers(0, 2), max_size=SPAN), min_size=1, max_size=N)


@settings(max_examples=60, deadline=None)
@given(CONTEXTS, st.lists(st.integers(0, 7), min_size=N, max_size=N))
def test_equals_the_brute_force_search(proposers, contexts, limits):
    check(proposers, contexts, limits[: len(contexts)])


def test_edges(proposers):
    full = [0, 1] * (SPAN // 2)
    check(proposers, [[], [1], [1, 1], [2, 2, 2], full, list(range(10, 10 + SPAN))], [9] * N)
    check(proposers, [full, full, full], [0, 1, -1])
    check(proposers, [[1, 2, 3, 4, 2, 3], [5, 1, 2, 9, 1, 2, 7, 5, 1, 2], [0, 0, 0, 0]], [9, 9, 9])


def test_the_longest_then_the_earliest(proposers):
    # 1 2 3 occurs once; 2 3 occurs before it: the longer one wins. Of two equal ones the first.
    drafts, _ = propose(proposers[2, 4, 4], [[2, 3, 50, 1, 2, 3, 60, 1, 2, 3], [8, 9, 70, 8, 9, 80, 8, 9]], [4, 4])
    assert drafts[0].tolist() == [60, 1, 2, 3]
    assert drafts[1].tolist() == [70, 8, 9, 80]


def test_unknown_methods_are_refused_and_the_registry_is_light():
    with pytest.raises(ValueError, match=r"'eagel': allowed are ngram"):
        build_proposer(SimpleNamespace(method="eagel"), plain_sampling)
    assert "ngram" in METHODS
    code = "import sys, ms_spec.proposers.registry; assert 'mindspore' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
