"""Suffix decoding: recorded drafts of Arctic Inference, C++ against Python, and what the arguments mean."""

from __future__ import annotations

import json
import logging
from array import array
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_spec.proposers import suffix_tree
from ms_spec.proposers.plain_suffix_tree import PlainTree
from ms_spec.proposers.suffix import SuffixProposer, build_host
from ms_spec.proposers.suffix_tree import NativeTree

TREES = [NativeTree, PlainTree]
RECORDED = Path(__file__).parent / "data" / "suffix_drafts.jsonl"
ALL = 1 << 20


def ids(*tokens: int) -> array[int]:
    return array("i", tokens)


# ---- what the reference drafted


@pytest.mark.parametrize("tree", TREES)
def test_recorded_drafts(tree):
    """Events of sessions that were run through Arctic Inference, with what it drafted."""
    sessions = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    assert len(sessions) > 20
    for session in sessions:
        proposer = SuffixProposer(
            session["max_tree_depth"],
            session["max_cached_requests"],
            session["max_spec_factor"],
            session["min_token_prob"],
            session["num_speculative_tokens"],
            tree=tree,
        )
        calls = {"start": proposer.start, "emit": proposer.extend, "stop": proposer.stop}
        for i, (name, key, *rest) in enumerate(session["events"]):
            if name == "draft":
                assert proposer.draft(key, ALL) == rest[0], (session["seed"], i)
            else:
                calls[name](key, *rest)


# ---- C++ against Python


class Pair:
    """Both trees, of which every answer must be the same."""

    def __init__(self, depth: int) -> None:
        self.native, self.plain = NativeTree(depth), PlainTree(depth)

    def append(self, sequence, tokens):
        self.native.append(sequence, tokens)
        self.plain.append(sequence, tokens)

    def remove(self, sequence):
        self.native.remove(sequence)
        self.plain.remove(sequence)

    def draft(self, context, limit, factor, min_prob):
        seen = self.native.draft(context, limit, factor, min_prob)
        assert seen == self.plain.draft(context, limit, factor, min_prob)
        return seen


def queries(pair: Pair, text: array[int], depth: int) -> None:
    for end in range(1, len(text) + 1):
        context = text[max(0, end - depth) : end]
        pair.draft(context, 16, 1.0, 0.1)
        pair.draft(context, 1, 0.7, 0.0)
        pair.draft(context, 5, 3.0, 0.4)


SMALL = st.lists(st.integers(0, 3), max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 5, 24]),
    st.lists(st.one_of(st.tuples(st.integers(0, 4), SMALL), st.tuples(st.integers(0, 4), st.none())), max_size=25),
)
def test_trees_agree(depth, events):
    """Sequences grow and are removed in any order, also between their tokens; a removed one comes back as a new one."""
    pair, number, numbers, text = Pair(depth), 0, {}, ids()
    for who, tokens in events:
        if tokens is None:
            pair.remove(numbers.pop(who, -1))
            continue
        if who not in numbers:
            number = numbers[who] = number + 1
        text += ids(*tokens)
        pair.append(numbers[who], ids(*tokens))
    queries(pair, text[-40:], depth)
    for one in numbers.values():
        pair.remove(one)
    assert (pair.native.nodes, pair.native.texts) == (1, 0)
    assert pair.draft(text[-depth:], 16, 1.0, 0.0) == ([], 0.0)


EVENTS = st.one_of(
    st.tuples(st.just("start"), st.integers(0, 5), SMALL),
    st.tuples(st.just("extend"), st.integers(0, 5), SMALL),
    st.tuples(st.just("stop"), st.integers(0, 5), st.none()),
    st.tuples(st.just("draft"), st.integers(0, 5), st.integers(-1, 20)),
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 24]),
    st.sampled_from([0, 1, 2, 100]),
    st.sampled_from([0.0, 0.5, 1.0, 1e300]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from([1, 16, None]),
    st.sampled_from([None, 20]),
    st.lists(EVENTS, max_size=40),
)
def test_proposers_agree(depth, cached, factor, prob, drafts, most, events):
    """Keys come back after their stop. Every start, and every draft of what runs, is in the limits."""
    arguments = (depth, cached, factor, prob, drafts, most)
    native, plain = (SuffixProposer(*arguments, tree=tree) for tree in TREES)
    lengths: dict[int, int] = {}
    for name, key, what in events:
        if (name == "start") == (key in lengths):
            continue
        if name == "stop":
            del lengths[key]
        elif name != "draft":
            lengths[key] = lengths.get(key, 0) + len(what)
        seen, wanted = (getattr(one, name)(key, *([] if name == "stop" else [what])) for one in (native, plain))
        assert seen == wanted
        if name == "draft":
            room = ALL if most is None else most - lengths[key] - 1
            assert len(seen) <= max(0, min(what, drafts or depth, depth - 1, room))


