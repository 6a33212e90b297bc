"""How much of a step the host spends outside the graphs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.bench import Bench, greedy
from benchmarks.executor import Reads, watched
from benchmarks.figures import Figure

PARTS = ("inside", "calls")


def host_share(bench: Bench) -> Iterator[Figure]:
    """One request through ``LLM.stream``, step by step.

    Inside is the time in MindSpore's executor and the wait for the result; all else of a step is the host's: the
    scheduler, the inputs, the Cell's Python code, the hand-over between threads, detokenization.
    """
    llm = bench.engine()
    ids = bench.chat("Tell me about the history of bread.")
    steps: list[dict[str, float]] = []
    for turn in range(bench.times(4)):
        bench.say(f"host time: generation {turn + 1} of {bench.times(4)}")
        steps += _one(llm, ids, bench.new_tokens)
    whole = median(one["whole"] for one in steps)
    shares = {part: 100 * median(1 - one[part] / one["whole"] for one in steps) for part in PARTS}
    yield Figure(
        "host_share",
        shares["inside"],
        {
            "step_ms": round(1e3 * whole, 3),
            "host_ms": round(1e3 * median(one["whole"] - one["inside"] for one in steps), 3),
            "share_without_the_cells_own_python": round(shares["calls"], 2),
            "steps": len(steps),
        },
        {"prompt_tokens": len(ids), **bench.engine_args()},
    )


def _one(llm: Any, ids: list[int], tokens: int) -> list[dict[str, float]]:
    runner = llm._open().runner
    reads, originals = Reads(), dict(runner._steps)
    runner._steps.update({bucket: reads.of(cell) for bucket, cell in originals.items()})
    steps: list[dict[str, float]] = []
    try:
        with watched() as executor:
            before: tuple[float, float, float] | None = None
            for _ in llm.stream({"prompt_token_ids": ids}, greedy(tokens)):
                now = (time.perf_counter(), executor.seconds + reads.seconds, reads.calls + reads.seconds)
                if before is not None:
                    whole, inside, calls = (b - a for a, b in zip(before, now))
                    steps.append({"whole": whole, "inside": inside, "calls": calls})
                before = now
    finally:
        runner._steps.update(originals)
    return steps
