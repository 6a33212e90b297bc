"""Who owns which block of the paged KV cache."""

from __future__ import annotations


class BlockManager:
    """Hands out the physical blocks 1..num_blocks-1. Block 0 is nobody's: rows without a token write there.

    A block table is a plain list that the manager extends and shortens in place, so that a step costs nothing per
    token of context. Blocks are handed out in a fixed order: the one returned last goes first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks = {num_blocks}: must be >= 2, block 0 is never handed out")
        self.block_size = block_size
        self.num_usable = num_blocks - 1
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def needed(self, positions: int) -> int:
        """Blocks that hold ``positions`` positions."""
        return -(-positions // self.block_size)

    def extend(self, table: list[int], positions: int) -> bool:
        """Makes ``table`` cover positions 0..positions-1. Returns False, and changes nothing, if blocks run out."""
        missing = -(-positions // self.block_size) - len(table)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            table.append(self._free.pop())
        return True

    def shrink(self, table: list[int], positions: int) -> int:
        """Takes back what lies beyond positions 0..positions-1. Returns how many blocks came free."""
        keep = self.needed(positions)
        count = 0
        while len(table) > keep:
            self._free.append(table.pop())
            count += 1
        return count

    def release(self, table: list[int]) -> None:
        """Takes back all blocks of ``table`` and empties it."""
        while table:
            self._free.append(table.pop())
