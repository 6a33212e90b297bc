"""Whole generations of plain decoding: against transformers, and batch 8 against batch 1."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.baseline import Generate
from benchmarks.bench import Bench, greedy
from benchmarks.figures import Figure, num_cores
from benchmarks.timing import interleave, ratio, spread

QUESTION = "Explain in a few sentences why the sea is salty."
BATCH = 8


def _generate(llm: Any, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    outputs = llm.generate(prompts, greedy(tokens), use_tqdm=False)
    return time.perf_counter() - start, [list(one.outputs[0].token_ids) for one in outputs]


def plain_vs_transformers(bench: Bench) -> Iterator[Figure]:
    """Wall time of whole calls, prompt included, each a fresh generation of the same prompt."""
    tokens = 8 if bench.quick else 48
    ids = bench.chat(QUESTION)
    llm = bench.engine()
    bench.say("building the transformers models")
    theirs = {dtype: Generate(bench.loaded, dtype) for dtype in ("bfloat16", "float32")}
    ours: list[int] = []

    def plain() -> float:
        seconds, (got,) = _generate(llm, [ids], tokens)
        ours[:] = got
        return seconds

    def torch_side(dtype: str) -> Any:
        return lambda: theirs[dtype].seconds(ids, tokens)

    seen = interleave(
        {"ms-spec": plain, **{dtype: torch_side(dtype) for dtype in theirs}},
        bench.times(5),
        progress=lambda done, total: bench.say(f"plain and transformers: round {done} of {total}"),
    )
    faster = min(theirs, key=lambda dtype: median(seen[dtype]))
    speeds = {name: round(tokens / median(seconds), 2) for name, seconds in seen.items()}
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs["float32"].ids)) if a != b), tokens)
    yield Figure(
        "plain_vs_transformers",
        ratio(seen[faster], seen["ms-spec"]),
        {
            "tokens_per_second": speeds,
            "faster": faster,
            "spread": spread(seen[faster], seen["ms-spec"]),
            "first_ids_equal_to_float32": same,
        },
        {"prompt_tokens": len(ids), "new_tokens": tokens, "torch_threads": num_cores(), **bench.engine_args()},
    )


def batch8(bench: Bench) -> Iterator[Figure]:
    """Tokens per second of whole calls: eight different prompts at once, and one of them alone."""
    tokens = bench.new_tokens
    llm = bench.engine(seqs=BATCH)
    text = bench.text_ids(40 * BATCH)
    prompts = [text[40 * i : 40 * (i + 1)] for i in range(BATCH)]
    alone = iter(range(10**9))
    answers: dict[int, list[int]] = {}
    wrong = 0

    def batch() -> float:
        seconds, got = _generate(llm, prompts, tokens)
        answers.update(enumerate(got))
        return seconds / (BATCH * tokens)

    def single() -> float:
        nonlocal wrong
        which = next(alone) % BATCH
        seconds, (got,) = _generate(llm, [prompts[which]], tokens)
        wrong += got != answers.get(which, got)
        return seconds / tokens

    seen = interleave(
        {"batch": batch, "single": single},
        bench.times(7),
        progress=lambda done, total: bench.say(f"batch 8 and batch 1: round {done} of {total}"),
    )
    yield Figure(
        "batch8",
        ratio(seen["single"], seen["batch"]),
        {
            "tokens_per_second": {name: round(1 / median(seconds), 2) for name, seconds in seen.items()},
            "spread": spread(seen["single"], seen["batch"]),
            "answers_that_differ": wrong,
        },
        {"prompt_tokens": 40, "new_tokens": tokens, **bench.engine_args(seqs=BATCH)},
    )
