"""The rules as Cells, in graph mode, against plain Python over mixed batches, and their law by chi-square."""

from __future__ import annotations

import flat
import numpy as np
import pytest
from flat import Flat
from rules_oracle import block, match, standard
from sampling_oracle import distribution, entropy, make_rows
from scipy import stats

from ms_spec.models.ops import plain_sampling
from ms_spec.verify.rates import conditional_rates, rates_for_length
from ms_spec.verify.rules import make_rule

V, K, N = 11, 3, 8
SAMPLING = np.array([[0, 0, 1, 0], [0.8, 0, 0.95, 0], [1, 4, 1, 0], [1.5, 0, 1, 0.2]], np.float32)


def batch(rng, vocab=V, k=K, n=N, sharp=1.5):
    """Random requests: greedy and sampled, with 0 to k drafts, the last request being padding."""
    lengths = rng.integers(0, k + 1, n)
    live = np.arange(k + 1) <= lengths[:, None]
    live[-1] = False
    rows = make_rows(n, k + 1, live, position=np.arange(k + 1) + rng.integers(0, 9, (n, 1)))
    logits = (rng.normal(size=(n, k + 1, vocab)) * sharp).astype(np.float32)
    q = rng.dirichlet(np.ones(vocab), (n, k)).astype(np.float32)
    drafts = np.array([[rng.choice(vocab, p=np.float64(row) / np.float64(row).sum()) for row in one] for one in q])
    best = logits[:, :k].argmax(2)
    drafts = np.where(rng.random((n, k)) < 0.5, best, drafts)  # so that some are accepted everywhere
    drafts = np.where(live[:, 1:], drafts, -1).astype(np.int32)
    return {
        "rows": rows,
        "live": live,
        "grid": logits,
        "logits": logits.reshape(-1, vocab)[rows[3]],
        "drafts": drafts,
        "q": q,
        "sampling": SAMPLING[rng.integers(0, len(SAMPLING), n)],
        "banned": np.where(rng.random((n, 2)) < 0.3, rng.integers(0, vocab, (n, 2)), -1).astype(np.int32),
        "banned_until": rng.integers(0, 9, n).astype(np.int32),
        "uniforms": rng.random((n, 2 * (k + 1))).astype(np.float32),
    }


def make(*args, **kwargs):
    return Flat(make_rule(*args, **kwargs))


def call(net, b, dense):
    rest = [b[name] for name in ("sampling", "banned", "banned_until", "uniforms")]
    return flat.call(net, b["logits"], b["rows"], b["drafts"], b["q"] if dense else None, *rest)


def expected(b, i, rule, dense, theta=None):
    """What request i must get."""
    drafts = [int(x) for x in b["drafts"][i] if x >= 0]
    position = dict(zip(b["rows"][3], b["rows"][1]))
    w = b["grid"].shape[1]
    p = np.array(
        [
            distribution(
                b["grid"][i, c],
                *(float(x) for x in b["sampling"][i]),
                banned=b["banned"][i] if position[i * w + c] + 1 < b["banned_until"][i] else (),
            )
            for c in range(len(drafts) + 1)
        ]
    )
    u = b["uniforms"][i]
    if rule == "match":
        return match(p, drafts, u)
    q = b["q"][i, : len(drafts)].astype(np.float64) if dense else np.eye(p.shape[1])[drafts]
    u_accept = u[: len(drafts)].astype(np.float64)
    if theta:
        alpha, threshold = theta
        u_accept = u_accept * [min(np.exp(-alpha * entropy(b["grid"][i, c])), threshold) for c in range(len(drafts))]
    return {"standard": standard, "block": block}[rule](p, q, drafts, u_accept, u[w - 1])


def check(b, out, rule, dense, theta=None):
    emitted, count, accepted = out
    for i in range(N - 1):
        tokens, number = expected(b, i, rule, dense, theta)
        assert accepted[i] == number, i
        assert count[i] == number + 1
        assert emitted[i].tolist() == tokens + [-1] * (K + 1 - len(tokens)), i
    assert accepted[-1] == 0 and (emitted[-1] == -1).all()  # padding


