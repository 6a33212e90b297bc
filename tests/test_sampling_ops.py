"""Plain and fused sampling operators against NumPy: filters, ties, bans, odd sizes, poisoned and dead rows."""

from __future__ import annotations

import flat
import numpy as np
import pytest
from flat import Flat
from sampling_oracle import distribution, entropy, inverse_cdf, make_rows

INF = np.float32(np.inf)


@pytest.fixture(scope="module")
def nets(backend):
    return {name: Flat(getattr(backend, name)()) for name in ("Probs", "InverseCDF", "Entropy", "Grid")}


def probs(nets, logits, rows, sampling, banned=None, until=None):
    n = len(sampling)
    banned = np.full((n, 1), -1, np.int32) if banned is None else np.asarray(banned, np.int32)
    until = np.zeros(n, np.int32) if until is None else np.asarray(until, np.int32)
    return flat.call(nets["Probs"], logits, rows, np.asarray(sampling, np.float32), banned, until)


def same_distribution(seen, wanted):
    np.testing.assert_array_equal(seen > 0, wanted > 1e-37)
    np.testing.assert_allclose(seen, wanted, atol=3e-6)


FILTERS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.8, 0, 0.95, 0.0),
    (0.8, 1, 1.0, 0.0),
    (1.0, 7, 1.0, 0.0),
    (1.0, 5000, 1.0, 0.0),
    (1.0, -1, 1.0, 0.0),
    (1.3, 20, 0.5, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.7, 30, 0.9, 0.05),
    (1e-6, 0, 1.0, 0.0),
    (1e-6, 5, 0.9, 0.1),
    (50.0, 0, 0.999, 0.0),
]


@pytest.mark.parametrize("vocab", [37, 4500])
def test_every_filter(nets, vocab):
    rng = np.random.default_rng(vocab)
    n = len(FILTERS)
    logits = (rng.normal(size=(2 * n, vocab)) * 2).astype(np.float32)
    rows = make_rows(n, 2)
    seen = probs(nets, logits, rows, FILTERS)
    for r in range(2 * n):
        wanted = distribution(logits[r], *(float(np.float32(x)) for x in FILTERS[rows[2][r]]))
        same_distribution(seen[r], wanted)


def test_ties_at_a_threshold_are_kept_and_the_argmax_is_the_lowest_id(nets):
    logits = np.log(np.array([[1, 4, 2, 4, 2, 2, 1, 0.5]], np.float32)).repeat(5, 0)
    sampling = [(1, 1, 1, 0), (1, 3, 1, 0), (1, 0, 0.3, 0), (1, 0, 0.6, 0), (0, 0, 1, 0)]
    seen = probs(nets, logits, make_rows(5, 1), sampling)
    kept = [{1}, {1, 2, 3, 4, 5}, {1, 3}, {1, 2, 3, 4, 5}, {1}]
    assert [set(np.nonzero(row)[0].tolist()) for row in seen] == kept


def test_all_equal_logits(nets):
    # Every value shares one bucket of the histogram, down to the last bit.
    logits = np.zeros((3, 5000), np.float32)
    seen = probs(nets, logits, make_rows(3, 1), [(1, 0, 0.5, 0), (1, 10, 1, 0), (0.5, 0, 1, 0.5)])
    np.testing.assert_allclose(seen, 1 / 5000, rtol=1e-5)


def test_infinite_and_poisoned_logits(nets):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(8, 100)).astype(np.float32)
    logits[0, 50:] = -INF
    logits[1, :] = -INF
    logits[2, 99] = np.nan
    logits[3, 0] = INF
    logits[4, ::2] = -INF
    logits[5, 3] = np.nan
    sampling = [(1, 0, 0.9, 0)] * 4 + [(0, 0, 1, 0)] * 2 + [(1, 0, 1, 0)] * 2
    rows = make_rows(8, 1)
    seen = probs(nets, logits, rows, sampling)
    for r in range(8):
        same_distribution(seen[r], distribution(logits[r], *(float(np.float32(x)) for x in sampling[r])))
    tokens = flat.call(nets["InverseCDF"], seen, rows, np.full((8, 1), 0.5, np.float32))[:, 0]
    assert (tokens[[1, 2, 3, 5]] == -1).all() and (tokens[[0, 4, 6, 7]] >= 0).all()
    h = flat.call(nets["Entropy"], logits, rows)
    assert np.isfinite(h).all() and abs(h[0, 0] - entropy(logits[0])) < 1e-5


def test_banned_ids_up_to_their_position(nets):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(6, 40)).astype(np.float32)
    logits[:, 7] = 9
    logits[:, 39] = 8
    position = np.array([[3, 4], [3, 4], [3, 4]])
    rows = make_rows(3, 2, position=position)
    banned, until = [[7, -1], [7, 39], [-1, -1]], [5, 5, 5]
    sampling = [(0, 0, 1, 0), (1, 0, 0.9, 0), (1, 0, 0.9, 0)]
    seen = probs(nets, logits, rows, sampling, banned, until)
    for r in range(6):
        q = rows[2][r]
        ban = banned[q] if rows[1][r] + 1 < until[q] else ()
        same_distribution(seen[r], distribution(logits[r], *(float(np.float32(x)) for x in sampling[q]), banned=ban))
    assert seen[0].argmax() == 39 and seen[1].argmax() == 7
    everything = [[0, 1, 2]] * 3
    none_left = probs(nets, logits[:, :3].copy(), rows, sampling, everything, until)
    assert (none_left[[0, 2, 4]] == 0).all() and (none_left[[1, 3, 5]].sum(1) > 0.99).all()


