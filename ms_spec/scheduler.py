"""What the next step computes: continuous batching, chunked prefill, preemption by recompute."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ms_spec.blocks import BlockManager
from ms_spec.draft_budget import tokens_for
from ms_spec.limits import Limits
from ms_spec.request import DECODE, FINISHED, PREFILL, WAITING, Sequence


@dataclass
class Chunk:
    """Part of one sequence's prompt, from token ``start`` on. ``last``: the first token is sampled from it."""

    seq: Sequence
    start: int
    size: int
    last: bool
    limit: int = 0
    """The most drafts to propose after the first token."""


@dataclass
class Row:
    """One decoding sequence and how many of its drafts are verified; at most ``limit`` are proposed next.

    A row that is planned while the sequence's last step still runs starts at least ``ahead`` = 1 token behind those
    that are known, and at most ``slack`` tokens later. Its ``num_drafts`` are the most that it can turn out to have.
    """

    seq: Sequence
    num_drafts: int
    limit: int = 0
    ahead: int = 0
    slack: int = 0


@dataclass
class Plan:
    """One step."""

    chunks: list[Chunk] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether it computes nothing."""
        return not self.rows and not self.chunks

    @property
    def num_tokens(self) -> int:
        """Tokens it computes, drafts included."""
        return sum(chunk.size for chunk in self.chunks) + sum(1 + row.num_drafts for row in self.rows)


class Scheduler:
    """First come, first served. ``running`` and ``waiting`` are in order of arrival.

    Every running sequence that decodes takes part in every step with at least one token. What the token budget leaves
    goes to prompts (one chunk per sequence) and to drafts; both are cut where it does not suffice. When KV blocks run
    out, drafts are given up first, then blocks beyond the committed tokens, then the sequence that arrived last is
    preempted: it loses its blocks, and later computes its tokens again, all but the last.
    """

    def __init__(self, limits: Limits, lone_history: bool = False, adaptive: bool = True) -> None:
        self.limits = limits
        self.blocks = BlockManager(limits.num_blocks, limits.block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._slots = list(range(limits.max_num_seqs, 0, -1))
        self._lone_history = lone_history
        self._adaptive = adaptive

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence."""
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it is, with its blocks and its slot."""
        if seq.state == FINISHED:
            return
        if seq.state == WAITING:
            self.waiting.remove(seq)
        else:
            self.running.remove(seq)
            self._take_back(seq)
        seq.state = FINISHED

    def schedule(self) -> Plan:
        """The next step. Empty only if nothing is left to do."""
        decoding = [seq for seq in self.running if seq.state == DECODE]
        for seq in decoding:
            self._reserve_last_token(seq)
        rows = [Row(seq, len(seq.drafts)) for seq in decoding if seq.state == DECODE]
        return self._shared_out(rows, [(seq, seq.computed) for seq in self.running if seq.state == PREFILL])

    def _shared_out(self, rows: list[Row], reading: list[tuple[Sequence, int]]) -> Plan:
        """A step of these rows, whose last tokens have their blocks, and of chunks of prompts read so far as said."""
        plan = Plan(rows=rows)
        budget = self.limits.max_num_batched_tokens - len(rows)
        # Prompts are certain work and drafts a guess, but drafts serve those who already wait for their text: each
        # side is sure of half of the budget, and gets what the other leaves.
        wanted = sum(self._wanted(row, len(rows)) for row in rows)
        for_prompts = budget - min(wanted, budget // 2)
        used = self._plan_chunks(plan, reading, for_prompts)
        self._plan_drafts(plan, budget - used)
        return plan

    def _wanted(self, row: Row, concurrency: int) -> int:
        """Sets the row's limits from K, the gate and the room; returns how many of the drafts at hand they allow."""
        most, room = self._most(row.seq, concurrency), row.seq.room - row.ahead
        # The step emits at least one token, the step after it its drafts and one more.
        row.limit = max(0, min(most, room - 2))
        row.num_drafts = min(most, room - 1, row.num_drafts)
        return row.num_drafts

    def _most(self, seq: Sequence, concurrency: int) -> int:
        """Drafts worth verifying for this sequence."""
        most = seq.request.num_drafts
        if most:
            most = min(most, tokens_for(self.limits.tokens_by_batch, concurrency, most))
            if self._adaptive:
                most = min(most, seq.gate.limit(1 if self._lone_history else concurrency))
        return most

    def _plan_drafts(self, plan: Plan, budget: int) -> None:
        left = len(plan.rows)
        for row in plan.rows:
            seq = row.seq
            count = min(row.num_drafts, budget // left)
            left -= 1
            base, span = len(seq.tokens) + row.ahead + row.slack, self.limits.span
            if not self.blocks.extend(seq.table, span(base + count, row.limit)):
                row.limit = 0 if self.limits.lookahead else row.limit
                while count and not self.blocks.extend(seq.table, span(base + count)):
                    count -= 1
            row.num_drafts = count
            budget -= count

    def _reserve_last_token(self, seq: Sequence) -> None:
        """A block for the last token's row, at the expense of whoever has to give."""
        while seq.state == DECODE and not self.blocks.extend(seq.table, self.limits.span(len(seq.tokens))):
            if not self._reclaim():
                self._preempt(self.running[-1])

    def _reclaim(self) -> int:
        """Takes back blocks that hold rejected drafts only."""
        span = self.limits.span
        return sum(self.blocks.shrink(seq.table, span(len(seq.tokens))) for seq in self.running if seq.state == DECODE)

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._take_back(seq)
        seq.state = WAITING
        seq.metrics.num_preemptions += 1
        self.waiting.appendleft(seq)

    def _take_back(self, seq: Sequence) -> None:
        self.blocks.release(seq.table)
        if self.limits.slot_drafts:
            seq.drafts = []
        self._slots.append(seq.slot)
        seq.slot = 0

    def _plan_chunks(self, plan: Plan, reading: list[tuple[Sequence, int]], budget: int) -> int:
        used = 0
        for seq, start in reading:
            if used < budget:
                used += self._plan_chunk(plan, seq, start, budget - used)
        while self.waiting and self._slots and used < budget and self._admit(self.waiting[0]):
            used += self._plan_chunk(plan, self.running[-1], 0, budget - used)
        return used

    def _plan_chunk(self, plan: Plan, seq: Sequence, start: int, budget: int) -> int:
        end = seq.prefill_end
        size = min(end - start, budget, self.limits.prefill_chunk)
        last = end == len(seq.tokens) and start + size == end
        limit = max(0, min(self._most(seq, len(self.running)), seq.room - 2)) if last else 0
        if limit and not self.blocks.extend(seq.table, self.limits.span(end, limit)):
            limit = 0
        plan.chunks.append(Chunk(seq, start, size, last, limit))
        return size

    def _admit(self, seq: Sequence) -> bool:
        """Starts the first waiting sequence if all of its tokens find a place, and one block for each other to grow."""
        span = self.limits.span(len(seq.tokens))
        need = self.blocks.needed(span)
        if need + len(self.running) > self.blocks.num_free and (self.running or need > self.blocks.num_free):
            return False
        self.waiting.popleft()
        self.blocks.extend(seq.table, span)
        seq.slot = self._slots.pop()
        seq.state = PREFILL
        seq.computed = 0
        self.running.append(seq)
        return True
