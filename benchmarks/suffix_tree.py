"""Time and memory of suffix decoding with a full common tree: ``python -m benchmarks.suffix_tree``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ms_spec.proposers.suffix import SuffixProposer

RESPONSES, TOKENS, VOCAB = 10_000, 256, 32_000
BUDGET_MS, BUDGET_GB = 0.15, 1.0
MEASURED, STEP = 200, 3


def random_text(rng: np.random.Generator) -> Iterator[list[int]]:
    """Nothing repeats but single tokens."""
    while True:
        yield rng.integers(0, VOCAB, TOKENS).tolist()


def repeating_text(rng: np.random.Generator) -> Iterator[list[int]]:
    """Frequent and rare tokens as in language, and passages of 4 to 40 tokens from earlier texts: about half of it."""
    pool = np.minimum(rng.zipf(1.3, 1 << 16), VOCAB) - 1
    while True:
        parts: list[int] = []
        while len(parts) < TOKENS:
            begin, size = int(rng.integers(len(pool) - 40)), int(rng.integers(4, 41))
            parts += pool[begin : begin + size].tolist()
            parts += (np.minimum(rng.zipf(1.3, size), VOCAB) - 1).tolist()
        yield parts[:TOKENS]


TEXTS = {"random": random_text, "repeating": repeating_text}


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(name: str) -> bool:
    """Prints one line, whose memory is what the process grew by until all was cached. Returns whether it fits."""
    texts = TEXTS[name](np.random.default_rng(0))
    proposer, before = SuffixProposer(24, RESPONSES), resident()
    for key in range(RESPONSES):
        proposer.start(key, [])
        proposer.extend(key, next(texts))
        proposer.stop(key)
    grown = (resident() - before) / 1e9
    starts, steps, drafted = [], [], 0
    for key in range(RESPONSES, RESPONSES + MEASURED):
        prompt, response = next(texts), next(texts)
        begun = time.perf_counter()
        proposer.start(key, prompt)
        starts.append(time.perf_counter() - begun)
        for at in range(0, TOKENS, STEP):
            begun = time.perf_counter()
            proposer.extend(key, response[at : at + STEP])
            drafted += len(proposer.draft(key, 24))
            steps.append(time.perf_counter() - begun)
        proposer.stop(key)
    step, late, start = 1e3 * np.mean(steps), 1e3 * np.percentile(steps, 99), 1e3 * np.mean(starts)
    kept = bool(step <= BUDGET_MS and grown <= BUDGET_GB)
    print(
        f"{name}: {step:.3f} ms per step of {STEP} tokens (<= {BUDGET_MS}; 99 %: {late:.3f}), "
        f"{grown:.2f} GB for {RESPONSES} responses of {TOKENS} tokens (<= {BUDGET_GB}), "
        f"{start:.2f} ms to start with a prompt of {TOKENS}, {drafted / len(steps):.1f} drafts a step: "
        + ("ok" if kept else "miss")
    )
    return kept


def main() -> int:
    """Each text in a process of its own, for its memory."""
    if len(sys.argv) > 1:
        return 0 if measure(sys.argv[1]) else 1
    return max(subprocess.call([sys.executable, "-m", "benchmarks.suffix_tree", name]) for name in TEXTS)


if __name__ == "__main__":
    sys.exit(main())
