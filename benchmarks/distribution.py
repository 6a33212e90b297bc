"""``python -m benchmarks.distribution``: chi-square tests of sampled tokens on the real model.

What must come out is computed by another program: transformers on torch in float32, and NumPy for temperature, top-k
and top-p. Two parts:

- the whole engine with n-gram drafts: thousands of short answers to one prompt, each with a seed of its own; the first,
  second and third token, and the first two together, against their exact distributions.
- the standard and the block rule, as Cells, with a drafter that is wrong on purpose: half of what it proposes is ranked
  backwards and the rest the model would never say. Logits are the model's own at three positions of a text; the
  positions that a step did not reach are drawn plainly, so the three tokens must follow the product of their
  distributions.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.baseline import torch_model
from ms_spec import LLM, SamplingParams
from ms_spec.models.loading import load
from ms_spec.runtime import graph_thread, setup_mindspore

TEXT = "The cat sat on the mat and looked at the bird. The dog sat on the"
TEMPERATURE, TOP_K, TOP_P = 0.8, 8, 0.95
LEAST_P = 1e-4
"""A right program falls below this in one of ten thousand tests."""
Joint = Mapping[tuple[int, ...], float]


def transformed(logits: np.ndarray) -> np.ndarray:
    """float64 [V]: the distribution after temperature, top-k and top-p."""
    x = np.asarray(logits, np.float64) / TEMPERATURE
    order = np.argsort(-x, kind="stable")[:TOP_K]
    p = np.exp(x[order] - x[order[0]])
    p /= p.sum()
    before = np.cumsum(p) - p
    p = np.where(before < TOP_P, p, 0)
    full = np.zeros(len(x))
    full[order] = p / p.sum()
    return full


def joint_distribution(model: Any, prompt: Sequence[int], length: int) -> dict[tuple[int, ...], float]:
    """Every possible continuation of ``length`` tokens and its probability."""
    import torch

    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown = {}
        heads = list(known)
        with torch.inference_mode():
            for start in range(0, len(heads), 32):
                part = heads[start : start + 32]
                logits = model(torch.tensor([[*prompt, *head] for head in part])).logits[:, -1].float().numpy()
                for head, row in zip(part, logits):
                    p = transformed(row)
                    grown.update({(*head, int(i)): known[head] * float(p[i]) for i in np.nonzero(p)[0]})
        known = grown
    return known


def marginal(joint: Joint, places: Sequence[int]) -> Counter[tuple[int, ...]]:
    """The distribution of the tokens at ``places``."""
    summed: Counter[tuple[int, ...]] = Counter()
    for tokens, mass in joint.items():
        summed[tuple(tokens[place] for place in places)] += mass  # type: ignore[assignment]
    return summed


def p_value(wanted: Mapping[Any, float], seen: Sequence[Any]) -> float:
    """Chi-square; cells that expect fewer than 5 are pooled. 0 if something impossible was seen."""
    from scipy import stats

    counts = Counter(seen)
    if any(wanted.get(cell, 0) <= 0 for cell in counts):
        return 0.0
    expected, observed, rest = [], [], [0.0, 0.0]
    for cell, mass in wanted.items():
        if mass * len(seen) >= 5:
            expected.append(mass * len(seen))
            observed.append(counts[cell])
        else:
            rest[0] += mass * len(seen)
            rest[1] += counts[cell]
    if rest[0] >= 5:
        expected.append(rest[0])
        observed.append(int(rest[1]))
    elif expected:
        expected[-1] += rest[0]
        observed[-1] += int(rest[1])
    if len(expected) < 2:
        return 1.0
    return float(stats.chisquare(observed, np.array(expected) * sum(observed) / sum(expected)).pvalue)


def judge(name: str, joint: Joint, samples: Sequence[tuple[int, ...]], say: Callable[[str], None]) -> int:
    """Prints the p-values of a set of samples of three tokens. Returns how many are too small."""
    bad = 0
    for title, places in (("first", [0]), ("second", [1]), ("third", [2]), ("first two", [0, 1])):
        wanted = marginal(joint, places)
        p = p_value(wanted, [tuple(one[place] for place in places) for one in samples])
        bad += p < LEAST_P
        say(f"{name}: {title} token{'s' if len(places) > 1 else ''}: p = {p:.4f} ({len(wanted)} outcomes)")
    return bad


def engine_samples(model: str, ids: list[int], count: int) -> tuple[list[tuple[int, ...]], int, int]:
    """Three tokens of each of ``count`` answers, and how many drafts were verified and accepted."""
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
    with LLM(model, max_num_seqs=8, max_model_len=128, speculative_config=speculation) as llm:
        llm._engine.scheduler._adaptive = False
        # Four tokens, so that drafts for the third are verified too.
        params = [
            SamplingParams(
                temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P, max_tokens=4, seed=1000 + i, ignore_eos=True
            )
            for i in range(count)
        ]
        outputs = llm.generate([ids] * count, params)
        total = llm.metrics()
    samples = [tuple(one.outputs[0].token_ids[:3]) for one in outputs]
    return samples, total.num_draft_tokens, total.num_accepted_tokens


def rule_samples(method: str, logits: np.ndarray, count: int) -> tuple[list[tuple[int, ...]], int, int]:
    """The same by one rule's Cell with bad drafts. logits: float32 [3, V]."""
    return graph_thread().run(_rule_samples, method, logits, count)


