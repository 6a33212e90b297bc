"""What a reader makes of a draft checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ms_spec.models.checkpoint import Checkpoint
from ms_spec.models.config import RopeConfig


@dataclass(frozen=True)
class LayerShape:
    """The decoder layers of a drafter; the fields mean what they mean in :class:`ms_spec.models.config.ModelConfig`."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool


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
    """Numbers that one position takes in the drafter's caches: keys and values of all layers."""


def kv_numbers(shape: Any) -> int:
    """Of any shape with ``num_layers``, ``num_kv_heads`` and ``head_dim``."""
    return int(2 * shape.num_layers * shape.num_kv_heads * shape.head_dim)
