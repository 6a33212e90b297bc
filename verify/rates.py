"""Acceptance rates for synthetic verification. Imports no MindSpore, so that a config is checked early."""

from __future__ import annotations

from collections.abc import Sequence


def rates_for_length(length: float, num_drafts: int) -> tuple[float, ...]:
    """Rates whose mean acceptance length (accepted drafts + 1) is ``length``, with the least variance.

    Raises:
        ValueError: length is not in [1, num_drafts + 1].
    """
    if not 1 <= length <= num_drafts + 1:
        raise ValueError(f"synthetic_acceptance_length={length}: must lie in [1, {num_drafts + 1}]")
    return tuple(min(max(length - 1 - i, 0.0), 1.0) for i in range(num_drafts))


def conditional_rates(rates: Sequence[float], num_drafts: int) -> list[float]:
    """From "drafts 0..i are all accepted" to "draft i is, given those before it"; the first ``num_drafts`` of them.

    Raises:
        ValueError: too few rates, one outside [0, 1], or one larger than the one before it.
    """
    if len(rates) < num_drafts:
        raise ValueError(f"synthetic_acceptance_rates={list(rates)}: {num_drafts} rates are needed, one a draft")
    before = (1.0, *rates)
    if any(not 0 <= b <= a for a, b in zip(before, rates)):
        raise ValueError(f"synthetic_acceptance_rates={list(rates)}: must lie in [0, 1] and not increase")
    return [b / a if a > 0 else 0.0 for a, b in zip(before, rates)][:num_drafts]