def bad_drafter(p: np.ndarray) -> np.ndarray:
    """float32 [V]: half on the tokens of p with their probabilities reversed, half on tokens that p forbids."""
    q = np.zeros_like(p)
    possible = np.nonzero(p)[0]
    ranked = possible[np.argsort(p[possible])]
    q[ranked] = 0.5 * p[ranked[::-1]]
    q[np.nonzero(p == 0)[0][:5]] = 0.1
    return (q / q.sum()).astype(np.float32)


def _rule_samples(method: str, logits: np.ndarray, count: int) -> tuple[list[tuple[int, ...]], int, int]:
    setup_mindspore("cpu")
    from mindspore import Tensor, nn

    from ms_spec.models.ops import select
    from ms_spec.verify.rules import make_rule

    n, w, vocab = 32, 3, logits.shape[1]

    class Rule(nn.Cell):
        """Takes the rows as single tensors: a tuple of tensors from outside would be a constant."""

        def __init__(self) -> None:
            super().__init__()
            self.rule = make_rule(select("cpu"), w, method=method, dense=True)

        def construct(self, logits, token, position, request, place, live, tables, *rest):
            return self.rule(logits, (token, position, request, place, live, tables), *rest)

    rule, rng = Rule(), np.random.default_rng(0)
    p = [transformed(row) for row in logits]
    q = np.stack([bad_drafter(row) for row in p[:2]])
    cells = np.arange(n * w, dtype=np.int32)
    zeros = np.zeros(n * w, np.int32)
    rows = (zeros, cells % w, cells // w, cells, np.array([n * w], np.int32), np.zeros((n, 1), np.int32))
    fixed = [Tensor(np.tile(logits.astype(np.float32), (n, 1))), *map(Tensor, rows)]
    after = [
        Tensor(np.tile(q, (n, 1, 1))),
        Tensor(np.tile(np.array([TEMPERATURE, TOP_K, TOP_P, 0], np.float32), (n, 1))),
        Tensor(np.full((n, 1), -1, np.int32)),
        Tensor(np.zeros(n, np.int32)),
    ]
    samples: list[tuple[int, ...]] = []
    accepted = 0
    while len(samples) < count:
        drafts = np.stack([_draw(q[i].astype(np.float64), rng.random(n)) for i in range(2)], 1).astype(np.int32)
        uniforms = rng.random((n, 2 * w)).astype(np.float32)
        emitted, num_emitted, num_accepted = (
            out.asnumpy() for out in rule(*fixed, Tensor(drafts), *after, Tensor(uniforms))
        )
        accepted += int(num_accepted.sum())
        plain = np.stack([_draw(row, rng.random(n)) for row in p], 1)
        tokens = np.where(np.arange(w) < num_emitted[:, None], emitted, plain)
        samples += [tuple(map(int, row)) for row in tokens]
    assert vocab > tokens.max()
    return samples, 2 * len(samples), accepted


def _draw(p: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    possible = np.nonzero(p)[0]
    running = np.cumsum(p[possible])
    return possible[np.minimum(np.searchsorted(running, uniforms * running[-1], side="right"), len(possible) - 1)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distribution", description=__doc__)
    parser.add_argument("--samples", type=int, default=3000, help="of each part (default: %(default)s)")
    parser.add_argument("--model", default="smollm2-135m", help="default: %(default)s")
    options = parser.parse_args(arguments)
    import torch

    say = lambda text: print(text, flush=True)  # noqa: E731
    loaded = load(options.model)
    model = torch_model(loaded, "float32")
    ids = list(loaded.tokenizer.encode(TEXT))
    bad = 0

    say(f"engine with n-gram drafts: {options.samples} answers")
    samples, drafted, accepted = engine_samples(options.model, ids, options.samples)
    say(f"engine: {accepted} of {drafted} drafts accepted")
    bad += judge("engine", joint_distribution(model, ids, 3), samples, say) + (not 0 < accepted < drafted)

    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, [-1, -7, -9]].float().numpy()
    p = [transformed(row) for row in logits]
    support = [np.nonzero(row)[0] for row in p]
    product: Joint = {
        (int(a), int(b), int(c)): float(p[0][a] * p[1][b] * p[2][c])
        for a in support[0]
        for b in support[1]
        for c in support[2]
    }
    for method in ("standard", "block"):
        samples, drafted, accepted = rule_samples(method, logits, options.samples)
        say(f"{method} rule, bad drafter: {accepted} of {drafted} drafts accepted")
        bad += judge(f"{method} rule", product, samples, say) + (not 0 < accepted < drafted)
    say(
        "all as it should be"
        if not bad
        else f"{bad} checks failed (p below {LEAST_P}, or no draft accepted or refused)"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
