"""The compiled steps: forward pass, verification, commitment and the next drafts as one graph.

Inputs of both, n requests of w columns (``slot`` 0 is padding):

============  ===================  ==================================================================
slot          int32 [n]            row of the device state
tokens        int32 [n, w]         decode: last committed token, then drafts; prefill: a chunk; -1: none
start         int32 [n]            absolute position of column 0
block_tables  int32 [n, B]         physical KV blocks
bounds        int32 [n * w] or [1] upper bounds of the rows' attention lengths, where the device wants them
sampling      float32 [n, 4]       temperature, top_k, top_p, min_p
banned        int32 [n, E]         ids that may not be emitted at positions below ``banned_until``; -1: none
banned_until  int32 [n]            absolute positions
limit         int32 [n]            the most drafts to propose
uniforms      float32 [n, 2 * w]   random numbers in [0, 1) (prefill: w = 1)
============  ===================  ==================================================================

The output is int32 [n, 3 + w + K]: number emitted, number accepted, number of next drafts, the emitted tokens (-1
behind the end), the next drafts. One tensor, because the host pays for each that it reads.
"""

from __future__ import annotations

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_spec.models.decoder import Decoder
from ms_spec.models.ops.interface import Backend


def new_history(max_num_seqs: int, max_len: int) -> Parameter:
    """Committed ids, int32 [max_num_seqs + 1, max_len + 1]: one row a slot, the last column for what does not fit."""
    ids = np.zeros((max_num_seqs + 1, max_len + 1), np.int32)
    return Parameter(Tensor(ids), name="history", requires_grad=False)


class _Step(nn.Cell):
    def __init__(self, target: Decoder, backend: Backend, rule: nn.Cell, history: Parameter, proposer: nn.Cell | None):
        super().__init__()
        self.target, self.rule, self.proposer = target, rule, proposer
        self.history = history
        self.write = backend.WriteHistory()

    def finish(self, slot, rows, hidden, length, emitted, num_emitted, num_accepted, limit):
        """Proposes and packs the output."""
        head = (num_emitted.reshape(-1, 1), num_accepted.reshape(-1, 1))
        if self.proposer is None:
            return ops.cat((*head, num_accepted.reshape(-1, 1) * 0, emitted), 1)
        drafts, counts = self.proposer(self.history, slot, length, emitted, num_emitted, hidden, rows, limit)
        return ops.cat((*head, counts.reshape(-1, 1), emitted, drafts), 1)


class DecodeStep(_Step):
    """Verifies w - 1 drafts a request, commits what was accepted and one token more, proposes the next drafts."""

    def construct(self, slot, tokens, start, block_tables, bounds, sampling, banned, banned_until, limit, uniforms):
        rows = self.target.rows(tokens, start, block_tables, bounds)
        hidden = self.target(rows)
        logits = self.target.head(hidden, rows)
        emitted, num_emitted, num_accepted = self.rule(
            logits, rows, tokens[:, 1:], None, sampling, banned, banned_until, uniforms
        )
        # Column 0 is written again: after a preemption nothing else has put it there.
        committed = ops.cat((tokens[:, :1], emitted), 1)
        length = self.write(self.history, slot, start, committed, num_emitted + 1)
        return self.finish(slot, rows, hidden, length, emitted, num_emitted, num_accepted, limit)


class PrefillStep(_Step):
    """One chunk of one request's prompt. Samples behind its last token; unfinished prompts ignore what comes of it."""

    def __init__(self, target: Decoder, backend: Backend, rule: nn.Cell, history: Parameter, proposer: nn.Cell | None):
        super().__init__(target, backend, rule, history, proposer)
        self.pick = backend.Pick()

    def construct(self, slot, tokens, start, block_tables, bounds, sampling, banned, banned_until, limit, uniforms):
        rows = self.target.rows(tokens, start, block_tables, bounds)
        hidden = self.target(rows)
        last, last_row = self.pick(hidden, rows)
        logits = self.target.head(last, last_row)
        emitted, num_emitted, num_accepted = self.rule(
            logits, last_row, tokens[:, :0], None, sampling, banned, banned_until, uniforms
        )
        end = self.write(
            self.history, slot, start, tokens, (tokens >= 0).astype(start.dtype).sum(1).astype(start.dtype)
        )
        length = self.write(self.history, slot, end, emitted, num_emitted)
        return self.finish(slot, rows, hidden, length, emitted, num_emitted, num_accepted, limit)
