"""Enumerates every outcome on tiny vocabularies: the rules must give back the target's own distribution."""

from __future__ import annotations

import itertools

import mindspore as ms
import numpy as np
import pytest

from ms_spec.verify import acceptance

VOCAB = 3


def tables(rng, length, kind):
    """Conditional distributions given every prefix of fewer than ``length`` ids: {prefix: [VOCAB]}."""
    out = {}
    for size in range(length):
        for prefix in itertools.product(range(VOCAB), repeat=size):
            p = rng.dirichlet(np.full(VOCAB, 0.7))
            if kind == "zeros":
                p[rng.integers(VOCAB)] = 0
                p /= p.sum()
            if kind == "one_hot":
                p = np.eye(VOCAB)[rng.integers(VOCAB)]
            out[prefix] = p
    return out


def chain(table, ids):
    """Probability of ids under the conditional distributions."""
    return float(np.prod([table[ids[:i]][x] for i, x in enumerate(ids)]))


def outcomes(p, q, num_drafts, rule):
    """For each possible draft: (draft, its probability, chance of each accepted length, distribution that follows)."""
    drafts = [d for d in itertools.product(range(VOCAB), repeat=num_drafts) if chain(q, d) > 0]
    p_rows = np.array([[p[d[:i]] for i in range(num_drafts + 1)] for d in drafts], np.float32)
    q_rows = np.array([[q[d[:i]] for i in range(num_drafts)] + [np.zeros(VOCAB)] for d in drafts], np.float32)
    at = np.array(drafts)[..., None]
    p_x = np.take_along_axis(p_rows[:, :-1], at, 2)[..., 0]
    q_x = np.take_along_axis(q_rows[:, :-1], at, 2)[..., 0]
    ratios = acceptance.likelihood_ratios(ms.Tensor(p_x), ms.Tensor(q_x))
    chance = np.zeros((len(drafts), num_drafts + 1))
    if rule == "standard":
        weights = np.ones((len(drafts), num_drafts + 1), np.float32)
        a = acceptance.standard_acceptance(ratios).asnumpy().astype(np.float64)
        for i in range(num_drafts + 1):
            chance[:, i] = a[:, :i].prod(1) * (1 - a[:, i] if i < num_drafts else 1)
    else:
        weights_t = acceptance.block_weights(ratios)
        weights = weights_t.asnumpy()
        inner = slice(1, num_drafts)
        masses = acceptance.residual_masses(
            ms.Tensor(weights[:, inner]), ms.Tensor(p_rows[:, inner]), ms.Tensor(q_rows[:, inner])
        )
        h = acceptance.block_acceptance(weights_t[:, 1:], masses).asnumpy().astype(np.float64)
        for i in range(num_drafts + 1):
            chance[:, i] = (h[:, i - 1] if i else 1) * (1 - h[:, i:]).prod(1)
    follow = np.stack(
        [
            acceptance.residual(*(ms.Tensor(x) for x in (weights[:, i : i + 1], p_rows[:, i], q_rows[:, i]))).asnumpy()
            for i in range(num_drafts + 1)
        ],
        1,
    ).astype(np.float64)
    follow /= follow.sum(2, keepdims=True)
    return [(d, chain(q, d), chance[j], follow[j]) for j, d in enumerate(drafts)]


def joint(p, rows, num_drafts):
    """Distribution of the first num_drafts + 1 ids; what one step leaves open the target fills in."""
    out = np.zeros((VOCAB,) * (num_drafts + 1))
    for draft, weight, chance, follow in rows:
        for accepted in range(num_drafts + 1):
            for token in range(VOCAB):
                start = (*draft[:accepted], token)
                mass = weight * chance[accepted] * follow[accepted][token]
                if mass == 0:
                    continue
                for rest in itertools.product(range(VOCAB), repeat=num_drafts + 1 - len(start)):
                    ids = (*start, *rest)
                    tail = np.prod([p[ids[:i]][ids[i]] for i in range(len(start), num_drafts + 1)])
                    out[ids] += mass * tail
    return out


def expected_length(rows):
    return sum(weight * (chance * np.arange(len(chance))).sum() for _, weight, chance, _ in rows)