CASES = [
    ("match", {}, False, None),
    ("standard", {"dense": True}, True, None),
    ("block", {"method": "block", "dense": True}, True, None),
    ("standard", {"entropy": True, "posterior_alpha": 0.3, "posterior_threshold": 0.6}, False, (0.3, 0.6)),
    ("block", {"method": "block", "entropy": True}, False, (0.4, 0.95)),
    ("block", {"method": "block", "entropy": True, "dense": True, "posterior_alpha": 0.0}, True, (0.0, 0.95)),
]


@pytest.mark.parametrize("rule,options,dense,theta", CASES)
def test_rule_equals_its_definition(backend, rule, options, dense, theta):
    rng = np.random.default_rng(1)
    net = make(backend, K + 1, **options)
    assert net.cell.matched == (rule == "match")
    lengths = set()
    for _ in range(12):
        b = batch(rng)
        out = call(net, b, dense)
        check(b, out, rule, dense, theta)
        lengths |= set(out[2].tolist())
    assert lengths == set(range(K + 1))


@pytest.mark.parametrize("options", [{}, {"dense": True}, {"method": "block", "dense": True}, {"entropy": True}])
def test_greedy_requests_do_as_the_argmax_says_under_every_rule(backend, options):
    rng = np.random.default_rng(2)
    net = make(backend, K + 1, **options)
    for _ in range(6):
        b = batch(rng)
        b["sampling"][::2] = SAMPLING[0]
        b["banned_until"][:] = 0
        emitted, _, accepted = call(net, b, "dense" in options)
        for i in range(0, N - 1, 2):
            best = b["grid"][i].argmax(1)
            same = 0
            while same < K and b["drafts"][i, same] == best[same]:
                same += 1
            assert accepted[i] == same
            assert emitted[i, : same + 1].tolist() == best[: same + 1].tolist()


@pytest.mark.parametrize("options", [{}, {"method": "block", "dense": True}, {"entropy": True}])
def test_poisoned_logits_end_the_request_and_nothing_else(backend, options):
    rng = np.random.default_rng(3)
    net = make(backend, K + 1, **options)
    b = batch(rng)
    b["drafts"][0] = b["grid"][0, :K].argmax(1)
    live = np.ones((N, K + 1), bool)
    b["rows"] = make_rows(N, K + 1, live, position=np.tile(np.arange(K + 1) + 20, (N, 1)))
    b["drafts"] = np.maximum(b["drafts"], 0)
    b["sampling"][0] = SAMPLING[0]
    b["logits"] = b["grid"].reshape(-1, V)[b["rows"][3]].copy()
    good = call(net, b, "dense" in options)
    b["logits"][2, 5] = np.nan  # request 0, column 2
    emitted, count, accepted = call(net, b, "dense" in options)
    assert emitted[0].tolist() == [*b["drafts"][0, :2].tolist(), -1, -1]
    assert (count[0], accepted[0]) == (3, 2)
    for seen, wanted in zip((emitted, count, accepted), good):
        np.testing.assert_array_equal(seen[1:], wanted[1:])


def test_one_draft_by_block_equals_standard_token_for_token(backend):
    rng = np.random.default_rng(4)
    nets = [make(backend, 2, method=m, dense=True) for m in ("standard", "block")]
    for _ in range(10):
        b = batch(rng, k=1)
        for x, y in zip(*(call(net, b, True) for net in nets)):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("options", [{}, {"dense": True}, {"method": "block", "dense": True}, {"entropy": True}])
def test_width_one_just_samples(backend, options):
    b = batch(np.random.default_rng(5), k=0)
    b["drafts"] = np.full((N, 1), -1, np.int32)  # MindSpore has no use for empty tensors
    net = make(backend, 1, **options)
    emitted, count, accepted = call(net, b, False)
    assert emitted.shape == (N, 1) and (count == 1).all() and (accepted == 0).all()
    for i in range(N - 1):
        assert emitted[i].tolist() == expected(b, i, "match", False)[0]


def test_matching_emits_what_plain_decoding_emits(backend):
    # Right drafts, wrong drafts, no drafts: position by position the token is the one the uniform picks.
    rng = np.random.default_rng(6)
    net, plain = make(backend, K + 1), make(backend, 1)
    b = batch(rng)
    emitted, count, _ = call(net, b, False)
    for column in range(K + 1):
        one = {
            **b,
            "rows": make_rows(N, 1, position=np.full((N, 1), 50)),
            "logits": b["grid"][:, column],
            "drafts": b["drafts"][:, :1],
            "uniforms": b["uniforms"][:, column : column + 2],
        }
        one["banned_until"] = np.zeros(N, np.int32)
        wanted = call(plain, one, False)[0][:, 0]
        free = (b["rows"][1].max() + 1 >= b["banned_until"]) & (b["banned"] < 0).all(1)
        for i in np.nonzero(free[:-1] & (count[:-1] > column))[0]:
            assert emitted[i, column] == wanted[i]


