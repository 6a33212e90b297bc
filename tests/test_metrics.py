"""Numbers that add up, and drafts that stop where they do not pay."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_runner import digest, greedy, run, toy_engine

from ms_spec.draft_budget import DraftGate, tokens_for
from ms_spec.metrics import EngineMetrics, Metrics

PROMPT = [digest("metrics", i) % 64 for i in range(9)]


def consistent(metrics, emitted):
    assert 0 <= metrics.num_accepted_tokens <= metrics.num_draft_tokens
    counts = metrics.acceptance_per_position
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == metrics.num_accepted_tokens
    assert metrics.num_decode_tokens == emitted - 1
    if metrics.num_steps:
        assert metrics.mean_acceptance_length == pytest.approx((emitted - 1) / metrics.num_steps)
        assert 1 <= metrics.mean_acceptance_length <= 5
    assert metrics.acceptance_rate <= 1
    json.dumps(metrics.as_dict())


@pytest.mark.parametrize("drafter", ["oracle", "junk", "oracle2", "none", "ngram"])
def test_counts(drafter):
    engine, runner = toy_engine(drafter, adaptive=False)
    (output,) = run(engine, [(PROMPT, greedy(41))])
    metrics = output.metrics
    consistent(metrics, 41)
    assert metrics.num_steps == len(runner.rounds)
    assert metrics.num_draft_tokens == sum(drafted for _, drafted, _ in runner.rounds)
    if drafter == "oracle":
        assert (metrics.num_steps, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (8, 32, 32)
        assert metrics.acceptance_per_position == [8, 8, 8, 8]
        assert metrics.mean_acceptance_length == 5
    if drafter == "junk":
        assert metrics.num_accepted_tokens == 0
        assert metrics.num_steps == 40
    assert metrics.time_to_first_token_s > 0
    assert metrics.tokens_per_second > 0
    total = engine.metrics()
    assert (total.num_requests, total.num_finished) == (1, 1)
    assert total.num_draft_tokens == metrics.num_draft_tokens


def test_drafts_behind_a_stop_do_not_count_as_accepted():
    engine, _ = toy_engine("oracle", num_speculative_tokens=5, adaptive=False)
    ids = run(engine, [(PROMPT, greedy(20))])[0].outputs[0].token_ids
    place = next(j for j in range(2, 6) if ids[j] not in ids[:j])
    (output,) = run(engine, [(PROMPT, greedy(20, stop_token_ids=[ids[place]]))])
    metrics = output.metrics
    assert len(output.outputs[0].token_ids) == place + 1
    assert (metrics.num_steps, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (1, 5, min(place, 5))
    (output,) = run(engine, [(PROMPT, greedy(7))])
    consistent_lengths = output.metrics
    assert consistent_lengths.num_decode_tokens == 6
    assert consistent_lengths.num_accepted_tokens <= consistent_lengths.num_draft_tokens
    assert consistent_lengths.num_steps == 1


def test_what_steps_add_up_to():
    metrics = Metrics()
    for drafted, accepted, emitted in ((4, 4, 5), (4, 1, 2), (0, 0, 1), (2, 2, 1)):
        metrics.count_step(drafted, accepted, emitted, 0.25, verify_seconds=0.5)
    metrics.count_step(0, 0, 1, None, None)  # a step that no clock saw
    assert (metrics.num_steps, metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (
        5,
        3,
        10,
        6,
    )
    assert metrics.acceptance_per_position == [3, 1, 1, 1] and metrics.undrafted_steps == pytest.approx(2 / 5)
    assert metrics.acceptance_rate_per_position == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    total = EngineMetrics()
    for part in (metrics, metrics):
        total.add(part)
    assert (total.draft_seconds, total.verify_seconds, total.num_drafts) == (2, 4, 6)
    for one in (metrics, total):
        figures = one.as_dict()
        names = ("num_drafts", "draft_seconds", "verify_seconds")
        assert [figures[name] for name in names] == [getattr(one, name) for name in names]


def test_times_that_nothing_measured_are_not_told():
    metrics = Metrics()
    metrics.count_step(4, 2, 3)
    assert not {"draft_seconds", "verify_seconds"} & set(metrics.as_dict())


def test_no_step_yet():
    metrics = Metrics()
    assert (metrics.mean_acceptance_length, metrics.acceptance_rate, metrics.tokens_per_second) == (0, 0, 0)
    assert (metrics.undrafted_steps, metrics.acceptance_rate_per_position) == (0, [])
    engine, _ = toy_engine()
    consistent(run(engine, [(PROMPT, greedy(1))])[0].metrics, 1)


def drive(gate, right, steps, most):
    """Steps a gate through ``right(step)`` right drafts. Returns (drafts, tokens) of all steps."""
    drafts = tokens = 0
    for step in range(steps):
        limit = gate.limit()
        accepted = min(right(step), limit)
        gate.record(limit, accepted, limit)
        drafts += limit
        tokens += accepted + 1
    assert drafts <= steps * most
    return drafts, tokens


@pytest.mark.parametrize("most", [1, 2, 4, 8, 15])
def test_repetitive_text_keeps_all_drafts(most):
    gate = DraftGate(most)
    drive(gate, lambda step: most, 12, most)
    assert gate.limit() == most
    drive(gate, lambda step: 0 if step % 10 == 9 else most, 50, most)
    drive(gate, lambda step: most, 4, most)
    assert gate.limit() == most


@pytest.mark.parametrize("most", [1, 4, 15])
def test_useless_drafts_cost_next_to_nothing(most):
    drafts, _ = drive(DraftGate(most), lambda step: 0, 400, most)
    assert drafts <= 6 * most + 16
    assert drafts >= 4, "it has to try again now and then"


def test_drafts_come_back():
    gate = DraftGate(4)
    drive(gate, lambda step: 0, 300, 4)
    before = gate.limit()
    assert before <= 1
    drive(gate, lambda step: 4, 90, 4)
    assert gate.limit() == 4


def test_more_neighbours_ask_for_better_drafts():
    gate = DraftGate(4)
    limits = [gate.limit(n) for n in (1, 2, 4, 8, 16, 32)]
    assert limits == sorted(limits, reverse=True)
    drive(gate, lambda step: 4, 30, 4)
    assert gate.limit(1) == gate.limit(8) == 4
    bad = DraftGate(4)
    for step in range(60):
        bad.record(4, step % 5 == 0, 4)
    assert bad.limit(16) == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=60), st.integers(0, 6))
def test_gate_is_a_function_of_history(history, most):
    one, two = DraftGate(most), DraftGate(most)
    for accepted in history:
        assert 0 <= one.limit() <= most
        two.limit(3)
        for gate in (one, two):
            limit = gate.limit()
            gate.record(limit, min(accepted, limit), limit)
        assert one.limit() == two.limit()
        assert one.limit(7) == two.limit(7)


def test_no_speculation_means_no_drafts():
    assert DraftGate(0).limit() == 0


def test_tokens_by_batch_size():
    table = ((1, 4, 4), (5, 8, 2))
    assert [tokens_for(table, n, 5) for n in (1, 4, 5, 8, 9)] == [4, 4, 2, 2, 5]
    assert tokens_for((), 3, 5) == 5
