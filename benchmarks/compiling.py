"""Whether anything is compiled after the warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.bench import Bench, greedy
from benchmarks.executor import watched
from benchmarks.figures import Figure
from ms_spec.runtime import graph_thread
from ms_spec.work import Work

SEQS, DRAFTS = 8, 4
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 100, 127, 128, 129, 199, 200)


def graphs_after_warmup(bench: Bench) -> Iterator[Figure]:
    """Prompts of 1 to 200 tokens, batches of 1 to 8, 0 to K drafts; graphs counted by MindSpore's executor."""
    llm = bench.engine(DRAFTS, SEQS)
    runner: Any = llm._open().runner
    before = runner.num_compiled
    text = bench.text_ids(1000)
    with watched() as executor:
        graph_thread().run(_compile_one)
        if executor.compiled != 1:
            raise RuntimeError(f"MindSpore compiled one graph, and {executor.compiled} were counted")
        executor.compiled = 0
        for size in range(1, SEQS + 1):
            bench.say(f"graphs after warm-up: batch {size} of {SEQS}")
            lengths = [LENGTHS[(size * 5 + i) % len(LENGTHS)] for i in range(size)]
            if size <= 2:
                lengths = lengths if bench.quick else [*LENGTHS[size - 1 :: 2]][: 8 * size]
            prompts = [text[7 * i : 7 * i + length] for i, length in enumerate(lengths)]
            for start in range(0, len(prompts), size):
                llm.generate(prompts[start : start + size], greedy(8), use_tqdm=False)
            for drafts in range(DRAFTS + 1):
                # Every mixture: each request has another number of drafts.
                works = [
                    Work(
                        slot=i + 1,
                        tokens=text[: 1 + (drafts + i) % (DRAFTS + 1)],
                        start=0,
                        block_table=[i + 1],
                        draft_limit=(drafts + i) % (DRAFTS + 1),
                        temperature=0.8 if i % 2 else 0.0,
                    )
                    for i in range(size)
                ]
                graph_thread().run(runner.decode, works)
        grown = max(executor.compiled, runner.num_compiled - before)
        details = {"planned": len(runner.plan()), "compiled_by_mindspore": executor.compiled, "runs": executor.runs}
    yield Figure("graphs_after_warmup", grown, details, bench.engine_args(DRAFTS, SEQS))


def _compile_one() -> None:
    """Something that is compiled for certain: the count has to see it."""
    from mindspore import Tensor, nn

    class Twice(nn.Cell):
        def construct(self, x):
            return x + x

    Twice()(Tensor([1.0])).asnumpy()
