"""Single decode steps through the runner: by width and context, and what verification takes of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.bench import Bench
from benchmarks.figures import Figure
from benchmarks.timing import interleave, milliseconds, ratio, spread
from ms_spec.limits import device_of
from ms_spec.runtime import graph_thread
from ms_spec.work import Work

CONTEXTS = (64, 1024)
ROUNDS = 100


class Steps:
    """One request with a known context in slot 1 of an engine that does nothing else meanwhile."""

    def __init__(self, llm: Any, ids: list[int], context: int) -> None:
        """ids: context + 16 or more tokens; those behind the context serve as drafts."""
        self.runner = llm._open().runner
        self.ids, self.context = ids, context
        self.result: Any = None
        blocks = -(-(context + 32) // llm.limits.block_size)
        self.table = list(range(1, blocks + 1))
        graph_thread().run(self._fill)

    def _fill(self) -> None:
        chunk = self.runner.chunks[-1]
        for start in range(0, self.context, chunk):
            tokens = self.ids[start : min(start + chunk, self.context)]
            self.runner.prefill(Work(1, tokens, start, self.table), last=False)

    def seconds(self, width: int, limit: int | None = None, **sampling: Any) -> float:
        """One step that verifies width - 1 drafts and proposes ``limit`` (None: as many as it can).

        It can be repeated: it writes the same places with the same. What it gave is in ``result`` then.
        """
        tokens = self.ids[self.context : self.context + width]
        limit = self.runner.num_drafts if limit is None else limit
        work = Work(1, tokens, self.context, self.table, draft_limit=limit, **sampling)
        return graph_thread().run(self._timed, work)

    def _timed(self, work: Work) -> float:
        start = time.perf_counter()
        (self.result,) = self.runner.decode([work])
        return time.perf_counter() - start


def _contexts(bench: Bench) -> list[int]:
    return [context if context + 32 <= bench.max_len else bench.max_len - 32 for context in CONTEXTS]


def widths(bench: Bench) -> Iterator[Figure]:
    """Width K + 1 and width 1 of the same engine, alternately: K = 4 and K = 15."""
    for width in (5, 16):
        llm = bench.engine(drafts=width - 1)
        for name, context in zip(CONTEXTS, _contexts(bench)):
            steps = Steps(llm, bench.text_ids(context + 16), context)
            sides = {"wide": partial(steps.seconds, width), "one": partial(steps.seconds, 1)}
            bench.say(f"steps of width {width} and 1 at context {context}")
            seen = interleave(sides, bench.times(ROUNDS), warm_up=bench.times(10))
            yield Figure(
                f"width{width}_context{name}",
                ratio(seen["wide"], seen["one"]),
                {
                    "wide_ms": milliseconds(seen["wide"]),
                    "width1_ms": milliseconds(seen["one"]),
                    "spread": spread(seen["wide"], seen["one"]),
                },
                {"width": width, "context": context, "rounds": len(seen["one"]), **bench.engine_args(width - 1)},
            )


def verification(bench: Bench) -> Iterator[Figure]:
    """The width-5 step as it is, and the same step with a rule that looks at no logits, alternately.

    The difference is what transforming the logits, drawing and accepting take; everything else, the logits included,
    is computed in both.
    """
    llm = bench.engine(drafts=4)
    context = _contexts(bench)[0]
    steps = Steps(llm, bench.text_ids(context + 16), context)
    runner = steps.runner
    bucket = ("decode", 1, 5)
    full = runner._steps[bucket]
    without = graph_thread().run(_without_rule, full, device_of(llm.config))
    settings = {"temperature": 0.8, "top_p": 0.95}

    def with_rule() -> float:
        runner._steps[bucket] = full
        return steps.seconds(5, **settings)

    def no_rule() -> float:
        runner._steps[bucket] = without
        return steps.seconds(5, **settings)

    bench.say("width-5 steps with and without verification")
    try:
        seen = interleave({"with": with_rule, "without": no_rule}, bench.times(2 * ROUNDS), warm_up=bench.times(10))
    finally:
        runner._steps[bucket] = full
    share = 1 - ratio(seen["without"], seen["with"])
    low, high = spread(seen["without"], seen["with"])
    yield Figure(
        "verification_share",
        100 * share,
        {
            "step_ms": milliseconds(seen["with"]),
            "step_without_rule_ms": milliseconds(seen["without"]),
            "spread": [round(100 * (1 - high), 2), round(100 * (1 - low), 2)],
        },
        {**settings, "width": 5, "context": context, "rounds": len(seen["with"]), **bench.engine_args(4)},
    )


def _without_rule(step: Any, device: str) -> Any:
    """The decode step with a rule that emits the first draft, whatever the logits say. They are still computed."""
    import mindspore as ms
    from mindspore import nn, ops

    from ms_spec.models.ops import select
    from ms_spec.step import DecodeStep

    class NoRule(nn.Cell):
        def construct(self, logits, rows, drafts, draft_probs, sampling, banned, banned_until, uniforms, shaping=None):
            nothing = ops.minimum(ops.abs(logits[:1, :1]), 0.0).astype(ms.int32)
            one = ops.ones_like(banned_until)
            emitted = ops.cat((drafts[:, :1] + nothing, ops.full_like(drafts, -1)), 1)
            return emitted, one, one * 0

    made = DecodeStep(step.target, select(device), NoRule(), step.history, step.proposer, max_logprobs=20)
    made.phase = step.phase
    return made
