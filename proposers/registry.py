"""The methods that exist. Imports no MindSpore, so that a config can be checked against it early.

To add one: write a file with a function ``build(config, backend, site) -> Proposer`` and name it here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ms_spec.proposers.base import HostProposer, Site


def _nothing(num_drafts: int, limit: int) -> int:
    return 0


def _chain(num_drafts: int, limit: int) -> int:
    """The first draft comes from a committed position, each further one writes the draft before it."""
    return max(0, limit - 1)


def _own_chain(num_drafts: int, limit: int) -> int:
    """As a chain, and the newest token's own position."""
    return max(1, limit)


def _block(num_drafts: int, limit: int) -> int:
    """The newest token and a mask for each draft, however few are wanted."""
    return num_drafts + 1 if limit else 0


@dataclass(frozen=True)
class Method:
    """module: where it is built. host: it drafts between steps. lookahead: positions behind a step's tokens that
    proposing ``limit`` of ``num_drafts`` drafts writes to. more_columns: by how many its widest grid of a decode step
    exceeds the step's own."""

    module: str
    host: bool = False
    lookahead: Callable[[int, int], int] = _nothing
    more_columns: int = 0


METHODS = {
    "ngram": Method("ms_spec.proposers.ngram"),
    "suffix": Method("ms_spec.proposers.suffix", host=True),
    "draft_model": Method("ms_spec.proposers.draft_model", lookahead=_own_chain, more_columns=1),
    "eagle": Method("ms_spec.proposers.eagle", lookahead=_chain),
    "eagle3": Method("ms_spec.proposers.eagle3", lookahead=_chain),
    "medusa": Method("ms_spec.proposers.medusa"),
    "mtp": Method("ms_spec.proposers.mtp", lookahead=_chain),
    "dflash": Method("ms_spec.proposers.dflash", lookahead=_block),
    "extract_hidden_states": Method("ms_spec.proposers.extract"),
}
"""Method of ``speculative_config`` -> how it is built."""


def _method(config: Any) -> Method:
    if config.method not in METHODS:
        raise ValueError(f"speculative_config.method={config.method!r}: allowed are {', '.join(METHODS)}")
    return METHODS[config.method]


def build_proposer(config: Any, backend: Any, site: Site | None = None) -> Any:
    """The proposer of all step graphs; None where the host drafts.

    Args:
        config: the checked ``speculative_config``: ``method``, ``num_speculative_tokens`` and the method's own fields.
        backend: constructors of the device operations.
        site: where it is built; methods that neither see the target nor have a checkpoint need none.

    Raises:
        ValueError: no such method.
    """
    method = _method(config)
    return None if method.host else importlib.import_module(method.module).build(config, backend, site)


def build_host_proposer(config: Any, max_model_len: int) -> HostProposer | None:
    """The proposer that drafts on the host; None where the step graph does."""
    method = _method(config)
    if not method.host:
        return None
    made: HostProposer = importlib.import_module(method.module).build_host(config, max_model_len)
    return made


def lookahead(config: Any) -> tuple[int, ...]:
    """See :class:`ms_spec.limits.Limits`."""
    if config is None:
        return ()
    ahead, drafts = _method(config).lookahead, config.num_speculative_tokens
    return () if ahead is _nothing else tuple(ahead(drafts, limit) for limit in range(drafts + 1))
