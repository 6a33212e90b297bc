"""A runner without a model: a hash decides the next token. It checks every promise that the engine makes to a runner.

The toy model's next token depends on the last two tokens of the *cache content* (so a wrong cache shows in the text),
on the uniform of that output position where the request samples, and on nothing else. It repeats itself often
enough for an n-gram lookup to find something.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from ms_spec.engine import Engine
from ms_spec.limits import Limits
from ms_spec.overlap import OverlappedEngine
from ms_spec.sampling_params import SamplingParams
from ms_spec.work import Result, Work

VOCAB = 64


def digest(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "little")


def next_token(context: list[int], params, seed: int, sample: int, index: int, banned=()) -> int:
    """The token after ``context``, which is output number ``index`` of its request."""
    ranked = sorted(range(12), key=lambda k: digest("rank", context[-2:], k))
    allowed = [digest("token", context[-1:], k) % VOCAB for k in ranked]
    allowed = [token for token in allowed if token not in banned] or [t for t in range(VOCAB) if t not in banned][:1]
    if params.temperature == 0:
        return allowed[0]
    return allowed[digest("u", seed, sample, index) % min(4, len(allowed))]


def reference(prompt, params, eos=(), seed=0, sample=0, max_model_len=10**9) -> list[int]:
    """Plain decoding, one token at a time."""
    tokens, out = list(prompt), []
    most = max_model_len - len(prompt)
    most = most if params.max_tokens is None else min(most, params.max_tokens)
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    while len(out) < most:
        banned = ends if len(out) < params.min_tokens else ()
        out.append(next_token(tokens + out, params, seed, sample, len(out), banned))
        if out[-1] in ends and len(out) > params.min_tokens:
            break
    return out


@dataclass
class ToyRunner:
    """``drafter``: ngram, oracle, oracle<i> (i right ones, then a wrong one), junk, alternate (the two), none."""

    limits: Limits
    drafter: str = "ngram"
    poison: int = -1
    """The request with this seed gets NaN at output index ``poison_at``."""
    poison_at: int = 0
    fail_at: int = -1
    """The number of the decode call that raises."""
    num_compiled: int = 0
    cache: dict[tuple[int, int], int] = field(default_factory=dict)
    history: dict[int, list[int]] = field(default_factory=dict)
    drafts: dict[int, list[int]] = field(default_factory=dict)
    rounds: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, drafts verified, drafts accepted) of every decoded request."""
    carried: int = 0
    """Requests that were decoded before the results of the step before were asked for."""
    calls: int = 0
    step_tokens: int = 0

    @property
    def num_blocks(self) -> int:
        return self.limits.num_blocks

    def _write(self, work: Work) -> None:
        size = self.limits.block_size
        assert 1 <= work.slot <= self.limits.max_num_seqs
        assert len(set(work.block_table)) == len(work.block_table)
        assert all(1 <= block < self.num_blocks for block in work.block_table)
        limit = min(work.draft_limit, self.limits.num_speculative_tokens)
        assert len(work.block_table) * size >= self.limits.span(work.start + len(work.tokens), limit)
        assert work.start + len(work.tokens) <= self.limits.max_model_len
        assert all(0 <= token < VOCAB for token in work.tokens)
        self.step_tokens += len(work.tokens)
        for position, token in enumerate(work.tokens, work.start):
            self.cache[work.block_table[position // size], position % size] = token

    def _context(self, work: Work, stop: int) -> list[int]:
        """Tokens 0..stop-1 as the cache has them."""
        size = self.limits.block_size
        return [self.cache[work.block_table[p // size], p % size] for p in range(stop)]

    def _sample(self, work: Work, context: list[int], index: int) -> int:
        if work.seed == self.poison and index == self.poison_at:
            return -1
        banned = work.banned if len(context) < work.banned_until else ()
        return next_token(context, work, work.seed, work.sample, index, banned)

    def _draft(self, work: Work, tokens: list[int]) -> list[int]:
        limit = min(work.draft_limit, self.limits.num_speculative_tokens)
        assert work.draft_limit >= 0
        kind = self.drafter
        if kind == "alternate":
            kind = "oracle" if len(self.rounds) % 2 else "junk"
        if kind == "none" or limit == 0 or tokens[-1] < 0:
            return []
        if kind == "ngram":
            for size in (4, 3, 2, 1):
                for begin in range(len(tokens) - size):
                    if tokens[begin : begin + size] == tokens[-size:]:
                        return tokens[begin + size : begin + size + limit]
            return []
        right = {"oracle": limit, "junk": 0}.get(kind)
        right = int(kind[6:]) if right is None else right
        drafts: list[int] = []
        first_output = work.start + (len(work.tokens) if work.output_index == 0 else 1) - work.output_index
        index = len(tokens) - first_output
        for step in range(limit):
            banned = work.banned if len(tokens) + step < work.banned_until else ()
            true = next_token(tokens + drafts, work, work.seed, work.sample, index + step, banned)
            drafts.append(true if step < right else (true + 1) % VOCAB)
        return drafts

    def prefill(self, work: Work, last: bool) -> Result | None:
        if work.start == 0:
            self.history[work.slot] = []
        history = self.history[work.slot]
        assert len(work.tokens) >= 1
        assert work.start == len(history), "chunks have to follow each other"
        assert self._context(work, work.start) == history, "the cache lost what an earlier chunk wrote"
        self._write(work)
        history += work.tokens
        if not last:
            return None
        assert work.output_index == 0, "only a fresh prompt samples"
        token = self._sample(work, history, 0)
        history.append(token)
        self.drafts[work.slot] = self._draft(work, history)
        return Result([token], self.drafts[work.slot])

    def decode(self, works: list[Work]) -> list[Result]:
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError("out of luck\nsecond line")
        assert works and len({work.slot for work in works}) == len(works)
        owned = [block for work in works for block in work.block_table]
        assert len(set(owned)) == len(owned), "two requests share a block"
        works = [self._found(work) if work.carried else work for work in works]
        for work in works:
            self._write(work)
        return [self._verify(work) for work in works]

    def _found(self, work: Work) -> Work:
        """What the request's last step has left decides."""
        history = self.history[work.slot]
        start = len(history) - 1
        assert work.start <= start <= work.start + work.slack
        tokens = [history[-1], *self.drafts[work.slot]][: len(work.tokens)][: self.limits.max_model_len - start]
        self.carried += 1
        tokens = [] if tokens[:1] == [-1] else tokens  # its last logits were not finite
        return replace(work, tokens=tokens, start=start, output_index=work.output_index + start - work.start)

    def _verify(self, work: Work) -> Result:
        history = self.history[work.slot]
        if not work.tokens:
            return Result([-1], [])  # nobody looks at it
        if work.start == len(history):  # resumed: the last token was not part of the prefill
            history.append(work.tokens[0])
        assert work.start == len(history) - 1
        assert work.tokens[0] == history[-1]
        assert self._context(work, work.start + 1) == history, "a committed position was overwritten"
        drafts, out = work.tokens[1:], []
        assert len(drafts) <= self.limits.num_speculative_tokens
        for position in range(len(drafts) + 1):
            context = self._context(work, work.start + 1 + position)
            out.append(self._sample(work, context, work.output_index + position))
            if position == len(drafts) or out[-1] != drafts[position]:
                break
        history += out
        self.rounds.append((work.slot, len(drafts), len(out) - 1))
        self.drafts[work.slot] = self._draft(work, history)
        return Result(out, self.drafts[work.slot], len(out) - 1)


class ToyDecoder:
    """Token 0 is "a0 ", token 1 "b1 " and so on; every fifth token holds its text back until the next one."""

    def __init__(self, skip_special: bool = True) -> None:
        self._held = ""

    @staticmethod
    def text(token: int) -> str:
        return f"{chr(97 + token % 26)}{token} "

    def push(self, ids) -> str:
        text = self._held + "".join(map(self.text, ids))
        self._held = text if ids[-1] % 5 == 0 else ""
        return "" if self._held else text

    def finish(self) -> str:
        text, self._held = self._held, ""
        return text


def toy_limits(**changes) -> Limits:
    sizes = {
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "num_blocks": 4 * 32 + 1,
        "prefill_chunk": 16,
        "num_speculative_tokens": 4,
    }
    sizes.update(changes)
    return Limits(**sizes)


class Later(Future):
    """A call that is made when somebody wants its result, and not before."""

    def __init__(self, waiting: list[Later], function, arguments) -> None:
        super().__init__()
        self.waiting, self.function, self.arguments = waiting, function, arguments

    def result(self, timeout=None):
        self._call()
        return super().result(timeout)

    def exception(self, timeout=None):
        self._call()
        return super().exception(timeout)

    def _call(self) -> None:
        while not self.done():
            first = self.waiting.pop(0)
            try:
                first.set_result(first.function(*first.arguments))
            except Exception as error:
                first.set_exception(error)


class LastMoment:
    """Calls in their order, as late as possible: what the caller changes meanwhile must not matter."""

    def __init__(self) -> None:
        self.waiting: list[Later] = []

    def submit(self, function, *arguments) -> Later:
        self.waiting.append(Later(self.waiting, function, arguments))
        return self.waiting[-1]


def toy_engine(
    drafter: str = "ngram",
    eos=(),
    text: bool = False,
    runner=None,
    adaptive: bool = True,
    overlapped: bool = False,
    **changes,
):
    """An engine on a toy runner, and the runner. ``overlapped``: it plans while steps have not run."""
    limits = toy_limits(**changes)
    runner = ToyRunner(limits, drafter) if runner is None else runner
    parts = runner, limits, VOCAB, eos, ToyDecoder if text else None
    if overlapped:
        return OverlappedEngine(*parts, adaptive=adaptive, submit=LastMoment().submit), runner
    return Engine(*parts, adaptive=adaptive), runner


def finish(engine: Engine, limit: int = 20_000) -> None:
    """Steps until nothing is left, then checks that nothing is left behind."""
    for _ in range(limit):
        if not engine.has_unfinished():
            break
        checked_step(engine)
    assert not engine.has_unfinished()
    idle(engine)


def checked_step(engine: Engine):
    """One step; budget and ownership are checked."""
    engine._runner.step_tokens = 0
    deltas = engine.step()
    assert engine._runner.step_tokens <= engine.limits.max_num_batched_tokens
    tables = [block for seq in engine.scheduler.running for block in seq.table]
    assert len(set(tables)) == len(tables)
    assert len(tables) + engine.num_free_blocks == engine.limits.num_blocks - 1
    slots = [seq.slot for seq in engine.scheduler.running]
    assert len(set(slots)) == len(slots)
    orders = [seq.order for seq in engine.scheduler.running]
    assert orders == sorted(orders)
    return deltas


def idle(engine: Engine) -> None:
    """Every block and slot is free."""
    assert engine.num_free_blocks == engine.limits.num_blocks - 1
    assert sorted(engine.scheduler._slots) == list(range(1, engine.limits.max_num_seqs + 1))
    assert not engine.scheduler.running and not engine.scheduler.waiting


def greedy(max_tokens=20, **fields) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def sampled(seed, max_tokens=20, **fields) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, **fields)


def run(engine: Engine, jobs):
    """Runs (prompt ids, params) jobs together; the outputs in order."""
    requests = [engine.add_request(prompt, params) for prompt, params in jobs]
    finish(engine)
    return [request.output for request in requests]
