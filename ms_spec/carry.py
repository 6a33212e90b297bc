"""What a step leaves on the device for the one after it, so that the host can hand that over before it has looked.

By slot: the number of committed ids, and the drafts that follow them. Every step writes it; a decode step reads it for
the requests that are ``carried``. The host then knows neither where they begin nor their tokens, but how many there can
be: it gives the least place, and as many tokens as are possible, whichever they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_spec.models.ops.interface import Backend


def new_carry(max_num_seqs: int, num_drafts: int) -> Parameter:
    """int32 [max_num_seqs + 1, 1 + K], by slot: length, drafts (-1: none)."""
    return Parameter(Tensor(np.ones((max_num_seqs + 1, 1 + num_drafts), np.int32)), name="carry", requires_grad=False)


def leave(write: Any, carry: Any, slot: Any, length: Any, drafts: Any = None) -> None:
    """Writes length int32 [n] and drafts int32 [n, K] (None: K = 0) with a WriteHistory. Part of a graph."""
    length = length.reshape(-1, 1)
    write(carry, slot, ops.zeros_like(slot), length if drafts is None else ops.cat((length, drafts), 1), slot)


class CarriedStep(nn.Cell):
    """A decode step with one input more, behind ``uniforms``: carried int32 [n], 1 where the carry says what to do.

    There ``start`` is the least that it can be, ``tokens`` are 0 in as many columns as there may be tokens (else -1),
    and ``uniforms`` are those of the output positions from the one of ``start`` on. Only for rules with one number an
    output position, and for drafts that are not drawn.
    """

    def __init__(self, step: nn.Cell, backend: Backend) -> None:
        super().__init__()
        self.step = step
        self.read = backend.ReadCarry()

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
        carried,
        *more,
    ):
        tokens, start, uniforms = self.read(self.step.history, self.step.carry, slot, tokens, start, carried, uniforms)
        return self.step(
            *(bias, bad_words, slot, tokens, start, block_tables, bounds, sampling, banned, banned_until),
            *(penalties, asked, limit, next_token, uniforms, *more),
        )
