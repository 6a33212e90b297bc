from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from ms_spec.randomness import _mix, _mix_int, matched_uniforms, step_uniforms


def streams():
    """Every way in which neighbours can be correlated: consecutive positions, seeds, samples, columns."""
    n = 4000
    yield "positions", np.concatenate([matched_uniforms(7, 0, t, 8) for t in range(0, n, 8)])
    yield "seeds", np.array([matched_uniforms(s, 0, 3, 1)[0] for s in range(n)])
    yield "samples", np.array([matched_uniforms(3, s, 0, 1)[0] for s in range(n)])
    for c in (0, 3, 4, 5, 8):
        yield f"column {c}", np.array([step_uniforms(11, 0, t, 4)[c] for t in range(n)])


@pytest.mark.parametrize("name,u", list(streams()), ids=lambda x: x if isinstance(x, str) else "")
def test_uniform_and_not_autocorrelated(name, u):
    assert u.dtype == np.float32 and u.min() >= 0 and u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    assert stats.chisquare(np.bincount((u * 64).astype(int), minlength=64)).pvalue > 1e-3
    low = (u.astype(np.float64) * 2**24).astype(np.int64) % 16  # the low bits are as good as the high ones
    assert stats.chisquare(np.bincount(low, minlength=16)).pvalue > 1e-3
    for lag in (1, 2, 5):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 4 / np.sqrt(len(u))


def test_columns_seeds_and_samples_are_independent():
    steps = np.stack([step_uniforms(1, 0, t, 4) for t in range(4000)])
    other_seed = np.stack([step_uniforms(2, 0, t, 4) for t in range(4000)])
    other_sample = np.stack([step_uniforms(1, 1, t, 4) for t in range(4000)])
    matched = np.stack([matched_uniforms(1, 0, t, 1) for t in range(4000)])
    both = np.concatenate([steps, other_seed, other_sample, matched], 1)
    corr = np.corrcoef(both.T) - np.eye(both.shape[1])
    assert np.abs(corr).max() < 5 / np.sqrt(4000)
    pairs = (steps[:, 0] * 8).astype(int) * 8 + (steps[:, 4] * 8).astype(int)
    assert stats.chisquare(np.bincount(pairs, minlength=64)).pvalue > 1e-3


def test_no_number_serves_two_purposes():
    seen = [step_uniforms(5, s, t, 4) for s in range(2) for t in range(300)]
    seen += [matched_uniforms(5, s, 0, 300) for s in range(2)]
    values = np.concatenate(seen)
    # 24 bits leave a few birthday collisions; shared keys would leave hundreds.
    assert len(values) - len(np.unique(values)) < 10


def test_a_position_keeps_its_number_and_a_width_changes_nothing():
    whole = matched_uniforms(42, 1, 0, 40)
    for t in range(40):
        for w in (1, 5):
            np.testing.assert_array_equal(matched_uniforms(42, 1, t, w)[: 40 - t], whole[t : t + w])
    narrow, wide = step_uniforms(42, 1, 9, 0), step_uniforms(42, 1, 9, 4)
    assert narrow.shape == (2,) and wide.shape == (10,)
    assert narrow[0] == wide[4]
    np.testing.assert_array_equal(step_uniforms(42, 1, 9, 2)[:2], wide[:2])


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_any_64_bit_seed_and_no_global_state(seed):
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    with np.errstate(all="raise"):
        first = step_uniforms(seed, 0, 0, 4)
    np.testing.assert_array_equal(first, step_uniforms(seed, 0, 0, 4))
    np.testing.assert_array_equal(before, np.random.get_state()[1])
    assert not np.array_equal(first, step_uniforms((seed + 1) % 2**64, 0, 0, 4))


def test_the_hash_is_the_published_one():
    # SplitMix64 seeded with 0 starts with these three numbers.
    golden = 0x9E3779B97F4A7C15
    wanted = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [_mix_int(golden * i) for i in (1, 2, 3)] == wanted
    assert [int(x) for x in _mix(np.array([golden * i % 2**64 for i in (1, 2, 3)], np.uint64))] == wanted
