"""What requests ask for in their logits that is too large to be sent with every step: a row for each slot."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor

from ms_spec.shaping import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, Shaping


class SlotTables:
    """Two inputs of every graph, written when a request that has something for them comes into its slot.

    bias: float32 [slots, vocab]; added to the logits, -inf for ids that are not allowed.
    bad_words: int32 [slots, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS]; ids at the end, -1 in front of them.

    Rows of requests that ask for nothing hold what was there before: nothing looks at them.
    """

    def __init__(self, slots: int, vocab_size: int, shared: bool) -> None:
        """``shared``: graphs read the host's memory. Otherwise they get new tensors when something has changed."""
        self.bias = np.zeros((slots, vocab_size), np.float32)  # memory where it is written, and nowhere else
        self.bad_words = np.full((slots, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int32)
        self._held: dict[int, Shaping] = {}
        self._shared = shared
        self.changed: set[int] = set()
        """Slots that have been written since :meth:`tensors` was last called."""
        self._tensors = tuple(Tensor.from_numpy(table) for table in (self.bias, self.bad_words))

    def put(self, slot: int, shaping: Shaping) -> None:
        """The request in ``slot`` has these wishes. Costs something the first time only."""
        if self._held.get(slot) is shaping:
            return
        self._held[slot] = shaping
        if shaping.biased:
            row = self.bias[slot]
            row[:] = 0 if shaping.allowed is None else -np.inf
            if shaping.allowed is not None:
                row[list(shaping.allowed)] = 0
            for token, value in (shaping.bias or {}).items():
                row[token] += value
        for place, ids in enumerate(shaping.bad_words):
            self.bad_words[slot, place, : -len(ids)] = -1
            self.bad_words[slot, place, -len(ids) :] = ids
        self.changed.add(slot)

    def rows(self, slot: int) -> tuple[np.ndarray, ...]:
        """What the tables hold for a slot, to be copied elsewhere."""
        return self.bias[slot], self.bad_words[slot]

    def write(self, slot: int, content: np.ndarray) -> None:
        """The bytes of another one's ``rows``."""
        at = 0
        for row in self.rows(slot):
            row.reshape(-1).view(np.uint8)[:] = content[at : at + row.nbytes]
            at += row.nbytes
        self.changed.add(slot)

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of the steps' arguments."""
        if self.changed and not self._shared:
            self._tensors = Tensor(self.bias), Tensor(self.bad_words)
        self.changed.clear()
        return self._tensors
