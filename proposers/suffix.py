"""Suffix decoding: what followed the end of the context before, in this request or in earlier responses.

See :mod:`ms_spec.proposers.suffix_tree` for the source. It runs on the host, needs no model and imports no MindSpore.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from ms_spec.proposers.suffix_tree import Tree, new_tree


def build_host(config: Any, max_model_len: int) -> SuffixProposer:
    """From the ``suffix_decoding_*`` fields and ``num_speculative_tokens`` (None: the depth of the trees)."""
    return SuffixProposer(
        config.suffix_decoding_max_tree_depth,
        config.suffix_decoding_max_cached_requests,
        config.suffix_decoding_max_spec_factor,
        config.suffix_decoding_min_token_prob,
        config.num_speculative_tokens,
        max_model_len,
    )


@dataclass
class _Running:
    tree: Tree
    recent: array[int]
    """Its last ids, as many as the trees are deep."""
    length: int


class SuffixProposer:
    """One tree for each running sequence (prompt and response) and one for all responses, also those that have ended.

    Args:
        max_tree_depth: longest suffixes that are counted; contexts are matched up to one token less.
        max_cached_requests: responses in the common tree. When a new sequence starts, the one that started first goes,
            even if it is still running. 0: no common tree.
        max_spec_factor: most drafts for each token of context that matched.
        min_token_prob: least probability of a draft and all before it, by the counts.
        num_drafts: most drafts; ``max_tree_depth`` if None.
        max_model_len: prompt and response are never longer; None: no limit.
        tree: makes an empty tree of a depth.

    Raises:
        ValueError: an argument out of range.
    """

    dense = False

    def __init__(
        self,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10000,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        num_drafts: int | None = None,
        max_model_len: int | None = None,
        tree: Callable[[int], Tree] = new_tree,
    ) -> None:
        _check("max_tree_depth", max_tree_depth, "an integer >= 1; use 24", max_tree_depth >= 1)
        _check("max_cached_requests", max_cached_requests, "an integer >= 0; use 10000", max_cached_requests >= 0)
        valid = max_spec_factor >= 0 and math.isfinite(max_spec_factor)
        _check("max_spec_factor", max_spec_factor, "a number >= 0; use 1.0", valid)
        _check("min_token_prob", min_token_prob, "a number from 0 to 1; use 0.1", 0 <= min_token_prob <= 1)
        self.num_drafts = max_tree_depth if num_drafts is None else num_drafts
        _check("num_drafts", self.num_drafts, "an integer >= 1; use 24", self.num_drafts >= 1)
        self._depth = max_tree_depth
        self._max_cached = max_cached_requests
        # A larger factor allows no more drafts than this one, and might not fit into a float32.
        self._factor = min(max_spec_factor, float(self.num_drafts))
        self._min_prob = min_token_prob
        self._max_len = max_model_len
        self._tree = tree
        self._running: dict[Hashable, _Running] = {}
        self._common = tree(max_tree_depth)
        self._cached: dict[Hashable, int] = {}
        """Numbers in the common tree, in the order of starts."""
        self._starts = 0

    def start(self, key: Hashable, prompt_ids: Sequence[int]) -> None:
        """A new sequence. What an ended one of the same key left in the common tree is forgotten.

        Raises:
            ValueError: it is running already.
        """
        if key in self._running:
            raise ValueError(f"key = {key!r}: is running already; stop it first, or use another key")
        ids, tree = array("i", prompt_ids), self._tree(self._depth)
        tree.append(0, ids)
        self._running[key] = _Running(tree, ids[-self._depth :], len(ids))
        self._forget(key)
        if self._max_cached:
            self._starts += 1
            self._cached[key] = self._starts
            while len(self._cached) > self._max_cached:
                self._forget(next(iter(self._cached)))

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """Emitted ids. ValueError: not started."""
        running, ids = self._of(key), array("i", token_ids)
        running.tree.append(0, ids)
        running.recent = (running.recent + ids)[-self._depth :]
        running.length += len(ids)
        if key in self._cached:
            self._common.append(self._cached[key], ids)

    def draft(self, key: Hashable, limit: int) -> list[int]:
        """At most ``limit`` ids, from the tree with the better score, its own if equal. ValueError: not started."""
        running = self._of(key)
        most = min(limit, self.num_drafts)
        if self._max_len is not None:
            most = min(most, self._max_len - running.length - 1)
        if most <= 0:
            return []
        query = (running.recent, most, self._factor, self._min_prob)
        own, own_score = running.tree.draft(*query)
        common, common_score = self._common.draft(*query)
        return own if own_score >= common_score else common

    def stop(self, key: Hashable) -> None:
        """The sequence has ended, or never started. The common tree keeps its response."""
        self._running.pop(key, None)

    def _of(self, key: Hashable) -> _Running:
        if key not in self._running:
            raise ValueError(f"key = {key!r}: is not running; start it first")
        return self._running[key]

    def _forget(self, key: Hashable) -> None:
        number = self._cached.pop(key, None)
        if number is not None:
            self._common.remove(number)


def _check(field: str, value: Any, wanted: str, valid: bool) -> None:
    if not valid:
        raise ValueError(f"{field} = {value!r}: must be {wanted}")
