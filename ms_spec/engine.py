"""The loop that turns requests into steps and results into text. No numerics, no MindSpore."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable
from typing import Any, Callable, Optional

from ms_spec.draft_budget import DraftGate
from ms_spec.errors import EngineError, RequestError
from ms_spec.hidden_states import HiddenStatesSink
from ms_spec.limits import Limits
from ms_spec.logprobs import TokenTexts, entries, no_text
from ms_spec.metrics import EngineMetrics, Metrics
from ms_spec.outputs import CompletionOutput, Delta, RequestOutput
from ms_spec.proposers.base import HostProposer
from ms_spec.request import DECODE, FINISHED, Request, Sequence
from ms_spec.request_checks import RequestChecks
from ms_spec.sampling_params import SamplingParams
from ms_spec.scheduler import Chunk, Plan, Row, Scheduler
from ms_spec.seeds import request_seed
from ms_spec.shaping import shaping_of
from ms_spec.stopping import Decoder, Stopping
from ms_spec.work import Result, Runner, Work

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
Results = tuple[list[Optional[Result]], list[Result]]
"""Of a step's chunks, and of its rows."""
NONE_LEFT = ", or logit_bias, allowed_token_ids, bad_words and min_tokens leave no token"


def call_here(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs ``function`` on the caller's thread."""
    return function(*arguments)


class Engine:
    """Requests in, tokens out, one ``step`` at a time. Not thread-safe: whoever shares it holds a lock.

    runner: the compiled model.
    eos: ids that end a request unless it ignores them.
    make_decoder: gives a new incremental decoder, ``make_decoder(skip_special_tokens)``; None: no text at all.
    seed: where requests without a seed get theirs from, together with their number; None: from the operating system.
    on_thread: runs a function on the thread that :meth:`advance` works on: the one that owns the model.
    may_go_on: asked between the steps of :meth:`advance`; False: it is to come back.
    lone_history: draft lengths must not depend on the other requests (verification that is not lossless).
    adaptive: False always verifies all drafts.
    drafter: drafts between the steps; None: the runner does, or nobody.
    sink: takes the hidden states that the runner returns. A request ends when its file is there.
    tokenizer: for what needs more than ``make_decoder``: bad words, and the texts beside log-probabilities.
    """

    scheduler_type = Scheduler

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        vocab_size: int,
        eos: Collection[int] = (),
        make_decoder: Callable[[bool], Decoder] | None = None,
        seed: int | None = None,
        on_thread: Callable[..., Any] = call_here,
        may_go_on: Callable[[], bool] = lambda: True,
        lone_history: bool = False,
        adaptive: bool = True,
        drafter: HostProposer | None = None,
        sink: HiddenStatesSink | None = None,
        tokenizer: Any = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.limits = limits
        self.scheduler = self.scheduler_type(limits, lone_history, adaptive)
        self._runner = runner
        self._vocab_size = vocab_size
        self._eos = frozenset(eos)
        self._make_decoder = make_decoder
        self._seed = seed
        self._on_thread, self._may_go_on = on_thread, may_go_on
        self._drafter = drafter
        self._sink = sink
        self._tokenizer = tokenizer
        self._text_of = TokenTexts(tokenizer)
        self._checks = RequestChecks(
            limits, self.scheduler.blocks, vocab_size, self._eos, make_decoder is not None, sink is not None
        )
        self._saving: dict[int, tuple[Sequence, str, int | str | None]] = {}
        self._clock = clock
        self._counter = 0
        self._order = 0
        self._requests: dict[str, Request] = {}
        self._totals = EngineMetrics()

    # Requests

    def add_request(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams,
        request_id: str | None = None,
        prompt: str | None = None,
        num_drafts: int | None = None,
    ) -> Request:
        """Queues a request. Raises RequestError, and leaves no trace, if it cannot be served.

        num_drafts: the most at a time; None: as many as the engine can.
        """
        ids = self._checks.prompt(prompt_ids)
        max_output = self._checks.params(ids, params)
        shaping = shaping_of(params, len(ids), self._tokenizer)
        number = self._counter
        name = str(number) if request_id is None else request_id
        if name in self._requests:
            raise RequestError(f"request_id = {name!r}: already in use by a running request")
        output = RequestOutput(name, prompt, ids, [], finished=False)
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]  # nothing says how likely the first one is
        most = self.limits.num_speculative_tokens if num_drafts is None else num_drafts
        request = Request(output, params, self._seed_of(params, number), self._clock(), most, shaping)
        for sample in range(params.n):
            decoder = None
            if self._make_decoder is not None and params.detokenize:
                decoder = self._make_decoder(params.skip_special_tokens)
            out = CompletionOutput(sample)
            if params.logprobs is not None:
                out.logprobs, out.cumulative_logprob = [], 0.0
            output.outputs.append(out)
            gate = DraftGate(most)
            stopping = Stopping(params, self._eos, decoder, max_output)
            request.sequences.append(Sequence(request, out, self._order + sample, max_output, stopping, gate))
        self._counter += 1
        self._order += params.n
        self._totals.num_requests += 1
        self._requests[name] = request
        if params.n == 1:
            output.metrics = request.sequences[0].metrics
        for seq in request.sequences:
            self.scheduler.add(seq)
        return request

    def abort(self, request_id: str) -> None:
        """Ends a request now, with finish_reason "abort". An unknown or finished one is left alone."""
        request = self._requests.get(request_id)
        if request is not None:
            for seq in request.sequences:
                self._finish(seq, "abort", None)

    def abort_all(self) -> None:
        """Ends every request."""
        for name in list(self._requests):
            self.abort(name)

    def has_unfinished(self) -> bool:
        """Whether another step has something to do."""
        return bool(self._requests)

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no request holds."""
        return self.scheduler.blocks.num_free

    def metrics(self) -> EngineMetrics:
        """Counts since the start, running requests included."""
        total = EngineMetrics()
        for part in (self._totals, *(seq.metrics for seq in self._live())):
            total.add(part)
        for name in ("num_requests", "num_finished", "num_engine_steps"):
            setattr(total, name, getattr(self._totals, name))
        return total

    def _live(self) -> Iterable[Sequence]:
        return (seq for request in self._requests.values() for seq in request.sequences if seq.state != FINISHED)

    # A step

    def step(self) -> list[Delta]:
        """Computes one step and returns what it added. If the model fails, every request ends with an error.

        Call it on the thread that owns the model, or let :meth:`advance` do that.
        """
        plan = self.scheduler.schedule()
        if plan.empty:
            return self._without_a_step()
        try:
            results = self._execute(*self._works(plan))
        except Exception as error:
            return self._fail_all(failure(error))
        return self._take(plan, results)

    def advance(self, enough: Callable[[], bool]) -> None:
        """Steps until ``enough`` says that the caller has something to look at, or until somebody else's turn has come.

        No step is running afterwards. All of them are one call on the model's thread: handing over costs as much as a
        small step's host work.
        """
        self._on_thread(self._advance, enough)

    def _advance(self, enough: Callable[[], bool]) -> None:
        self.step()
        while self.has_unfinished() and self._may_go_on() and not enough():
            self.step()

    def _without_a_step(self) -> list[Delta]:
        if self._saving:
            return self._end_saved(wait_for_one=True)
        return self._fail_all("internal error: nothing can be scheduled") if self._requests else []

    def _works(self, plan: Plan) -> tuple[list[tuple[Work, bool]], list[Work]]:
        """What is to be computed: chunks, and whether each is its prompt's last; and rows."""
        return [(self._chunk_work(chunk), chunk.last) for chunk in plan.chunks], [self._row_work(r) for r in plan.rows]

    def _execute(self, chunks: list[tuple[Work, bool]], rows: list[Work]) -> Results:
        """All model calls of one step, on the model's thread."""
        read = [self._runner.prefill(work, last) for work, last in chunks]
        return read, self._runner.decode(rows) if rows else []

    def _take(self, plan: Plan, results: Results) -> list[Delta]:
        """Takes over what a step computed, but for sequences that have ended since it was planned."""
        now = self._clock()
        self._totals.num_engine_steps += 1
        deltas: list[Delta] = []
        for chunk, read in zip(plan.chunks, results[0]):
            if chunk.seq.state != FINISHED:
                self._take_chunk(chunk, read, now, deltas)
        for row, result in zip(plan.rows, results[1]):
            if row.seq.state != FINISHED:
                self._take_row(row, result, now, deltas)
        return deltas + self._end_saved(wait_for_one=False)

    def _chunk_work(self, chunk: Chunk) -> Work:
        seq, end = chunk.seq, chunk.start + chunk.size
        work = self._work(seq, seq.tokens[chunk.start : end], chunk.start, chunk.limit)
        if end < len(seq.tokens):
            work.next_token = seq.tokens[end]
        work.logprobs = work.logprobs and chunk.last
        work.prompt_logprobs = (
            seq.request.params.prompt_logprobs is not None and seq.num_output == 0 and seq.out.index == 0
        )
        return work

    def _row_work(self, row: Row) -> Work:
        seq = row.seq
        tokens = [seq.tokens[-1], *seq.drafts[: row.num_drafts]]
        return self._work(seq, tokens, len(seq.tokens) - 1, row.limit)

    def _work(self, seq: Sequence, tokens: list[int], start: int, limit: int) -> Work:
        """``block_table`` is the live list: whoever keeps it beyond the call copies it."""
        params = seq.request.params
        return Work(
            slot=seq.slot,
            tokens=tokens,
            start=start,
            block_table=seq.table,
            temperature=params.temperature,
            top_k=min(params.top_k, self._vocab_size),
            top_p=params.top_p,
            min_p=params.min_p,
            banned=seq.banned,
            banned_until=seq.banned_until,
            shaping=seq.request.shaping,
            logprobs=params.logprobs is not None,
            seed=seq.request.seed,
            sample=seq.out.index,
            output_index=seq.num_output,
            draft_limit=limit,
        )

    # Results

    def _take_chunk(self, chunk: Chunk, result: Result | None, now: float, deltas: list[Delta]) -> None:
        seq = chunk.seq
        if self._sink is not None and seq.out.index == 0 and result is not None and result.states is not None:
            self._sink.take(seq.order, seq.computed, result.states)
        if result is not None and result.prompt_logprobs is not None:
            self._tell_prompt(seq, result.prompt_logprobs)
        seq.computed += chunk.size
        if chunk.last and result is not None:
            seq.state = DECODE
            seq.first_token_at = now
            seq.metrics.time_to_first_token_s = now - seq.request.arrived
            if self._drafter is not None:
                self._drafter.start(seq.order, seq.tokens)
            deltas.append(self._emit(seq, result, 0, chunk.limit))
        elif seq.computed == seq.prefill_end and not chunk.last:
            # Resumed: its last token, and the drafts that it had, are decoded next.
            seq.state = DECODE

    def _take_row(self, row: Row, result: Result, now: float, deltas: list[Delta]) -> None:
        seq = row.seq
        seq.metrics.decode_seconds = now - (seq.first_token_at or now)
        accepted = result.num_accepted
        # A row that was planned before its drafts were there has at most as many as came, and as fit.
        drafted = min(row.num_drafts, len(seq.drafts), self.limits.max_model_len - len(seq.tokens))
        # The gate learns from what the model said, the metrics count what was emitted.
        seq.gate.record(drafted, accepted, row.limit)
        deltas.append(self._emit(seq, result, accepted, row.limit, drafted))

    def _emit(self, seq: Sequence, result: Result, accepted: int, limit: int, drafted: int | None = None) -> Delta:
        """Takes over a result's tokens up to the first that ends the sequence. drafted None: not a decode step."""
        out = seq.out
        kept: list[int] = []
        text, reason, stop = "", None, None
        for position, token in enumerate(result.tokens):
            if not 0 <= token < self._vocab_size:
                reason = "error"
                break
            kept.append(token)
            out.from_draft.append(position < accepted)
            released, reason, stop = seq.stopping.push(token)
            text += released
            if reason is not None:
                break
        seq.tokens += kept
        out.token_ids += kept
        if result.logprobs is not None and out.logprobs is not None:
            told = result.logprobs[: len(kept)]
            out.logprobs += entries(kept, told, seq.request.params.logprobs or 0, self._texts(seq))
            out.cumulative_logprob = sum((row[0] for row in told), out.cumulative_logprob or 0.0)
        drafting = result.draft_seconds
        if self._drafter is None:
            seq.drafts = result.drafts
        else:
            begin = self._clock()
            seq.drafts = self._draft(seq, kept, 0 if reason else limit)
            drafting = self._clock() - begin
        if drafted is not None:
            seq.metrics.count_step(drafted, accepted, len(kept), drafting, result.verify_seconds)
        out.text += text
        seq.request.touch()
        if reason == "error":
            shaping, banned = seq.request.shaping, seq.banned_until > len(seq.tokens)
            none_left = banned or (shaping is not None and shaping.bans)
            seq.request.output.error = NOT_FINITE + (NONE_LEFT if none_left else "")
            seq.request.failed = not none_left
        if reason is not None:
            self._finish(seq, reason, stop)
        return Delta(seq.request.output, out.index, text, kept)

    def _tell_prompt(self, seq: Sequence, rows: list[list[float]]) -> None:
        """Log-probabilities of the tokens behind those of a chunk. After a preemption some of them are known."""
        output, told = seq.request.output, seq.request.output.prompt_logprobs
        if told is not None:
            first = seq.computed + 1
            tokens = output.prompt_token_ids[len(told) : first + len(rows)]
            most = seq.request.params.prompt_logprobs or 0
            told.extend(entries(tokens, rows[len(told) - first :], most, self._texts(seq)))

    def _texts(self, seq: Sequence) -> Callable[[int], str | None]:
        return self._text_of if seq.request.params.detokenize else no_text

    def _draft(self, seq: Sequence, emitted: list[int], limit: int) -> list[int]:
        """Drafts of the host's own."""
        assert self._drafter is not None
        self._drafter.extend(seq.order, emitted)
        return self._drafter.draft(seq.order, limit) if limit else []

    def _finish(self, seq: Sequence, reason: str, stop: int | str | None) -> None:
        """Ends a sequence; its blocks and its slot come free. Does nothing to one that has ended."""
        if seq.state == FINISHED:
            if self._saving.pop(seq.order, None):
                self._drop(seq)
                self._end(seq, reason, stop)
            return
        self.scheduler.remove(seq)
        if self._drafter is not None and seq.first_token_at is not None:
            self._drafter.stop(seq.order)
        self._totals.add(seq.metrics)
        if reason in ("abort", "error"):
            seq.out.text += seq.stopping.close()
            self._drop(seq)
        elif self._sink is not None and seq.out.index == 0:
            self._saving[seq.order] = (seq, reason, stop)
            self._sink.write(seq.order, seq.request.output.request_id, seq.request.output.prompt_token_ids)
            return
        self._end(seq, reason, stop)

    def _drop(self, seq: Sequence) -> None:
        if self._sink is not None:
            self._sink.drop(seq.order)

    def _end_saved(self, wait_for_one: bool) -> list[Delta]:
        """Ends the sequences whose hidden states are in their file by now, or cannot be."""
        deltas = []
        for one in self._sink.written(wait_for_one) if self._sink is not None else ():
            seq, reason, stop = self._saving.pop(one.key)
            output = seq.request.output
            if one.error is None:
                output.kv_transfer_params = {"hidden_states_path": one.path}
            else:
                output.error, reason, stop = one.error, "error", None
            self._end(seq, reason, stop)
            deltas.append(Delta(output, seq.out.index, "", []))
        return deltas

    def _end(self, seq: Sequence, reason: str, stop: int | str | None) -> None:
        """Tells whoever waits that a sequence has ended."""
        request, out = seq.request, seq.out
        out.finish_reason, out.stop_reason = reason, stop
        request.touch()
        if all(one.finished() for one in request.output.outputs):
            if len(request.sequences) > 1:
                request.output.metrics = _together(request.sequences)
            request.output.finished = True
            self._totals.num_finished += 1
            del self._requests[request.output.request_id]

    def _fail_all(self, error: str) -> list[Delta]:
        deltas = []
        for request in list(self._requests.values()):
            running = [seq for seq in request.sequences if seq.state != FINISHED]
            if running:  # others wait for a file only
                request.output.error, request.failed = error, True
            for seq in running:
                self._finish(seq, "error", None)
                deltas.append(Delta(request.output, seq.out.index, "", []))
        return deltas

    def _seed_of(self, params: SamplingParams, number: int) -> int:
        """A request's seed, 0..2**64-1. No global generator is read or set."""
        if params.seed is not None:
            return params.seed
        if self._seed is None:
            return secrets.randbits(64)
        return request_seed(self._seed, number)


def failure(error: Exception) -> str:
    """What the requests of a step hear that the model has failed in."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"the model failed: {type(error).__name__}: {first}"


def _together(sequences: list[Sequence]) -> Metrics:
    """The metrics of a request with several samples. They ran side by side, so their time is the longest."""
    total = Metrics()
    for seq in sequences:
        total.add(seq.metrics)
    total.decode_seconds = max(seq.metrics.decode_seconds for seq in sequences)
    return total


__all__ = ["Engine", "EngineError", "Results", "call_here", "failure"]
