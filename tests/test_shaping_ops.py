"""Penalties, biases, bad words and log-probabilities, plain and fused, against NumPy and transformers' processors."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
import torch
from mindspore import Tensor, nn
from sampling_oracle import distribution, make_rows
from shaping_oracle import check_entry, shaped
from transformers import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from ms_spec.logprobs import entries
from ms_spec.models.ops import plain_sampling, plain_shaping
from ms_spec.models.ops.interface import ASKED

V, N, W, L, MOST = 37, 6, 3, 40, 5
WISHES = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"logit_bias": {3: 2.5, 30: -4.0}, "repetition_penalty": 0.8},
    {"allowed_token_ids": [1, 2, 3, 20, 21, 36], "logit_bias": {20: 1.0, 5: 9.0}},
    {},
    {"presence_penalty": 1.1, "repetition_penalty": 1.7, "frequency_penalty": 0.2, "logit_bias": {0: 1.0}},
]


class Shaped(nn.Cell):
    """probs(logits, rows, sampling, banned, banned_until, shaping), in tensors alone: a tuple would be a constant."""

    def __init__(self, probs: nn.Cell) -> None:
        super().__init__()
        self.probs = probs

    def construct(self, logits, token, position, request, cell, count, tables, sampling, banned, until, *shaping):
        rows = (token, position, request, cell, count, tables)
        if len(shaping) == 0:
            return self.probs(logits, rows, sampling, banned, until)
        return self.probs(logits, rows, sampling, banned, until, shaping)


class Told(nn.Cell):
    def __init__(self, logprobs: nn.Cell) -> None:
        super().__init__()
        self.logprobs = logprobs

    def construct(self, logits, token, position, request, cell, count, tables, tokens, asked):
        return self.logprobs(logits, (token, position, request, cell, count, tables), tokens, asked)


@pytest.fixture(scope="module", params=["plain", "fused"])
def backend(request):
    ms.set_context(mode=ms.GRAPH_MODE)
    if request.param == "plain":
        return plain_sampling.Probs(), plain_shaping.Logprobs
    from ms_spec.models.ops.cpu import sampling

    return sampling.Probs(), sampling.Logprobs


def call(cell, *arrays):
    return cell(*(Tensor(array) for array in arrays)).asnumpy()


def batch(rng, wishes=WISHES, bad_words=()):
    """Requests in slots 1..N with 3 to 20 prompt ids, some output, and up to W - 1 drafts."""
    n = len(wishes)
    sizes, done, drafts = rng.integers(3, 20, n), rng.integers(1, 12, n), rng.integers(0, W, n)
    live = np.arange(W) <= drafts[:, None]
    start = (sizes + done - 1).astype(np.int32)
    known = rng.integers(0, 12, (n, L)).astype(np.int32)  # few ids, so that they come again
    history = np.full((n + 1, L), 99999, np.int32)  # what stands at or behind `start` means nothing
    tokens = np.full((n, W), -1, np.int32)
    asked, penalties = np.zeros((n, len(ASKED)), np.int32), np.tile(np.array([[1, 0, 0]], np.float32), (n, 1))
    bias, words = np.full((n + 1, V), 5, np.float32), np.full((n + 1, 4, 4), -1, np.int32)
    for i, wish in enumerate(wishes):
        slot = n - i
        history[slot, : start[i]] = known[i, : start[i]]
        tokens[i, : 1 + drafts[i]] = known[i, start[i] : start[i] + 1 + drafts[i]]
        biased = "logit_bias" in wish or "allowed_token_ids" in wish
        asked[i, :3] = sizes[i], biased, len(bad_words)
        penalties[i] = [wish.get(f"{name}_penalty", float(name == "repetition")) for name in NAMES]
        if biased:
            bias[slot] = shaped(
                np.zeros(V), **{k: v for k, v in wish.items() if k in ("logit_bias", "allowed_token_ids")}
            )
        for place, word in enumerate(bad_words):
            words[slot, place, 4 - len(word) :] = word
    return {
        "rows": make_rows(n, W, live, position=start[:, None] + np.arange(W)),
        "logits": (rng.normal(size=(n * W, V)) * 3).astype(np.float32),
        "sampling": np.tile(np.array([[1, 0, 1, 0]], np.float32), (n, 1)),
        "banned": np.full((n, 1), -1, np.int32),
        "until": np.zeros(n, np.int32),
        "shaping": (penalties, asked, bias, words, history, np.arange(n, 0, -1).astype(np.int32), tokens, start),
        "known": known,
        "sizes": sizes,
    }


NAMES = ("repetition", "frequency", "presence")


def run(cell, b, shaping=True):
    return call(
        cell, b["logits"], *b["rows"], b["sampling"], b["banned"], b["until"], *(b["shaping"] if shaping else ())
    )


def seen_by(b, r):
    """Request, prompt and output of row r, drafts included."""
    q, position = b["rows"][2][r], b["rows"][1][r]
    ids = b["known"][q, : position + 1].tolist()
    return q, ids[: b["sizes"][q]], ids[b["sizes"][q] :]


def test_every_wish_at_every_row(backend):
    cell, rng = Shaped(backend[0]), np.random.default_rng(0)
    for _ in range(5):
        b = batch(rng)
        p, untouched = run(cell, b), run(cell, b, shaping=False)
        for r in range(int(b["rows"][4][0])):
            q, prompt, output = seen_by(b, r)
            wanted = distribution(shaped(b["logits"][r], prompt, output, **WISHES[q]), 1.0, 0, 1.0, 0.0)
            np.testing.assert_allclose(p[r], wanted, atol=3e-6)
            if not WISHES[q]:
                np.testing.assert_array_equal(p[r], untouched[r])  # whatever the neighbours ask for
        assert (p[int(b["rows"][4][0]) :] == 0).all()


def test_bad_words_end_in_the_output(backend):
    cell, rng = Shaped(backend[0]), np.random.default_rng(1)
    words = [[30], [4, 31], [2, 3, 32], [5, 5, 5, 33]]
    hits = 0
    for _ in range(40):
        b = batch(rng, [{}] * N, words)
        b["known"][:, -6:] = b["known"][:, :6]
        p = run(cell, b)
        for r in range(int(b["rows"][4][0])):
            _, prompt, output = seen_by(b, r)
            wanted = shaped(b["logits"][r], prompt, output, bad_words=words)
            hits += int(np.isinf(wanted).sum()) - 1
            np.testing.assert_allclose(p[r], distribution(wanted, 1.0, 0, 1.0, 0.0), atol=3e-6)
    assert hits > 20


def test_banned_ids_and_wishes_together(backend):
    cell, rng = Shaped(backend[0]), np.random.default_rng(2)
    b = batch(rng)
    b["banned"], b["until"] = np.full((N, 1), 3, np.int32), np.full(N, 10**6, np.int32)
    p = run(cell, b)
    for r in range(int(b["rows"][4][0])):
        q, prompt, output = seen_by(b, r)
        wanted = distribution(shaped(b["logits"][r], prompt, output, **WISHES[q]), 1.0, 0, 1.0, 0.0, banned=[3])
        np.testing.assert_allclose(p[r], wanted, atol=3e-6)


def test_logits_that_are_none_stay_none(backend):
    cell, rng = Shaped(backend[0]), np.random.default_rng(3)
    b = batch(rng)
    b["logits"][0, 5] = np.nan  # request 0
    b["shaping"][1][1, 1] = 1  # request 1 is allowed nothing
    b["shaping"][2][N - 1] = -np.inf
    p = run(cell, b)
    for r in range(int(b["rows"][4][0])):
        assert (p[r].sum() == 0) == (r == 0 or b["rows"][2][r] == 1)


def test_the_oracle_is_what_transformers_does():
    rng = np.random.default_rng(4)
    for _ in range(20):
        logits, ids = rng.normal(size=V) * 3, rng.integers(0, V, 12).tolist()
        x, before = torch.tensor(logits)[None], torch.tensor([ids])

        def same(processor, x=x, before=before, logits=logits, ids=ids, **wishes):
            seen = processor(before, x.clone())[0].numpy()
            np.testing.assert_allclose(seen, shaped(logits, ids[:5], ids[5:], **wishes), atol=1e-9)

        same(RepetitionPenaltyLogitsProcessor(1.4), repetition_penalty=1.4)
        words = [[7], [ids[-1], 8], [ids[-2], ids[-1], 9], [ids[-1], ids[-2], 10]]
        same(NoBadWordsLogitsProcessor(words, eos_token_id=[V + 1]), bad_words=words)
        same(SequenceBiasLogitsProcessor({(3,): 2.0, (9,): -1.5}), logit_bias={3: 2.0, 9: -1.5})
        allowed = sorted(set(ids))
        same(SuppressTokensLogitsProcessor([i for i in range(V) if i not in allowed]), allowed_token_ids=allowed)


@pytest.mark.parametrize("vocab", [V, 4500])
def test_logprobs(backend, vocab):
    rng = np.random.default_rng(vocab)
    live = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]], bool)
    rows = make_rows(4, 3, live)
    logits = (rng.normal(size=(12, vocab)) * 3).astype(np.float32)
    logits[0, vocab // 2 :] = -np.inf
    tokens = rng.integers(0, vocab // 2, (4, 3)).astype(np.int32)
    tokens[2, 2] = -1
    asked = np.zeros((4, len(ASKED)), np.int32)
    column = ASKED.index("logprobs")
    asked[[0, 2, 3], column] = 1
    cell = Told(backend[1](MOST, column))
    told = call(cell, logits, *rows, tokens, asked)
    assert told.shape == (4, 3, 2 + 2 * MOST)
    for r in range(int(rows[4][0])):
        q, c = divmod(int(rows[3][r]), 3)
        if asked[q, column] and tokens[q, c] >= 0:
            for most in (0, 2, MOST):
                (entry,) = entries([int(tokens[q, c])], [told[q, c].tolist()], most)
                check_entry(entry, int(tokens[q, c]), logits[r], most)
    # The same bits alone.
    one = make_rows(1, 3, live[2:3])
    np.testing.assert_array_equal(call(cell, logits[3:6], *one, tokens[2:3], asked[2:3])[0, :2], told[2, :2])


def test_equal_logits_rank_by_id():
    from ms_spec.models.ops.cpu import sampling

    logits = np.zeros((1, 20), np.float32)
    logits[0, [4, 18]] = 1
    asked = np.ones((1, len(ASKED)), np.int32)
    cell = Told(sampling.Logprobs(4, 3))
    told = call(cell, logits, *make_rows(1, 1), np.array([[7]], np.int32), asked)[0, 0]
    assert told[1] == 20 and told[2:6].tolist() == [4, 18, 0, 1]


def test_more_logprobs_than_ids(backend):
    logits = np.random.default_rng(5).normal(size=(1, 3)).astype(np.float32)
    asked = np.ones((1, len(ASKED)), np.int32)
    told = call(Told(backend[1](20, 3)), logits, *make_rows(1, 1), np.array([[2]], np.int32), asked)
    (entry,) = entries([2], told[0].tolist(), 20)
    check_entry(entry, 2, logits[0], 3)
    none = call(Told(backend[1](0, 3)), logits, *make_rows(1, 1), np.array([[2]], np.int32), asked)
    np.testing.assert_allclose(none[0, 0], told[0, 0, :2], rtol=1e-6)
