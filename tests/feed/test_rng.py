"""The random numbers of a transform: a hash of seed, position and call. Their bits are in tests/golden."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.feed.rng import Rng, normal_quantile

LINE = np.arange(100_000)


@pytest.mark.parametrize("tail", [(), (1,), (3,), (2, 5), (0,), (4, 0, 2)])
def test_every_draw_is_one_row_per_sample(tail):
    rng = Rng(1, np.arange(6))
    for drawn, dtype in (
        (rng.uniform(*tail), "float64"),
        (rng.integers(0, 9, *tail), "int64"),
        (rng.normal(*tail), "float64"),
    ):
        assert drawn.shape == (6, *tail)
        assert drawn.dtype == dtype


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(-1, 2**63 - 1), min_size=1, max_size=8), st.integers(0, 4))
def test_a_row_depends_on_its_position_alone(seed, positions, tail):
    together = Rng(seed, np.array(positions))
    draws = [together.uniform(tail), together.integers(-3, 50, tail), together.normal(tail), together.normal()]
    for row, position in enumerate(positions):
        alone = Rng(seed, np.array([position]))
        found = [alone.uniform(tail), alone.integers(-3, 50, tail), alone.normal(tail), alone.normal()]
        for one, all_rows in zip(found, draws, strict=True):
            assert np.array_equal(one[0], all_rows[row])
        assert alone.generator(0).random() == together.generator(row).random()


def test_calls_seeds_positions_and_places_all_differ():
    rng = Rng(1, LINE)
    draws = [
        rng.uniform(),
        rng.uniform(),
        Rng(2, LINE).uniform(),
        Rng(1, LINE + len(LINE)).uniform(),
        *rng.uniform(3).T,
    ]
    every = np.concatenate(draws)
    assert len(np.unique(every)) == len(every)
    for k, first in enumerate(draws):
        for second in draws[:k]:
            assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(len(LINE))


def test_neighbouring_positions_are_independent():
    drawn = Rng(0, LINE).uniform()
    for lag in (1, 2, 4, 256, 1024):
        assert abs(np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]) < 5 / math.sqrt(len(LINE))


def test_uniform_fills_the_unit_interval():
    drawn = Rng(3, LINE).uniform(4).reshape(-1)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts, _ = np.histogram(drawn, bins=1000, range=(0, 1))
    assert chi_square_z(counts) < 5


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 4), (10, 1000), (-(2**40), 2**40), (0, 3 * 2**30), (5, 2**63)])
def test_integers_include_low_and_exclude_high(low, high):
    drawn = Rng(9, LINE).integers(low, high, 2).reshape(-1)
    assert drawn.min() >= low
    assert drawn.max() <= high - 1
    if high - low <= 1000:
        assert len(np.unique(drawn)) == high - low
    bins = high - low if high - low <= 1000 else 50
    counts = np.bincount(((drawn - low).astype(float) * bins / (high - low)).astype(int), minlength=bins)
    assert bins == 1 or chi_square_z(counts) < 5


def chi_square_z(counts):
    """Standard deviations beyond what equal chances give."""
    expected = counts.sum() / len(counts)
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize(("low", "high"), [(3, 3), (4, 3), (0, 2**63 + 1), (-(2**63) - 1, 0), (-(2**63), 2**63)])
def test_empty_and_too_wide_ranges_are_refused(low, high):
    with pytest.raises(mr.ConfigError, match="integers"):
        Rng(0, LINE[:2]).integers(low, high)


def test_integers_reach_both_ends_of_int64():
    rng = Rng(0, LINE[:5])
    assert rng.integers(2**63 - 1, 2**63).tolist() == [2**63 - 1] * 5
    assert rng.integers(-(2**63), -(2**63) + 1).tolist() == [-(2**63)] * 5


def test_normal_has_the_moments_of_the_normal_distribution():
    drawn = Rng(5, LINE).normal(4).reshape(-1)
    n = len(drawn)
    assert abs(drawn.mean()) < 5 / math.sqrt(n)
    assert abs(drawn.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((drawn**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((drawn**4).mean() - 3) < 5 * math.sqrt(96 / n)
    uniform = np.array([statistics.NormalDist().cdf(x) for x in drawn[:20_000]])
    assert chi_square_z(np.histogram(uniform, bins=100, range=(0, 1))[0]) < 5


def test_the_normal_quantile_is_exact_to_its_last_digits():
    steps = 2.0 ** -np.arange(1, 53)
    chances = np.concatenate((steps, 1 - steps, [2.0**-53, 1e-300], np.random.default_rng(0).random(20_000)))
    expected = [statistics.NormalDist().inv_cdf(p) for p in chances.tolist()]
    assert np.allclose(normal_quantile(chances), expected, rtol=2e-15, atol=1e-16)


def test_the_normal_quantile_is_odd_and_rises():
    chances = np.linspace(0, 0.5, 10_001)[1:-1]
    below, above = normal_quantile(chances), normal_quantile(1 - chances)
    assert np.allclose(below, -above, rtol=1e-12)
    assert np.all(np.diff(below) > 0)
    assert normal_quantile(np.array([0.5]))[0] == 0


def test_normal_is_finite_at_both_ends():
    class Ends(Rng):
        def _bits(self, tail):
            return np.array([0, 2**64 - 1], np.uint64)

    low, high = Ends(0, LINE[:2]).normal()
    assert -9 < low == -high < -8


def test_a_generator_starts_anew_and_differs_per_sample():
    rng = Rng(4, np.array([0, 1, 2, -1]))
    firsts = [rng.generator(row).random() for row in range(4)]
    assert len(set(firsts)) == 4
    rng.uniform()
    assert [rng.generator(row).random() for row in range(4)] == firsts
    assert isinstance(rng.generator(0).bit_generator, np.random.Philox)
