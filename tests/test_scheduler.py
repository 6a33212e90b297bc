"""Blocks and turns."""

from __future__ import annotations

import pytest
from toy_runner import ToyRunner, checked_step, finish, greedy, idle, toy_engine, toy_limits

from ms_spec.blocks import BlockManager


def test_blocks():
    blocks = BlockManager(6, 4)
    one, two = [], []
    assert blocks.extend(one, 9)
    assert one == [1, 2, 3]
    assert not blocks.extend(two, 12)
    assert two == []
    assert blocks.extend(two, 8)
    assert two == [4, 5]
    assert blocks.num_free == 0
    assert blocks.extend(one, 12)
    assert blocks.shrink(one, 5) == 1
    assert one == [1, 2]
    blocks.release(two)
    blocks.release(one)
    assert blocks.num_free == blocks.num_usable == 5
    with pytest.raises(ValueError, match="num_blocks = 1"):
        BlockManager(1, 4)


def test_null_block_is_never_handed_out():
    blocks = BlockManager(4, 2)
    table = []
    assert blocks.extend(table, 6)
    assert sorted(table) == [1, 2, 3]


def test_first_come_first_served():
    engine, _ = toy_engine("none", max_num_seqs=1)
    requests = [engine.add_request([1 + i], greedy(5)) for i in range(4)]
    order = []
    while engine.has_unfinished():
        checked_step(engine)
        order += [i for i, request in enumerate(requests) if request.output.finished and i not in order]
    assert order == [0, 1, 2, 3]


def test_decoding_goes_on_while_a_long_prompt_is_read():
    engine, _ = toy_engine("none", prefill_chunk=8, max_num_batched_tokens=8)
    short = engine.add_request([1, 2], greedy(40))
    checked_step(engine)
    long = engine.add_request(list(range(60)), greedy(5))
    seen = len(short.output.outputs[0].token_ids)
    while not long.output.outputs[0].token_ids:
        checked_step(engine)
        now = len(short.output.outputs[0].token_ids)
        assert now == seen + 1
        seen = now
    finish(engine)


def test_prompts_are_read_while_drafts_fill_the_budget():
    engine, _ = toy_engine("oracle", max_num_seqs=2, max_num_batched_tokens=6, max_model_len=128)
    engine.add_request([1, 2], greedy(100))
    checked_step(engine)
    second = engine.add_request(list(range(30)), greedy(5))
    for _ in range(16):
        checked_step(engine)
    assert second.output.outputs[0].token_ids
    finish(engine)


@pytest.mark.parametrize("drafter", ["oracle", "junk"])
def test_drafts_are_given_up_before_anyone_is_preempted(drafter):
    # Both fit without drafts to the last token: 2 x (4 + 28 - 1) positions in 2 x 8 blocks of 4.
    engine, runner = toy_engine(drafter, num_blocks=17, adaptive=False)
    requests = [engine.add_request([i, 2, 3, 4], greedy(28)) for i in range(2)]
    finish(engine)
    assert all(request.output.metrics.num_preemptions == 0 for request in requests)
    assert sum(drafted for _, drafted, _ in runner.rounds) > 20


def test_the_latest_is_preempted():
    engine, _ = toy_engine("none", num_blocks=13)
    requests = [engine.add_request([i, 2, 3, 4], greedy(36)) for i in range(3)]
    finish(engine)
    counts = [request.output.metrics.num_preemptions for request in requests]
    assert counts[0] == 0
    assert counts[2] > 0
    idle(engine)


def test_drafts_survive_a_preemption():
    engine, runner = toy_engine("oracle", adaptive=False)
    request = engine.add_request([5, 6, 7], greedy(30))
    for _ in range(3):
        checked_step(engine)
    rounds = len(runner.rounds)
    engine.scheduler._preempt(request.sequences[0])
    while len(runner.rounds) == rounds:
        checked_step(engine)
    assert runner.rounds[-1][1:] == (4, 4)
    finish(engine)


class OneDrafts(ToyRunner):
    """Only the first slot gets drafts, all of them wrong."""

    def _draft(self, work, tokens):
        return super()._draft(work, tokens) if work.slot == 1 else []


def test_blocks_of_rejected_drafts_are_taken_back():
    # The first holds a fifth block for drafts alone when the second needs its fourth; the pool has eight.
    limits = toy_limits(num_blocks=9)
    engine, _ = toy_engine(runner=OneDrafts(limits, "junk"), adaptive=False, num_blocks=9)
    first = engine.add_request([1, 2, 3, 4, 5, 6], greedy(27))
    second = engine.add_request([1, 2, 3, 4], greedy(11))
    finish(engine)
    assert first.output.metrics.num_preemptions == second.output.metrics.num_preemptions == 0
