"""What a reader makes of a draft checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ms_spec.models.checkpoint import Checkpoint
from ms_spec.models.checkpoint.sharded import sharded
from ms_spec.models.parallel import Shard, part


@dataclass(frozen=True)
class Draft:
    """A draft checkpoint that fits the target."""

    method: str
    shape: Any
    """``EagleShape``, ``Eagle3Shape``, ``MedusaShape``, ``MtpShape``, ``DflashShape``, or ``ModelConfig``."""
    checkpoint: Checkpoint
    """The tensors that are to be loaded, under the names of the method's first public layout (see its reader)."""
    suggested_tokens: int | None
    """num_speculative_tokens that the checkpoint suggests."""
    max_tokens: int | None
    """Most num_speculative_tokens; None: any number."""
    kv_numbers: int
    """Numbers that one position takes in the drafter's caches, see ``LayerShape``; 0 without any."""

    def part(self, shard: Shard) -> Draft:
        """What ``shard`` holds of it where its layers are shared out. Output matrices of a head's own stay whole."""
        if shard.size == 1:
            return self
        shape, tables = part(self.shape, shard), ["embed_tokens"]
        if self.method == "draft_model":
            tables.append("lm_head")
        vocabulary = dict.fromkeys(tables, getattr(shape, "vocab_size", 0))
        checkpoint = sharded(self.checkpoint, self.shape, shard, vocabulary)
        return replace(self, shape=shape, checkpoint=checkpoint, kv_numbers=shape.kv_numbers)
