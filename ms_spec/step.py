"""The compiled steps: forward pass, verification, commitment and the next drafts as one graph.

Inputs of both, n requests of w columns (``slot`` 0 is padding):

============  ===================  ==================================================================
bias          float32 [S, V]       by slot: see ``shaping`` in :mod:`ms_spec.models.ops.interface`
bad_words     int32 [S, W, M]      by slot: the same
slot          int32 [n]            row of the device state
tokens        int32 [n, w]         decode: last committed token, then drafts; prefill: a chunk; -1: none
start         int32 [n]            absolute position of column 0
block_tables  int32 [n, B]         physical KV blocks
bounds        int32 [n * w] or [1] upper bounds of the rows' attention lengths, where the device wants them
sampling      float32 [n, 4]       temperature, top_k, top_p, min_p
banned        int32 [n, E]         ids that may not be emitted at positions below ``banned_until``; -1: none
banned_until  int32 [n]            absolute positions
penalties     float32 [n, 3]       repetition, frequency, presence
asked         int32 [n, A]         numbers and switches, see ``ASKED`` in :mod:`ms_spec.models.ops.interface`
limit         int32 [n]            the most drafts to propose
next_token    int32 [n]            prefill: the token behind the chunk, -1: it is to be sampled; decode: not looked at
uniforms      float32 [n, w + K]   random numbers in [0, 1): w to verify with (prefill: 1), K to draft with
============  ===================  ==================================================================

Where the device wants bounds, those of the proposer's own grids follow, one tensor each.

The output is int32 [n, 5 + w + K]: number emitted, number accepted, number of next drafts, when drafting began (two
numbers, see ``Stamp``), the emitted tokens (-1 behind the end), the next drafts. One tensor, because the host pays for
each that it reads. A second output is what ``Logprobs`` says of the emitted tokens, float32 [n, columns, 2 + 2 N], of
requests that ask for it; the host reads it if one does. The prefill step of the smallest chunk has w columns more in
it: the prompt's tokens that follow its own. With a proposer that is ``exported`` a prefill step also returns what it
taps, float32 [w, taps, hidden], the chunk's tokens first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_spec.carry import leave
from ms_spec.models.decoder import Decoder
from ms_spec.models.ops.constants import numbers
from ms_spec.models.ops.interface import ASKED, Backend


def new_history(max_num_seqs: int, max_len: int) -> Parameter:
    """Committed ids, int32 [max_num_seqs + 1, max_len + 1]: one row a slot, the last column for what does not fit."""
    ids = np.zeros((max_num_seqs + 1, max_len + 1), np.int32)
    return Parameter(Tensor(ids), name="history", requires_grad=False)


class _Step(nn.Cell):
    """``proposer``: see :class:`ms_spec.proposers.base.Proposer`; None without one. ``max_logprobs``: N.

    ``carry``: see :mod:`ms_spec.carry`; None: nothing is left there.
    """

    def __init__(
        self,
        target: Decoder,
        backend: Backend,
        rule: nn.Cell,
        history: Parameter,
        proposer: Any,
        max_logprobs: int,
        carry: Parameter | None = None,
    ) -> None:
        super().__init__()
        self.target, self.rule, self.proposer = target, rule, proposer
        self.history, self.carry = history, carry
        self.write = backend.WriteHistory()
        self.stamp = backend.Stamp()
        self.max_logprobs = max_logprobs
        self.logprobs = backend.Logprobs(max_logprobs, ASKED.index("logprobs"))
        taps = () if proposer is None else proposer.taps
        self.taps = tuple(target.kept.index(tap) if tap >= 0 else tap for tap in taps)
        self.dense = proposer is not None and proposer.dense
        self.exported = getattr(proposer, "exported", False)

    def features(self, states, rows):
        """What the proposer wants to see of the target's states."""
        seen: tuple[Any, ...] = ()
        for tap in self.taps:
            seen += (self.target.normed(states[-1], rows) if tap < 0 else states[tap],)
        return seen

    def logits(self, state, rows):
        """-> logits and rows of those that something is emitted from."""
        raise NotImplementedError

    def verify(self, logits, rows, slot, tokens, sampling, banned, banned_until, uniforms, shaping):
        """-> emitted, num_emitted, num_accepted, as the rule gives them."""
        raise NotImplementedError

    def scores(self, logits, looked_at, state, rows, emitted, following, asked):
        """Log-probabilities of what was emitted."""
        return self.logprobs(logits, looked_at, emitted, asked)

    def commit(self, slot, tokens, start, emitted, num_emitted, next_token):
        """Writes the history -> its length int32 [n], following int32 [n, w], last int32 [n] (see Proposer)."""
        raise NotImplementedError

    def construct(
        self,
        bias,
        bad_words,
        slot,
        tokens,
        start,
        block_tables,
        bounds,
        sampling,
        banned,
        banned_until,
        penalties,
        asked,
        limit,
        next_token,
        uniforms,
        *more,
    ):
        rows = self.target.rows(tokens, start, block_tables, bounds)
        states = self.target(rows)
        logits, looked_at = self.logits(states[-1], rows)
        shaping = (penalties, asked, bias, bad_words, self.history, slot, tokens, start)
        emitted, num_emitted, num_accepted = self.verify(
            logits, looked_at, slot, tokens, sampling, banned, banned_until, uniforms, shaping
        )
        length, following, last = self.commit(slot, tokens, start, emitted, num_emitted, next_token)
        scores = self.scores(logits, looked_at, states[-1], rows, emitted, following, asked)
        head = (num_emitted.reshape(-1, 1), num_accepted.reshape(-1, 1))
        if self.proposer is None:
            if self.carry is not None:
                leave(self.write, self.carry, slot, length)
            return ops.cat((*head, ops.zeros((emitted.shape[0], 3), emitted.dtype), emitted), 1), scores
        length, time = self.stamp(length)
        features, drawn = self.features(states, rows), uniforms[:, emitted.shape[1] :]
        drafts, counts = self.proposer(
            *(self.history, slot, length, tokens, following, last, start, rows, features),
            *(limit, more or (bounds,), sampling, drawn),
        )
        if self.carry is not None:
            leave(self.write, self.carry, slot, length, drafts)
        time = ops.broadcast_to(time.reshape(1, 2), (emitted.shape[0], 2))
        packed = ops.cat((*head, counts.reshape(-1, 1), time, emitted, drafts), 1)
        return (packed, scores, ops.stack(features, 1).astype(sampling.dtype)) if self.exported else (packed, scores)


