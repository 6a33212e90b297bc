"""From a drafter's logits to the drafted token: the best one, or one drawn from its distribution."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_spec.models.ops.constants import numbers
from ms_spec.proposers.base import Site


def draft_probs(config: Any, site: Site) -> Parameter | None:
    """Room for the distributions of all requests' drafts, float32 [max_num_seqs + 1, K, V], by slot.

    None where ``config`` (``speculative_config``) draws no drafts.
    """
    if config.draft_sample_method != "probabilistic":
        return None
    shape = (site.max_num_seqs + 1, config.num_speculative_tokens, site.target.config.vocab_size)
    return Parameter(Tensor(np.zeros(shape, np.float32)), name="draft_probs", requires_grad=False)


def counted(drafts: Tensor) -> Tensor:
    """int32 [n]: how many of each request's drafts [n, K] there are."""
    return (drafts >= 0).astype(drafts.dtype).sum(1).astype(drafts.dtype)


class Draw(nn.Cell):
    """(logits [R, Vd], rows in a grid of w columns, place, slot int32 [n], sampling float32 [n, 4], uniforms [n, w])
    -> int32 [n, w], ids of the target's vocabulary; -1 for dead cells and where the logits are no distribution.

    ``place``: number of the first column's draft. ``probs`` None: the best tokens. Otherwise some drawn at the
    request's temperature, nothing filtered, and the distribution of column c is kept in ``probs[slot, place + c]``.
    ``token_map``: int32 [Vd], the target's id of each draft id; None where they are the same.
    """

    def __init__(self, backend: Any, probs: Parameter | None, token_map: np.ndarray | None = None) -> None:
        super().__init__()
        self.probs: Any = probs
        self.reduced = token_map is not None
        ids = np.zeros(1) if token_map is None else token_map
        self.token_map = Tensor(np.ascontiguousarray(ids, np.int32))
        self.to_target = Tensor(np.concatenate([[-1], ids]).astype(np.int32))  # that of -1 comes first
        self.best = backend.Argmax()
        self.spread = backend.Probs()
        self.draw = backend.InverseCDF()
        self.grid = backend.Grid()
        self.unfiltered = Tensor(np.array([[1, 0, 0, 0]], np.float32)), Tensor(np.array([[0, 0, 1, 0]], np.float32))
        self.nobody = Tensor(np.full((1, 1), -1, np.int32))

    def construct(self, logits, rows, place, slot, sampling, uniforms):
        if self.probs is None:
            token = self.best(logits, rows)
        else:
            temperature_only = sampling * self.unfiltered[0] + self.unfiltered[1]
            nobody = ops.broadcast_to(self.nobody, (slot.shape[0], 1))
            q = self.spread(logits, rows, temperature_only, nobody, ops.zeros_like(slot))
            token = self.draw(q, rows, uniforms)
            self.keep(self.grid(q, rows), place, slot)
        if not self.reduced:
            return token
        return ops.gather(self.to_target, token + 1, 0)

    def keep(self, q, place, slot):
        """Puts q [n, w, Vd] into ``probs``, each column where the target has its token."""
        n, w, _ = q.shape
        if self.reduced:
            wide = ops.zeros((n, w, self.probs.shape[2]), ms.float32)
            index = ops.broadcast_to(self.token_map.reshape(1, 1, -1), q.shape)
            q = ops.tensor_scatter_elements(wide, index, q, 2)
        column = ops.broadcast_to((numbers(w) + place).reshape(1, w), (n, w))
        where = ops.stack((ops.broadcast_to(slot.reshape(-1, 1), (n, w)), column), 2)
        ops.ScatterNdUpdate()(self.probs, where, q)
