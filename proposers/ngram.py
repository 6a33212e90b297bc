"""Prompt lookup: what followed the last few ids when they occurred before is likely to follow them again.

After Saxena, "Prompt Lookup Decoding" (2023). No model, no state: only the history of committed ids.
"""

from __future__ import annotations

from typing import Any

from mindspore import nn

from ms_spec.proposers.base import Site, Weightless


def build(config: Any, backend: Any, site: Site) -> NgramProposer:
    """From ``prompt_lookup_min``, ``prompt_lookup_max`` and ``num_speculative_tokens``."""
    return NgramProposer(backend, config.prompt_lookup_min, config.prompt_lookup_max, config.num_speculative_tokens)


class NgramProposer(Weightless, nn.Cell):
    """Drafts what followed the earliest occurrence of the longest n-gram that ends the context.

    See :class:`ms_spec.proposers.base.Proposer`. n-grams of ``min_n`` to ``max_n`` ids count; drafts stop at the
    context's end.
    """

    def __init__(self, backend: Any, min_n: int, max_n: int, num_drafts: int) -> None:
        super().__init__()
        self.num_drafts = num_drafts
        self.lookup = backend.NgramLookup(min_n, max_n, num_drafts)

    def construct(
        self, history, slot, length, tokens, following, last, start, rows, features, limit, bounds, sampling, uniforms
    ):
        return self.lookup(history, slot, length, limit)
