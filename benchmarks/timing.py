"""Ratios that hold on a machine with other things to do: both sides in one run, alternately."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from typing import Any


def interleave(
    sides: Mapping[str, Callable[[], float]],
    rounds: int,
    warm_up: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[float]]:
    """Calls every side once a round, in alternating order (A B, B A, ...), and returns the seconds that each reported.

    What drifts (clock, temperature, neighbours) then hits all sides alike. The rounds of the warm-up are thrown away.
    """
    seen: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(-warm_up, rounds):
        for name in names if turn % 2 == 0 else names[::-1]:
            seconds = sides[name]()
            if turn >= 0:
                seen[name].append(seconds)
        progress(max(0, turn + 1), rounds)
    return seen


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The ratio of the medians."""
    return median(above) / median(below)


def spread(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """First and third quartile of the rounds' own ratios; their ends when there are fewer than four."""
    each = [a / b for a, b in zip(above, below)]
    if len(each) < 4:
        return [round(min(each), 4), round(max(each), 4)]
    low, _, high = quantiles(each, n=4)
    return [round(low, 4), round(high, 4)]


def milliseconds(seconds: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles, in ms."""
    low, middle, high = quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return {"median": round(1e3 * middle, 3), "quartiles": [round(1e3 * low, 3), round(1e3 * high, 3)]}
