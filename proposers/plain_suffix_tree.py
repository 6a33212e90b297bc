"""The suffix tree in plain Python."""

from __future__ import annotations

from array import array

import numpy as np


class _Node:
    """``tail`` (text, begin): its only suffix goes on as text[begin + depth :], in nodes that are not made yet."""

    __slots__ = ("children", "count", "depth", "order", "tail", "token")

    def __init__(self, token: int, depth: int, tail: tuple[array[int], int] | None) -> None:
        self.token = token
        self.count = 1
        self.depth = depth
        self.tail = tail
        if tail is None:
            self.branch()

    def branch(self) -> None:
        self.tail = None
        self.children: dict[int, _Node] = {}
        self.order: list[_Node] = []


class PlainTree:
    """See :class:`ms_spec.proposers.suffix_tree.Tree`. A node stands for one token."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._root = _Node(-1, 0, None)
        self._texts: dict[int, array[int]] = {}
        self._ends: dict[int, list[_Node]] = {}

    def append(self, sequence: int, tokens: array[int]) -> None:
        """See :class:`ms_spec.proposers.suffix_tree.Tree`."""
        text = self._texts.setdefault(sequence, array("i"))
        ends = self._ends.setdefault(sequence, [])
        for token in tokens:
            text.append(token)
            ends.append(self._root)
            del ends[: -self._depth]
            first = len(text) - len(ends)
            for i, end in enumerate(ends):  # the longest suffix first
                ends[i] = self._step(end, text, first + i)

    def _step(self, end: _Node, text: array[int], begin: int) -> _Node:
        """Where the suffix from ``begin`` now ends, at the latest when its tail becomes nodes."""
        last = len(text) - 1
        while end.tail is None and begin + end.depth < last:  # its tail became nodes
            end = end.children[text[begin + end.depth]]
        if end.tail is not None:
            return end
        child = end.children.get(text[last])
        if child is None:
            return self._add(end, text, begin)
        if child.tail is not None:
            self._grow(child)
        _increment(end.order, child)
        return child

    def _add(self, node: _Node, text: array[int], begin: int) -> _Node:
        token = text[begin + node.depth]
        child = node.children[token] = _Node(token, node.depth + 1, (text, begin))
        node.order.append(child)
        return child

    def _grow(self, node: _Node) -> None:
        """The next token of the node's tail becomes a node."""
        assert node.tail is not None
        text, begin = node.tail
        node.branch()
        if node.depth < self._depth and begin + node.depth < len(text):
            self._add(node, text, begin)

    def remove(self, sequence: int) -> None:
        """See :class:`ms_spec.proposers.suffix_tree.Tree`."""
        self._ends.pop(sequence, None)
        text = self._texts.pop(sequence, array("i"))
        for begin in range(len(text)):
            node = self._root
            for token in text[begin : begin + self._depth]:
                child = node.children[token]
                if child.count == 1:
                    del node.children[token]
                    node.order.remove(child)
                    break
                _decrement(node.order, child)
                node = child

    def draft(self, context: array[int], limit: int, factor: float, min_prob: float) -> tuple[list[int], float]:
        """See :class:`ms_spec.proposers.suffix_tree.Tree`."""
        best: list[int] = []
        best_score = np.float32(0)
        for matched in range(1, len(context)):
            place = self._match(context[-matched:])
            if place is None:
                break
            most = min(limit, int(float(np.float32(matched) * np.float32(factor)) + 1e-6))
            tokens, score = self._follow(*place, most, np.float32(min_prob))
            if score >= best_score:
                best, best_score = tokens, score
        return best, float(best_score)

    def _match(self, tokens: array[int]) -> tuple[_Node, int] | None:
        """The last node on the way and, as it may have a tail, the depth reached."""
        node = self._root
        for depth, token in enumerate(tokens):
            if node.tail is not None:
                if self._rest(node, depth) != token:
                    return None
            elif token in node.children:
                node = node.children[token]
            else:
                return None
        return node, len(tokens)

    def _rest(self, node: _Node, depth: int) -> int | None:
        """The token of the node's tail that leads from ``depth`` on."""
        assert node.tail is not None
        text, begin = node.tail
        return text[begin + depth] if depth < self._depth and begin + depth < len(text) else None

    def _follow(self, node: _Node, depth: int, most: int, min_prob: np.float32) -> tuple[list[int], np.float32]:
        p, score = np.float32(1), np.float32(0)
        tokens: list[int] = []
        while len(tokens) < most:
            if node.tail is not None:
                token = self._rest(node, depth)
                if token is None:
                    break
            else:
                if not node.order:
                    break
                child = node.order[0]
                p = p * (np.float32(child.count) / np.float32(node.count))
                if p < min_prob:
                    break
                node, token = child, child.token
            depth += 1
            tokens.append(token)
            score = score + p
        return tokens, score


def _first_at_most(order: list[_Node], count: int) -> int:
    """Index of the first sibling with at most this count."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if order[middle].count > count:
            low = middle + 1
        else:
            high = middle
    return low


def _increment(order: list[_Node], node: _Node) -> None:
    count = node.count
    to = _first_at_most(order, count)
    at = order.index(node, to)
    if at == to:
        to = _first_at_most(order, count + 1)
    del order[at]
    order.insert(to, node)
    node.count += 1


def _decrement(order: list[_Node], node: _Node) -> None:
    behind = _first_at_most(order, node.count - 1)
    at = order.index(node)
    order.insert(behind, node)
    del order[at]
    node.count -= 1