def test_trees_agree_when_they_are_large():
    """Many nodes and long lists of siblings, with a cache that is full most of the time."""
    rng = np.random.default_rng(1)
    words = np.minimum(rng.zipf(1.4, 4000), 700).astype(np.int32)
    native, plain = (SuffixProposer(12, 40, tree=tree) for tree in TREES)
    drafted = 0
    for key in range(60):
        begin = int(rng.integers(3900))
        for one in (native, plain):
            one.start(key, words[begin : begin + 30].tolist())
        for _ in range(30):
            begin, size = int(rng.integers(3900)), int(rng.integers(1, 9))
            for one in (native, plain):
                one.extend(key, words[begin : begin + size].tolist())
            seen = native.draft(key, 12)
            assert seen == plain.draft(key, 12)
            drafted += len(seen)
        if key > 2:
            for one in (native, plain):
                one.stop(key - 2)
    assert drafted > 500
    assert native._common.nodes > 4096  # more than one chunk of the pool


def test_a_run_of_tokens_is_one_node():
    tree = NativeTree(24)
    tree.append(1, ids(*range(1000)))
    assert tree.nodes == 1001  # a leaf for each suffix
    tree.append(2, ids(*range(1000)))
    assert tree.nodes == 1001


def test_texts_go_with_their_sequences():
    """The oldest goes first: nothing that is left refers to it, however much of it came again."""
    rng, tree = np.random.default_rng(2), NativeTree(8)
    for number in range(60):
        for _ in range(4):
            tree.append(number, ids(*rng.integers(0, 4, 10).tolist()))
            tree.append(max(0, number - 2), ids(*rng.integers(0, 4, 3).tolist()))
        tree.remove(number - 5)
        assert tree.texts == min(number + 1, 5)
    pair = Pair(8)
    for number in (1, 2):
        pair.append(number, ids(1, 2))
    pair.remove(2)  # the younger one, to whose text the common nodes had moved
    assert pair.native.texts == 2
    pair.append(1, ids(3))
    assert pair.draft(ids(9, 2), 4, 1.0, 0.0) == ([3], 1.0)
    assert pair.native.texts == 1


# ---- what the arguments mean


@pytest.mark.parametrize("tree", TREES)
def test_scores(tree):
    """Seen once before and now at the end: two suffixes pass, one goes on."""
    made = tree(24)
    made.append(0, ids(1, 2, 3, 1))
    assert made.draft(ids(3, 1), 16, 1.0, 0.1) == ([2], 0.5)
    assert made.draft(ids(3, 1), 16, 2.0, 0.1) == ([2, 3], 1.0)
    assert made.draft(ids(3, 1), 16, 2.0, 0.6) == ([], 0.0)
    assert made.draft(ids(1), 16, 2.0, 0.1) == ([], 0.0)  # a match is shorter than the context
    assert made.draft(ids(), 16, 2.0, 0.1) == ([], 0.0)


@pytest.mark.parametrize("tree", TREES)
def test_longer_matches_win_ties_and_own_text_wins_over_others(tree):
    made = tree(24)
    made.append(0, ids(8, 1, 5, 9, 1, 6))
    assert made.draft(ids(0, 9, 1), 1, 1.0, 0.0) == ([6], 1.0)
    proposer = SuffixProposer(24, 10, tree=tree)
    proposer.start("a", [])
    proposer.extend("a", [1, 2, 3, 4, 1])
    proposer.start("b", [1, 2, 7, 1])
    proposer.extend("b", [2])
    assert proposer.draft("b", 1) == [3]  # 1/1 by the common tree, less by its own
    proposer = SuffixProposer(24, 0, tree=tree)
    proposer.start("a", [])
    proposer.extend("a", [1, 2, 3, 4, 1])
    proposer.start("b", [1, 2, 7, 1])
    proposer.extend("b", [2])
    assert proposer.draft("b", 1) == [7]


@pytest.mark.parametrize("tree", TREES)
def test_limits(tree):
    proposer = SuffixProposer(24, 10, 2.0, 0.0, 16, 30, tree=tree)
    proposer.start("a", [5, 6, 7, 8] * 5)
    proposer.extend("a", [5])
    assert [len(proposer.draft("a", limit)) for limit in (-1, 0, 1, 3, 8, 99)] == [0, 0, 1, 3, 8, 8]
    proposer.extend("a", [6, 7, 8, 5, 6, 7])
    assert proposer.draft("a", 99) == [8, 5]  # 27 ids, at most 30, one of them the target's own
    proposer.extend("a", [8, 5])
    assert proposer.draft("a", 99) == []
    one = SuffixProposer(24, 10, num_drafts=1, tree=tree)
    one.start("a", [5, 6, 7, 8] * 5)
    assert one.draft("a", 99) == [5]
    assert one.num_drafts == 1 and SuffixProposer(7).num_drafts == 7


