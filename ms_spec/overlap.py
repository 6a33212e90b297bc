"""An engine that plans a step while the one before it runs: ``async_scheduling``."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Callable

from ms_spec.ahead import AheadScheduler
from ms_spec.engine import Engine, Results, failure
from ms_spec.outputs import Delta
from ms_spec.scheduler import Plan, Row
from ms_spec.work import Work


@dataclass
class Flight:
    """A step that has been handed to the model's thread, and whose results have not been looked at."""

    plan: Plan
    results: Future[Results]


class OverlappedEngine(Engine):
    """One step ahead of the results, where it can be. What it emits is what :class:`ms_spec.engine.Engine` emits.

    submit: has the model's thread run a function after those that it was given before; waits for nothing.
    on_thread: runs a function on the thread that :meth:`advance` works on, which is not the model's.

    Blocks and slots of a sequence that ends come free at once, although a step in flight may still write to them:
    whoever gets them runs after it.
    """

    scheduler_type = AheadScheduler
    scheduler: AheadScheduler

    def __init__(
        self,
        *parts: Any,
        submit: Callable[..., Future[Any]],
        **options: Any,
    ) -> None:
        super().__init__(*parts, **options)
        self._submit = submit
        self._flying: Flight | None = None

    def step(self) -> list[Delta]:
        """Takes over the results of one step, while the next one runs."""
        if self._flying is None:
            plan = self.scheduler.schedule()
            if plan.empty:
                return self._without_a_step()
            self._flying = self._send(plan)
        flying, following = self._flying, self.scheduler.ahead(self._flying.plan)
        self._flying = None if following is None else self._send(following)
        try:
            results = flying.results.result()
        except Exception as error:
            self._land()
            self._flying = None  # it has computed on what the one that failed has left
            return self._fail_all(failure(error))
        return self._take(flying.plan, results)

    def _advance(self, enough: Callable[[], bool]) -> None:
        try:
            super()._advance(enough)
        finally:
            self._land()

    def _land(self) -> None:
        """Waits for the step in flight, whatever becomes of it."""
        if self._flying is not None:
            self._flying.results.exception()

    def _send(self, plan: Plan) -> Flight:
        return Flight(plan, self._submit(self._execute, *self._works(plan)))

    def _work(self, *of: Any) -> Work:
        work = super()._work(*of)
        work.block_table = list(work.block_table)  # when the step begins, the sequence may have lost it
        return work

    def _row_work(self, row: Row) -> Work:
        if not row.ahead:
            return super()._row_work(row)
        seq = row.seq
        work = self._work(seq, [0] * (1 + row.num_drafts), len(seq.tokens), row.limit)
        work.output_index += row.ahead
        work.carried, work.slack = True, row.slack
        return work