@pytest.mark.parametrize("num_drafts", [2, 3])
@pytest.mark.parametrize("p_kind", ["dense", "zeros", "one_hot"])
@pytest.mark.parametrize("q_kind", ["dense", "zeros", "one_hot"])
def test_both_rules_give_the_targets_distribution(num_drafts, p_kind, q_kind):
    rng = np.random.default_rng([num_drafts, len(p_kind), len(q_kind)])
    for _ in range(2):
        p, q = tables(rng, num_drafts + 1, p_kind), tables(rng, num_drafts, q_kind)
        wanted = np.zeros((VOCAB,) * (num_drafts + 1))
        for ids in itertools.product(range(VOCAB), repeat=num_drafts + 1):
            wanted[ids] = chain(p, ids)
        rows = {rule: outcomes(p, q, num_drafts, rule) for rule in ("standard", "block")}
        for rule in rows:
            assert np.abs(joint(p, rows[rule], num_drafts) - wanted).max() <= 1e-6, rule
        assert expected_length(rows["block"]) >= expected_length(rows["standard"]) - 1e-6


def test_the_enumeration_notices_a_wrong_residual():
    rng = np.random.default_rng(0)
    p, q = tables(rng, 3, "dense"), tables(rng, 2, "dense")
    wanted = np.array([[[chain(p, (a, b, c)) for c in range(3)] for b in range(3)] for a in range(3)])
    rows = [(d, w, chance, np.array([p[d[:i]] for i in range(3)])) for d, w, chance, _ in outcomes(p, q, 2, "block")]
    assert np.abs(joint(p, rows, 2) - wanted).max() > 1e-3


def test_block_accepts_strictly_more_where_a_later_draft_makes_up_for_an_earlier_one():
    # The first draft is too likely under q, the second too unlikely: as a block they are what the target wants.
    p = {(): np.array([0.3, 0.7, 0.0]), (0,): np.array([0.9, 0.1, 0.0])}
    q = {(): np.array([0.9, 0.1, 0.0]), (0,): np.array([0.3, 0.7, 0.0])}
    for prefix in [(1,), (2,)]:
        p[prefix], q[prefix] = np.array([0.5, 0.5, 0.0]), np.array([0.5, 0.5, 0.0])
    p.update({prefix: np.array([1.0, 0.0, 0.0]) for prefix in itertools.product(range(3), repeat=2)})
    lengths = {rule: expected_length(outcomes(p, q, 2, rule)) for rule in ("standard", "block")}
    assert lengths["block"] > lengths["standard"] + 0.05, lengths


@pytest.mark.parametrize("drafted", [True, False])
def test_short_and_one_hot_drafts_have_a_closed_residual_mass(drafted):
    rng = np.random.default_rng(5)
    p = rng.dirichlet(np.ones(4), (6, 1)).astype(np.float32)
    x = rng.integers(0, 4, (6, 1))
    q = np.eye(4, dtype=np.float32)[x] * drafted
    weight = rng.random((6, 1)).astype(np.float32)
    wanted = np.maximum(weight[..., None] * p.astype(np.float64) - q, 0).sum(2)
    at = np.take_along_axis(p, x[..., None], 2)[..., 0]
    seen = acceptance.one_hot_residual_masses(ms.Tensor(weight), ms.Tensor(at), ms.Tensor(np.full((6, 1), drafted)))
    np.testing.assert_allclose(seen.asnumpy(), wanted, atol=1e-6)


def test_lengths():
    u = ms.Tensor(np.array([[0.1, 0.9, 0.1], [0.9, 0.9, 0.1], [0.9, 0.9, 0.9], [0.0, 0.0, 0.0]], np.float32))
    h = ms.Tensor(np.array([[0.5] * 3, [0.5] * 3, [0.5] * 3, [1.0, 0.0, 0.0]], np.float32))
    assert acceptance.standard_length(u, h).asnumpy().tolist() == [1, 0, 0, 1]
    assert acceptance.block_length(u, h).asnumpy().tolist() == [3, 3, 0, 1]


def test_entropy_threshold():
    h = np.array([[0.0, 0.1, 3.0], [8.0, 0.5, 1.0]], np.float32)
    seen = acceptance.entropy_threshold(ms.Tensor(h), 0.4, 0.95).asnumpy()
    np.testing.assert_allclose(seen, np.minimum(np.exp(-0.4 * h), 0.95), rtol=1e-5)
    np.testing.assert_allclose(acceptance.entropy_threshold(ms.Tensor(h), 0.0, 0.7).asnumpy(), 0.7, rtol=1e-5)
