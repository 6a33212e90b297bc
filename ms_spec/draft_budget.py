"""How many drafts are worth verifying: as many as pay for themselves, none where drafting loses.

The cost of a decode step is modelled by its rows alone, see ``step_cost``. The gain is the expected number of
accepted drafts, estimated from what the request's own earlier drafts did. Drafts beyond the length with the best ratio
of tokens to cost are not verified. No clock is read: the same history gives the same choice on every machine.

Acceptance comes in bursts (text is being copied, or it is not), so the history is kept apart for the three ways in
which the last drafted step can have ended: nothing accepted, some, everything. In each of them two chances are
estimated: that the first draft is right, and that a later draft is right when the one before it was. Old evidence
fades.
"""

from __future__ import annotations

FEW_ROWS = 5
NEAR_ROW, FAR_ROW = 0.05, 0.09
"""What one more row costs, in steps of one row: few hide behind the reading of the weights. Measured on CPU."""
MEMORY = 0.9
"""Each observation counts this much of the next one."""
FIRST_RETRY, LAST_RETRY = 8, 64
"""After so many steps without drafts one draft is tried again; the wait doubles while that fails."""

_NONE, _SOME, _ALL = 0, 1, 2


def step_cost(rows: int) -> float:
    """Of a decode step with so many rows, in steps of one row."""
    return 1 + NEAR_ROW * (min(rows, FEW_ROWS) - 1) + FAR_ROW * max(rows - FEW_ROWS, 0)


class Chance:
    """A success rate that starts at a guess and forgets slowly."""

    __slots__ = ("hits", "trials")

    def __init__(self, guess: float) -> None:
        self.hits, self.trials = guess, 1.0

    def see(self, hits: int, trials: int) -> None:
        """``hits`` successes in ``trials`` tries, all at once."""
        fade = MEMORY**trials
        self.hits = self.hits * fade + hits
        self.trials = self.trials * fade + trials

    @property
    def value(self) -> float:
        return self.hits / self.trials


class DraftGate:
    """Decides the draft length of one request. State is a function of the request's own history only."""

    def __init__(self, most: int) -> None:
        self._most = most
        # The guesses make a new request start with all drafts; three bad steps are enough to change that.
        self._first = [Chance(0.6) for _ in range(3)]
        self._later = [Chance(0.9) for _ in range(3)]
        self._last = _ALL
        self._skipped = 0
        self._wait = FIRST_RETRY
        self._memo: dict[int, int] = {}

    def limit(self, concurrency: int = 1) -> int:
        """The most drafts to verify in the next step, 0..most.

        concurrency: requests decoded in the same step. Plain decoding shares a step's fixed cost among them, so drafts
        have to be better to pay. Leave it at 1 where the output must not depend on the neighbours.
        """
        if concurrency not in self._memo:
            self._memo[concurrency] = self._best(concurrency)
        best = self._memo[concurrency]
        return min(1, self._most) if best == 0 and self._skipped >= self._wait else best

    def record(self, drafted: int, accepted: int, limit: int) -> None:
        """What a step did. ``limit`` is the number of drafts that it was allowed to propose or verify."""
        if not drafted:
            if limit == 0:
                self._skipped += 1
            return
        if self._skipped:
            self._wait = FIRST_RETRY if accepted else min(2 * self._wait, LAST_RETRY)
            self._skipped = 0
        self._first[self._last].see(accepted > 0, 1)
        later = min(accepted, drafted - 1)
        if accepted and later:
            self._later[self._last].see(accepted - 1, later)
        self._last = _ALL if accepted == drafted else (_SOME if accepted else _NONE)
        self._memo.clear()

    def _best(self, concurrency: int) -> int:
        """The length with the most tokens per cost, when every neighbour decodes plainly."""
        first, later = self._first[self._last].value, self._later[self._last].value
        base = step_cost(concurrency)
        best_rate, best = concurrency / base, 0
        tokens, chance = 1.0, first
        for length in range(1, self._most + 1):
            tokens += chance
            cost = base / concurrency + step_cost(concurrency + length) - base
            if tokens / cost >= best_rate:
                best_rate, best = tokens / cost, length
            chance *= later
        return best


def tokens_for(table: tuple[tuple[int, int, int], ...], concurrency: int, most: int) -> int:
    """K for ``concurrency`` running requests, by (first_n, last_n, K) ranges; ``most`` outside all of them."""
    for first, last, tokens in table:
        if first <= concurrency <= last:
            return tokens
    return most
