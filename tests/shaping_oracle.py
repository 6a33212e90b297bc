"""What logits become, and log-probabilities, in plain NumPy and float64. Written from the definitions, not the code."""

from __future__ import annotations

from collections import Counter

import numpy as np

COMMON_WISHES = [
    {"frequency_penalty": -2.0},
    {"frequency_penalty": 2.0},
    {"presence_penalty": 1.5, "repetition_penalty": 1.3},
    {"logit_bias": {9: 4.0, 40: -100.0}, "frequency_penalty": 0.3},
    {"allowed_token_ids": list(range(3, 30)), "repetition_penalty": 1.2},
]


def shaped(
    logits,
    prompt=(),
    output=(),
    *,
    repetition_penalty=1.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    logit_bias=None,
    allowed_token_ids=None,
    bad_words=(),
) -> np.ndarray:
    """One row, float64 [V]. ``output``: the ids generated so far. ``bad_words``: id sequences."""
    x = np.asarray(logits, np.float64).copy()
    if allowed_token_ids is not None:
        x[[i for i in range(len(x)) if i not in set(allowed_token_ids)]] = -np.inf
    for token, value in (logit_bias or {}).items():
        x[token] += value
    for token in {*prompt, *output}:
        x[token] = x[token] / repetition_penalty if x[token] > 0 else x[token] * repetition_penalty
    for token, times in Counter(output).items():
        x[token] -= frequency_penalty * times + presence_penalty
    for word in bad_words:
        if list(word[:-1]) == list(output[len(output) - len(word) + 1 :]) and len(word) <= len(output) + 1:
            x[word[-1]] = -np.inf
    return x


def log_softmax(logits) -> np.ndarray:
    """Float64, of the last axis."""
    x = np.asarray(logits, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def check_entry(entry, token, logits, most, tolerance=1e-5) -> None:
    """One place: ``entry`` is {id: Logprob}; ``logits`` are the model's own."""
    x, told = np.asarray(logits), log_softmax(logits)
    order = np.lexsort((np.arange(len(x)), -x))[:most].tolist()
    assert list(entry) == [token, *(other for other in order if other != token)]
    for rank, other in enumerate(order, 1):
        assert entry[other].rank == rank
    if token not in order:
        assert entry[token].rank == int((x >= x[token]).sum())
    for other, one in entry.items():
        assert abs(one.logprob - told[other]) < tolerance
