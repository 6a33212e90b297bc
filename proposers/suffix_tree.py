"""Suffix trees: which tokens came behind which context, and how often.

Suffix decoding is described by Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI
Applications" (2024). Counts, order of children, scores and drafts equal those of Arctic Inference
(snowflakedb/ArcticInference).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from array import array
from pathlib import Path
from typing import Protocol

from ms_spec.models.compiler import NoCompiler, shared_library
from ms_spec.proposers.plain_suffix_tree import PlainTree

SOURCES = Path(__file__).parent / "native"
# No contraction: probabilities are rounded after every operation, as in the plain tree.
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC")
_log = logging.getLogger("ms_spec")


class Tree(Protocol):
    """All suffixes of its sequences, each to at most ``depth`` tokens.

    A node counts the suffixes that pass through it. Children stand in falling order of count; a new one is the last.
    One that rises comes behind those it draws level with, but before them if it was the first of its old count. One
    that falls comes before those it draws level with.
    """

    def append(self, sequence: int, tokens: array[int]) -> None:
        """``tokens`` (int32) come next in ``sequence``. Sequences that start later have higher numbers."""

    def remove(self, sequence: int) -> None:
        """Forgets a sequence and its number; nothing happens if it has no tokens."""

    def draft(self, context: array[int], limit: int, factor: float, min_prob: float) -> tuple[list[int], float]:
        """What most likely follows ``context`` (int32), and its score.

        For each m < len(context) such that the last m tokens are in the tree, one draft: from there always the first
        child, while the product of the relative counts is at least ``min_prob``, for at most min(``limit``,
        m * ``factor``) tokens. Its score is the sum of those products, one a token. The best score wins, then the
        longest m. Probabilities are float32.
        """


class NativeTree:
    """A :class:`Tree` in C++, with one node for a run of tokens that nothing divides.

    Raises:
        NoCompiler: it cannot be built.
        MemoryError: no memory for more nodes.
    """

    def __init__(self, depth: int) -> None:
        self._calls = _library()
        self._tree = self._calls.suffix_tree_new(depth)
        if not self._tree:
            raise MemoryError("no memory for a suffix tree")
        weakref.finalize(self, self._calls.suffix_tree_free, self._tree)

    def append(self, sequence: int, tokens: array[int]) -> None:
        """See :class:`Tree`."""
        self._check(self._calls.suffix_tree_append(self._tree, sequence, *tokens.buffer_info()))

    def remove(self, sequence: int) -> None:
        """See :class:`Tree`."""
        self._check(self._calls.suffix_tree_remove(self._tree, sequence))

    def draft(self, context: array[int], limit: int, factor: float, min_prob: float) -> tuple[list[int], float]:
        """See :class:`Tree`."""
        out, score = array("i", bytes(4 * limit)), ctypes.c_float()
        n = self._calls.suffix_tree_draft(
            *(self._tree, *context.buffer_info(), limit, factor, min_prob, out.buffer_info()[0], ctypes.byref(score))
        )
        return out[: self._check(n)].tolist(), score.value

    @property
    def nodes(self) -> int:
        """How many there are, the root among them."""
        return int(self._calls.suffix_tree_nodes(self._tree))

    @property
    def texts(self) -> int:
        """How many sequences have their tokens kept: all that were not removed, if the oldest always went first."""
        return int(self._calls.suffix_tree_texts(self._tree))

    def _check(self, result: int) -> int:
        if result < 0:
            raise MemoryError("no memory for more of the suffix tree; lower suffix_decoding_max_cached_requests")
        return result


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(shared_library(SOURCES, FLAGS)))
    tree, address, integer, real = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    signatures = {
        "new": (tree, [integer]),
        "free": (None, [tree]),
        "append": (integer, [tree, integer, address, integer]),
        "remove": (integer, [tree, integer]),
        "draft": (integer, [tree, address, integer, integer, real, real, address, ctypes.POINTER(ctypes.c_float)]),
        "nodes": (integer, [tree]),
        "texts": (integer, [tree]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"suffix_tree_{name}")
        function.restype, function.argtypes = result, arguments
    return library


@functools.cache
def _kind() -> type[NativeTree] | type[PlainTree]:
    try:
        _library()
    except NoCompiler as error:
        _log.warning(
            "suffix trees in C++ are not available (%s): running plain Python, which is slow and needs much memory",
            error,
        )
        return PlainTree
    return NativeTree


def new_tree(depth: int) -> Tree:
    """An empty tree: in C++ or, where that cannot be built, in Python, with one warning per process."""
    return _kind()(depth)