def test_inverse_cdf(nets):
    rng = np.random.default_rng(2)
    p = rng.random((64, 4500)).astype(np.float32)
    p[rng.random(p.shape) < 0.97] = 0
    p[5] = 0
    p[6] = np.eye(4500, dtype=np.float32)[4499]
    p[7:] *= rng.random((57, 1)).astype(np.float32) * 3  # sums are scaled out
    u = rng.random((32, 2)).astype(np.float32)
    u[0] = 0
    u[4] = np.float32(1 - 2**-24)
    rows = make_rows(32, 2)
    seen = flat.call(nets["InverseCDF"], p, rows, u).ravel()
    for r in range(64):
        wanted = inverse_cdf(p[r], float(u.ravel()[r]))
        if seen[r] != wanted:  # within rounding of a step of the running sum
            running = np.cumsum(p[r], dtype=np.float64) / p[r].sum(dtype=np.float64)
            assert np.abs(running[[seen[r], wanted]] - u.ravel()[r]).min() < 1e-5
        assert seen[r] == -1 or p[r, seen[r]] > 0
    assert (
        seen[5] == -1 and seen[6] == 4499 and seen[0] == np.nonzero(p[0])[0][0] and seen[8] == np.nonzero(p[8])[0][-1]
    )


def test_entropy_and_grid_stand_at_their_cells(nets):
    rng = np.random.default_rng(3)
    live = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]], bool)
    rows = make_rows(4, 3, live)
    logits = (rng.normal(size=(12, 77)) * 3).astype(np.float32)
    h, grid = flat.call(nets["Entropy"], logits, rows), flat.call(nets["Grid"], logits, rows)
    assert h.shape == (4, 3) and grid.shape == (4, 3, 77)
    for r in range(12):
        cell = divmod(int(rows[3][r]), 3)
        if r < rows[4][0]:
            assert abs(h[cell] - entropy(logits[r])) < 2e-5
            np.testing.assert_array_equal(grid[cell], logits[r])
        else:
            assert h[cell] == 0 and (grid[cell] == 0).all()


def test_rows_keep_their_bits_whatever_stands_beside_them(nets):
    rng = np.random.default_rng(4)
    vocab = 9000
    logits = (rng.normal(size=(10, vocab)) * 2).astype(np.float32)
    sampling = np.array(
        [(0.8, 0, 0.95, 0), (0, 0, 1, 0), (1, 50, 1, 0), (0.7, 40, 0.9, 0.02), (1, 0, 1, 0)], np.float32
    )
    u = rng.random((5, 2)).astype(np.float32)
    rows = make_rows(5, 2)
    p = probs(nets, logits, rows, sampling)
    tokens = flat.call(nets["InverseCDF"], p, rows, u)
    h = flat.call(nets["Entropy"], logits, rows)
    for q in range(5):
        one = make_rows(1, 2)
        alone = probs(nets, logits[2 * q : 2 * q + 2], one, sampling[q : q + 1])
        np.testing.assert_array_equal(alone, p[2 * q : 2 * q + 2])
        np.testing.assert_array_equal(flat.call(nets["InverseCDF"], alone, one, u[q : q + 1])[0], tokens[q])
        np.testing.assert_array_equal(flat.call(nets["Entropy"], logits[2 * q : 2 * q + 2], one)[0], h[q])
    live = np.array([[1, 1], [0, 0], [1, 0], [0, 0], [1, 1]], bool)
    part = make_rows(5, 2, live)
    shuffled = logits[part[3]]
    shuffled[part[4][0] :] = np.nan  # what dead rows hold does not matter
    few = probs(nets, shuffled, part, sampling)
    np.testing.assert_array_equal(few[: part[4][0]], p[part[3]][: part[4][0]])
    assert (few[part[4][0] :] == 0).all()
    seen = flat.call(nets["InverseCDF"], few, part, u)
    np.testing.assert_array_equal(seen, np.where(live, tokens, -1))


def test_frequencies_follow_top_k_and_top_p(nets):
    from scipy import stats

    logits = np.log(np.array([[0.35, 0.3, 0.15, 0.1, 0.06, 0.04]], np.float32)).repeat(2, 0)
    rng = np.random.default_rng(5)
    u = rng.random((2, 20000)).astype(np.float32)
    sampling = [(1, 2, 1, 0), (1, 0, 0.6, 0)]
    p = probs(nets, logits, make_rows(2, 1), sampling).repeat(20000, 0)
    tokens = flat.call(nets["InverseCDF"], p, make_rows(2, 20000), u)
    for row in tokens:
        seen = np.bincount(row, minlength=6)
        assert seen[2:].sum() == 0
        assert stats.chisquare(seen[:2], 20000 * np.array([35, 30]) / 65).pvalue > 1e-3


def test_the_argmax_is_the_lowest_id_across_blocks_too(nets):
    logits = np.zeros((2, 9000), np.float32)
    logits[0, [4200, 8999]] = 3
    logits[1, [10, 4100, 8200]] = 3
    seen = probs(nets, logits, make_rows(2, 1), [(0, 0, 1, 0)] * 2)
    assert [np.nonzero(row)[0].tolist() for row in seen] == [[4200], [10]]


def test_the_largest_uniform_never_picks_what_has_no_probability(nets):
    # A sum of lanes and a sum of elements round differently: the goal may lie behind the last id of any probability.
    p = np.random.default_rng(6).random((64, 4090)).astype(np.float32)
    p[:, 4083:] = 0
    u = np.full((64, 1), 1 - 2**-24, np.float32)
    tokens = flat.call(nets["InverseCDF"], p, make_rows(64, 1), u)[:, 0]
    assert (tokens <= 4082).all() and (tokens > 4000).all()
