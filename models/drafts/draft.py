"""What a reader makes of a draft checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ms_spec.models.checkpoint import Checkpoint


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
