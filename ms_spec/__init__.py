"""Speculative decoding for large language models, native to MindSpore.

``ms_spec.generate`` and ``ms_spec.LLM`` are the two ways in. Nothing heavy is imported before one of them is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ms_spec.llm import LLM, generate
    from ms_spec.outputs import CompletionOutput, RequestOutput
    from ms_spec.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "generate"]

_HOMES = {
    "LLM": "ms_spec.llm",
    "generate": "ms_spec.llm",
    "SamplingParams": "ms_spec.sampling_params",
    "RequestOutput": "ms_spec.outputs",
    "CompletionOutput": "ms_spec.outputs",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ms_spec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
