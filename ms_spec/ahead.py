"""Plans a step while the one before it runs."""

from __future__ import annotations

from ms_spec.request import PREFILL, Sequence
from ms_spec.scheduler import Chunk, Plan, Row, Scheduler


class AheadScheduler(Scheduler):
    """A :class:`Scheduler` that can go one step further than the results.

    Of a row in flight it knows that it adds one token, and at most one more for each of its drafts. So it plans with
    the least for how much a request may still say, and with the most for the blocks. A row that turns out to be one too
    many is computed for nothing.
    """

    def ahead(self, flying: Plan) -> Plan | None:
        """The step after ``flying``, whose results are not there. None: there is none, or the results come first.

        They do where blocks are short: nobody is preempted, and no block is taken back, while a step runs.
        """
        items: list[Row | Chunk] = [*flying.rows, *flying.chunks]
        in_flight = {item.seq: item for item in items}
        rows: list[Row] = []
        reading: list[tuple[Sequence, int]] = []
        for seq in self.running:
            item = in_flight.get(seq)
            start = seq.computed + (item.size if isinstance(item, Chunk) else 0)
            if isinstance(item, Row) or (isinstance(item, Chunk) and item.last):
                if seq.room > 1:
                    slack = item.num_drafts if isinstance(item, Row) else 0
                    rows.append(Row(seq, item.limit, ahead=1, slack=slack))
            elif seq.state == PREFILL and start < seq.prefill_end:
                reading.append((seq, start))
            else:  # decoding, or resumed and read: its tokens are all known
                rows.append(Row(seq, len(seq.drafts)))
        for row in rows:
            if not self.blocks.extend(row.seq.table, self.limits.span(len(row.seq.tokens) + row.ahead + row.slack)):
                return None
        plan = self._shared_out(rows, reading)
        return None if plan.empty else plan
