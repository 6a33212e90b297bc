"""Drafts nothing: the states that it taps go to the host, to train drafts of other methods with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import nn, ops

from ms_spec.proposers.base import Site, Weightless


def build(config: Any, backend: Any, site: Site) -> ExtractProposer:
    """From ``hidden_layer_ids``."""
    return ExtractProposer(config.hidden_layer_ids)


class ExtractProposer(Weightless, nn.Cell):
    """Taps the target's states. See :class:`ms_spec.proposers.base.Proposer`.

    ``exported``: prefill graphs return what it taps, and no decode graphs are needed.
    """

    num_drafts = 1
    exported = True

    def __init__(self, taps: Sequence[int]) -> None:
        super().__init__()
        self.taps = tuple(taps)

    def construct(
        self, history, slot, length, tokens, following, last, start, rows, features, limit, bounds, sampling, uniforms
    ):
        return ops.full_like(tokens[:, :1], -1), limit * 0