class DecodeStep(_Step):
    """Verifies w - 1 drafts a request, commits what was accepted and one token more, proposes the next drafts."""

    def logits(self, state, rows):
        return self.target.head(state, rows), rows

    def verify(self, logits, rows, slot, tokens, sampling, banned, banned_until, uniforms, shaping):
        width, drafts = tokens.shape[1], tokens[:, 1:]
        draft_probs = ops.gather(self.proposer.probs, slot, 0)[:, : width - 1] if self.dense and width > 1 else None
        return self.rule(
            logits, rows, drafts, draft_probs, sampling, banned, banned_until, uniforms[:, :width], shaping
        )

    def commit(self, slot, tokens, start, emitted, num_emitted, next_token):
        # Column 0 is written again: after a preemption nothing else has put it there.
        committed = ops.cat((tokens[:, :1], emitted), 1)
        length = self.write(self.history, slot, start, committed, num_emitted + 1)
        return length, emitted, num_emitted - 1


class PrefillStep(_Step):
    """One chunk of one request's prompt. Samples behind its last token; unfinished prompts ignore what comes of it.

    ``scored``: it can also tell the log-probabilities of the prompt.
    """

    def __init__(self, target: Decoder, backend: Backend, *parts: Any, scored: bool) -> None:
        super().__init__(target, backend, *parts)
        self.pick = backend.Pick()
        self.scored = scored
        self.switch = ASKED.index("prompt_logprobs")
        self.prompt_logprobs = backend.Logprobs(self.max_logprobs, self.switch)

    def logits(self, state, rows):
        picked, last_row = self.pick(state, rows)
        return self.target.head(picked, last_row), last_row

    def verify(self, logits, rows, slot, tokens, sampling, banned, banned_until, uniforms, shaping):
        drafts = tokens[:, :0]
        return self.rule(logits, rows, drafts, None, sampling, banned, banned_until, uniforms[:, :1], shaping)

    def scores(self, logits, looked_at, state, rows, emitted, following, asked):
        told = self.logprobs(logits, looked_at, emitted, asked)
        if not self.scored:
            return told
        # Without a request for them all rows are dead, and cost nothing where dead rows do.
        rows = (*rows[:4], rows[4] * asked[:, self.switch], *rows[5:])
        return ops.cat((told, self.prompt_logprobs(self.target.head(state, rows), rows, following, asked)), 1)

    def commit(self, slot, tokens, start, emitted, num_emitted, next_token):
        count = (tokens >= 0).astype(start.dtype).sum(1).astype(start.dtype)
        # The chunk moved by one column; behind its last token what follows it.
        last, newest = count - 1, ops.select(next_token >= 0, next_token, emitted[:, 0])
        behind = ops.broadcast_to(newest.reshape(-1, 1), tokens.shape)
        moved = ops.cat((tokens[:, 1:], tokens[:, :1] * 0 - 1), 1)
        following = ops.select(numbers(tokens.shape[1]) == last.reshape(-1, 1), behind, moved)
        length = self.write(self.history, slot, start, ops.cat((tokens[:, :1], following), 1), count + num_emitted)
        return length, following, ops.maximum(last, 0)