@pytest.mark.parametrize("tree", TREES)
def test_nothing_to_draft_from(tree):
    proposer = SuffixProposer(tree=tree)
    proposer.start("a", [])
    assert proposer.draft("a", 9) == []
    proposer.extend("a", [])
    assert proposer.draft("a", 9) == []
    proposer.extend("a", [3])
    assert proposer.draft("a", 9) == []
    shallow = SuffixProposer(1, tree=tree)
    shallow.start("a", [3] * 9)
    assert shallow.draft("a", 9) == []  # a context of one token leaves nothing to match


@pytest.mark.parametrize("tree", TREES)
def test_responses_are_forgotten_in_the_order_of_their_starts(tree):
    def run(cached: int, others: int) -> list[int]:
        proposer = SuffixProposer(24, cached, 1.0, 0.0, tree=tree)
        proposer.start("old", [1, 2, 3])  # a prompt: not for others
        proposer.extend("old", [50, 51, 52, 53, 54])
        for key in range(others):
            proposer.start(key, [])
            proposer.extend(key, [60 + key])
        proposer.extend("old", [55, 56])  # running still
        proposer.start("new", [51, 52, 53])
        proposer.extend("new", [54])
        return proposer.draft("new", 3)

    assert run(10, 3) == run(5, 3) == [55, 56]
    assert run(4, 3) == run(1, 0) == run(0, 3) == []
    proposer = SuffixProposer(24, 10, tree=tree)
    proposer.start("old", [1, 2, 3, 4])
    proposer.start("new", [1, 2])
    assert proposer.draft("new", 3) == []


@pytest.mark.parametrize("tree", TREES)
def test_a_key_that_comes_back_forgets_its_old_response(tree):
    proposer = SuffixProposer(24, 10, 1.0, 0.0, tree=tree)
    proposer.start("a", [])
    proposer.extend("a", [1, 2, 3, 4])
    proposer.stop("a")
    proposer.start("b", [1, 2])
    assert proposer.draft("b", 2) == [3]
    proposer.start("a", [9])
    assert proposer.draft("b", 2) == []
    proposer.extend("a", [1, 2, 7])
    assert proposer.draft("b", 2) == [7]


def test_keys_that_do_not_run():
    proposer = SuffixProposer()
    proposer.stop("never started")
    for call in (lambda: proposer.draft("x", 1), lambda: proposer.extend("x", [1])):
        with pytest.raises(ValueError, match="key = 'x': is not running"):
            call()
    proposer.start("x", [1])
    with pytest.raises(ValueError, match="key = 'x': is running already"):
        proposer.start("x", [1])
    with pytest.raises(OverflowError):
        proposer.extend("x", [1 << 31])


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tree_depth": 0},
        {"max_cached_requests": -1},
        {"max_spec_factor": -0.5},
        {"max_spec_factor": float("nan")},
        {"min_token_prob": 1.5},
        {"num_drafts": 0},
    ],
    ids=str,
)
def test_arguments_out_of_range(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"^{name} = {value}: must be .*; use [0-9.]+$"):
        SuffixProposer(**wrong)


def test_built_from_a_config():
    config = SimpleNamespace(
        suffix_decoding_max_tree_depth=6,
        suffix_decoding_max_cached_requests=3,
        suffix_decoding_max_spec_factor=2.0,
        suffix_decoding_min_token_prob=0.0,
        num_speculative_tokens=4,
    )
    proposer = build_host(config, 20)
    assert proposer.num_drafts == 4 and not proposer.dense
    proposer.start("a", [5, 6, 7, 8] * 4)
    assert proposer.draft("a", 9) == [5, 6, 7]
    config.num_speculative_tokens = None
    assert build_host(config, 20).num_drafts == 6


# ---- without a compiler


def test_without_a_compiler(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("MS_SPEC_CACHE", str(tmp_path))
    caches = (suffix_tree._kind, suffix_tree._library)
    for one in caches:
        one.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            made = [SuffixProposer()._common for _ in range(3)]
        assert {type(one) for one in made} == {PlainTree}
        (record,) = caplog.records
        assert "/no/such/compiler" in record.message and "\n" not in record.message
    finally:
        for one in caches:
            one.cache_clear()
