"""What drafts with weights of their own cost in the step graph, beside the weights that they read.

The drafts are noise and none is verified: steps of one column, in which the drafter is asked for 0, 1, ... K drafts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bench import Bench
from benchmarks.figures import Figure
from benchmarks.random_drafts import DFLASH_LAYERS, EAGLE3_VOCAB, WRITERS, cache_in, dflash_layers
from benchmarks.steps import ROUNDS, Steps
from benchmarks.timing import interleave, milliseconds, spread

DRAFTS = 4
CONTEXT = 64
CHAINED = ("eagle3", "mtp")
"""Methods in which each further draft is a further pass; the others draft all K in one."""


def shares(config: Any) -> dict[str, float]:
    """Method -> weights that a draft reads / weights that a plain step reads, the matrices alone.

    config: the target's ``ModelConfig``. A draft is one further token where they are chained, else all K together.
    """
    c, hidden = config, config.hidden_size
    queries, qkv = c.num_heads * c.head_dim, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    layer = hidden * qkv + queries * hidden + 3 * hidden * c.intermediate_size
    output = c.vocab_size * hidden
    plain = c.num_layers * layer + output
    wider = layer + hidden * qkv  # attention that is fed twice the width
    read = {
        "eagle3": wider + min(EAGLE3_VOCAB, c.vocab_size) * hidden,
        "medusa": DRAFTS * (hidden * hidden + output),
        "mtp": 2 * hidden * hidden + layer + output,
        "dflash": len(dflash_layers(c)) * hidden * hidden + DFLASH_LAYERS * layer + output,
    }
    return {method: numbers / plain for method, numbers in read.items()}


def draft_cost(bench: Bench) -> Iterator[Figure]:
    """One figure a method: EAGLE-3's is the cost itself, the others' are cost / share of the weights."""
    config = bench.loaded.config
    bench.engine()  # what it caches has to stay
    for method, write in WRITERS.items():
        with tempfile.TemporaryDirectory(prefix="ms-spec-drafts-") as folder, cache_in(Path(folder) / "cache"):
            bench.say(f"writing random weights: {method}")
            draft = Path(folder) / method
            write(draft, config, DRAFTS)
            cost, details = _measure(bench, method, str(draft))
        share = shares(config)[method]
        details = {"cost": round(100 * cost, 2), "share_of_weights": round(100 * share, 2), **details}
        seen = 100 * cost if method == "eagle3" else cost / share
        yield Figure(f"{method}_cost", seen, details, {"context": CONTEXT, **bench.engine_args(_config(method))})


def _config(method: str) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": DRAFTS}


def _measure(bench: Bench, method: str, draft: str) -> tuple[float, dict[str, Any]]:
    """A draft's cost in plain steps, and what led to it. ``draft``: its folder, for mtp that of a whole target."""
    if method == "mtp":
        llm = bench.new_engine(_config(method), model=draft, tokenizer=bench.model)
    else:
        llm = bench.new_engine({**_config(method), "model": draft})
    try:
        ids = bench.text_ids(CONTEXT + 16)
        plain, steps = Steps(bench.engine(), ids, CONTEXT), Steps(llm, ids, CONTEXT)
        for limit in range(DRAFTS + 1):
            steps.seconds(1, limit)
            if len(steps.result.drafts) != limit:
                raise RuntimeError(f"{method} was asked for {limit} drafts and made {len(steps.result.drafts)}")
        bench.say(f"steps with 0 to {DRAFTS} drafts of {method}, and plain ones")
        sides = {"plain": partial(plain.seconds, 1)}
        sides.update({str(limit): partial(steps.seconds, 1, limit) for limit in range(DRAFTS + 1)})
        seen = interleave(sides, bench.times(ROUNDS), warm_up=bench.times(10))
    finally:
        llm.close()
    step = median(seen["plain"])
    # Of a chain, what each draft behind the first adds; else all that drafting adds.
    first, parts = ("1", DRAFTS - 1) if method in CHAINED else ("plain", 1)
    added = [(all_ - some) / parts for all_, some in zip(seen[str(DRAFTS)], seen[first])]
    low, high = spread(added, seen["plain"])
    details = {
        "spread": [round(100 * low, 2), round(100 * high, 2)],
        "first_draft": round(100 * (median(seen["1"]) - step) / step, 2),
        "no_draft": round(100 * (median(seen["0"]) - step) / step, 2),
        "step_ms": {name: milliseconds(seconds)["median"] for name, seconds in seen.items()},
    }
    return (median(seen[str(DRAFTS)]) - median(seen[first])) / parts / step, details
