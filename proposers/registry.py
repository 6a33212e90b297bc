"""The methods that exist. Imports no MindSpore, so that a config can be checked against it early.

To add one: write a file with a function ``build(config, backend) -> Proposer`` and name it here.
"""

from __future__ import annotations

import importlib
from typing import Any

METHODS = {
    "ngram": "ms_spec.proposers.ngram",
}
"""Method of ``speculative_config`` -> module."""


def build_proposer(config: Any, backend: Any) -> Any:
    """The proposer of one step graph.

    Args:
        config: the checked ``speculative_config``: ``method``, ``num_speculative_tokens`` and the method's own fields.
        backend: constructors of the device operations.

    Raises:
        ValueError: no such method.
    """
    if config.method not in METHODS:
        raise ValueError(f"speculative_config.method={config.method!r}: allowed are {', '.join(METHODS)}")
    return importlib.import_module(METHODS[config.method]).build(config, backend)