@pytest.mark.parametrize("options", [{}, {"dense": True}, {"method": "block", "dense": True}])
def test_first_tokens_follow_the_target(backend, options):
    rng = np.random.default_rng(7)
    n, vocab = 2000, 8
    logits = np.float32(rng.normal(size=(3, vocab)))
    q = rng.dirichlet(np.ones(vocab), 2).astype(np.float32)
    q[1, 0] = 0
    q[1] /= q[1].sum()
    net = make(backend, 3, **options)
    first, second = np.zeros(vocab), np.zeros(vocab)
    p = [distribution(row, 1.0, 0, 1.0, 0.0) for row in logits]
    for _ in range(5):
        drafts = np.stack([rng.choice(vocab, n, p=np.float64(row) / np.float64(row).sum()) for row in q], 1)
        b = {
            "rows": make_rows(n, 3),
            "logits": np.tile(logits, (n, 1)),
            "drafts": drafts.astype(np.int32),
            "q": np.tile(q, (n, 1, 1)),
            "sampling": np.tile(np.array([[1, 0, 1, 0]], np.float32), (n, 1)),
            "banned": np.full((n, 1), -1, np.int32),
            "banned_until": np.zeros(n, np.int32),
            "uniforms": rng.random((n, 6)).astype(np.float32),
        }
        emitted, count, _ = call(net, b, "dense" in options)
        first += np.bincount(emitted[:, 0], minlength=vocab)
        # The second token is complete once the target fills in for the requests that ended before it.
        tail = np.where(count > 1, emitted[:, 1], rng.choice(vocab, n, p=p[1]))
        second += np.bincount(tail, minlength=vocab)
    for seen, wanted in zip((first, second), p):
        assert stats.chisquare(seen, wanted * seen.sum()).pvalue > 1e-3


def test_synthetic_rates_are_met(backend):
    rng = np.random.default_rng(8)
    n = 4000
    net = make(backend, 3, method="synthetic", rates=(0.7, 0.2))
    b = batch(rng, k=2, n=n)
    b["rows"] = make_rows(n, 3)
    b["logits"] = b["grid"].reshape(-1, V)
    b["drafts"] = np.where(np.arange(n)[:, None] < 10, -1, rng.integers(0, V, (n, 2))).astype(np.int32)
    emitted, count, accepted = call(net, b, False)
    assert (accepted[:10] == 0).all() and (count == accepted + 1).all()
    np.testing.assert_allclose([(accepted[10:] > i).mean() for i in range(2)], (0.7, 0.2), atol=0.03)
    both = accepted == 2
    np.testing.assert_array_equal(emitted[both, :2], b["drafts"][both])
    assert (emitted[both, 2] >= 0).all()


def test_rates():
    assert rates_for_length(3.5, 4) == (1.0, 1.0, 0.5, 0.0)
    np.testing.assert_allclose(conditional_rates([0.8, 0.4, 0.0, 0.0], 4), [0.8, 0.5, 0.0, 0.0])
    for bad in ([0.5], [0.5, 0.6], [1.1, 0.5], [0.5, -0.1]):
        with pytest.raises(ValueError, match="synthetic_acceptance_rates"):
            conditional_rates(bad, 2)
    with pytest.raises(ValueError, match="synthetic_acceptance_length"):
        rates_for_length(0.5, 2)


def test_one_hot_drafts_are_matched_under_block_as_well():
    assert type(make_rule(plain_sampling, 2, method="block")) is type(make_rule(plain_sampling, 2))


def test_contradictory_settings_are_refused():
    with pytest.raises(ValueError, match="enable_entropy_verify"):
        make_rule(plain_sampling, 2, method="synthetic", entropy=True, rates=(1.0,))
    with pytest.raises(ValueError, match="allowed are"):
        make_rule(plain_sampling, 2, method="blocks")
